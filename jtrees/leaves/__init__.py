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
    """A class of trainable leaves, with the fields that do not depend on data.

    Attributes:
      leaf_type: the class.
      fixed: static fields of the class, by name.
    """

    leaf_type: Any
    fixed: dict[str, Any]

    def start(self, *arguments: Any) -> Any:
        """Returns random initial leaves. The arguments are ``(key, num_leaves, x, y, outputs)``."""
        return self.leaf_type.start(*arguments, **self.fixed)

    def empty(self, *arguments: Any) -> Any:
        """Returns leaves to be refitted. The arguments are ``(num_leaves, features, outputs, dtype)``."""
        return self.leaf_type.empty(*arguments, **self.fixed)


def kind_of(leaves: str, task: Task) -> Kind:
    """Returns the kind of trainable leaves: :class:`Values` with the task's loss, or :class:`Linear`.

    Args:
      leaves: ``"constant"`` or ``"linear"``.
      task: the prediction task.

    Raises:
      ValueError: for an unknown name, or for linear leaves if the loss is not the squared error.

    Example:
      >>> jtrees.leaves.kind_of("linear", jtrees.Regression()).leaf_type.__name__
      'Linear'
      >>> jtrees.leaves.kind_of("constant", jtrees.Regression(loss_function="poisson")).fixed
      {'loss': Poisson()}
    """
    check_choice("leaves", leaves, KINDS)
    if leaves == "constant":
        return Kind(Values, {"loss": task.leaf_loss})
    if not task.is_least_squares:
        where = "in classification" if isinstance(task, Classification) else f"for {task}"
        raise ValueError(f'leaves must be "constant" {where}, unless trees are added: Boosted(GET(leaves="linear"))')
    return Kind(Linear, {})


_list_public_names(__name__)
