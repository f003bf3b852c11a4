"""Finds losses by name."""

from jtrees import validation as checks
from jtrees.losses.base import Loss
from jtrees.losses.deviances import Gamma, Poisson, Tweedie
from jtrees.losses.errors import AbsoluteError, Huber, Quantile, SquaredError
from jtrees.losses.own import OwnLoss
from jtrees.losses.samples import SampleLoss

_NAMES: dict[str, type[Loss]] = {
    "squared_error": SquaredError,
    "absolute_error": AbsoluteError,
    "huber": Huber,
    "quantile": Quantile,
    "poisson": Poisson,
    "gamma": Gamma,
    "tweedie": Tweedie,
}


def named(loss: "str | Loss | SampleLoss") -> Loss:
    """Returns the loss with a name such as ``"poisson"``.

    A loss is returned unchanged. A function is wrapped in :class:`OwnLoss`.

    Raises:
      ValueError: for an unknown name, or for another type.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        checks.check_choice("loss", loss, tuple(_NAMES), "a loss, or a function (outputs, y) -> (n,)")
        return _NAMES[loss]()
    if not callable(loss):
        raise ValueError(f"loss must be a function (outputs, y) -> (n,), got {checks.quoted(loss)}")
    return OwnLoss(loss)


def measure(loss: Loss) -> str:
    """Returns the name of a mean loss, such as ``"mean squared error"``, or ``"loss"`` for a user's loss."""
    names: dict[type, str] = {
        SquaredError: "mean squared error",
        AbsoluteError: "mean absolute error",
        Huber: "Huber loss",
        Quantile: "pinball loss",
        Poisson: "Poisson deviance",
        Gamma: "gamma deviance",
        Tweedie: "Tweedie deviance",
    }
    return names.get(type(loss), "loss")
