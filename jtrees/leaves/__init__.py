"""Defines the two kinds of leaves: values with a loss, and linear models.

Both kinds have the same methods:

- ``at`` predicts for each sample from its leaf. ``outputs`` and ``losses`` evaluate every leaf on every sample.
- ``refit`` fits leaves to the samples of a hard routing. ``refit_shrunk`` adds shrinkage. ``criterion`` is the number
  by which hard trees are compared: the loss of the fit for values, the expected error on new samples for linear models.
- ``trainable`` returns the trainable form, ``hardened`` the form of a hard tree. ``rescaled`` changes the units.
- ``count`` returns the number of parameters, and ``describe`` a text.

Other modules read properties of the leaves. ``is_constant`` says whether a leaf predicts the same for every sample.
``choice`` and ``classes`` describe the classes or actions that the predictions choose from. ``kernel`` is the name of
the loss in the kernels.

In every array the first axis is the leaf.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jtrees._public import list_public_names as _list_public_names
from jtrees.leaves.hierarchical import fit_hierarchical as fit_hierarchical
from jtrees.leaves.linear import Linear as Linear
from jtrees.leaves.shrunk import fit_shrunk as fit_shrunk
from jtrees.leaves.values import Values as Values
from jtrees.tasks import Classification, Task
from jtrees.validation import check_choice

KINDS = ("constant", "linear")


class Kind(NamedTuple):
    """Functions that make trainable leaves of one class.

    Attributes:
      start: ``(key, num_leaves, x, y, outputs) -> leaves``: random initial leaves.
      empty: ``(num_leaves, features, outputs, dtype) -> leaves``: leaves to be refitted.
    """

    start: Callable[..., Any]
    empty: Callable[..., Any]


def kind_of(leaves: str, task: Task) -> Kind:
    """Returns the kind of trainable leaves: :class:`Values` with the task's loss, or :class:`Linear`.

    Args:
      leaves: ``"constant"`` or ``"linear"``.
      task: the prediction task.

    Raises:
      ValueError: for an unknown name, or for linear leaves if the loss is not the squared error.

    Example:
      >>> type(jtrees.leaves.kind_of("linear", jtrees.Regression()).empty(4, 2, ())).__name__
      'Linear'
      >>> jtrees.leaves.kind_of("constant", jtrees.Regression(loss_function="poisson")).empty(4, 2, ()).loss
      Poisson()
    """
    check_choice("leaves", leaves, KINDS)
    if leaves == "constant":
        return Kind(partial(Values.start, loss=task.leaf_loss), partial(Values.empty, loss=task.leaf_loss))
    if not task.is_least_squares:
        where = "in classification" if isinstance(task, Classification) else f"for {task}"
        raise ValueError(f'leaves must be "constant" {where}, unless trees are added: Boosted(GET(leaves="linear"))')
    return Kind(Linear.start, Linear.empty)


_list_public_names(__name__)
