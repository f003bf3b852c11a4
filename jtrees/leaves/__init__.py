"""Kinds of leaves, and how each is fitted by a hard routing: values with a loss, and linear models.

Every kind has the same methods:

- the prediction of the leaf of each sample (``at``), the outputs (``outputs``) and losses (``losses``) of every leaf;
- fitting by a hard routing (``refit``), with shrinkage (``refit_shrunk``), and the criterion of the fit
  (``criterion``);
- the trainable form (``trainable``), the form of a hard tree (``hardened``), a change of units (``rescaled``);
- the number of parameters (``count``) and a description (``describe``).

Other modules ask leaves for what they need: whether a leaf predicts the same for every sample (``is_constant``), what
leaves choose (``choice``, ``classes``), and which loss a kernel has for them (``kernel``). The axis over the leaves
comes first in every array.
"""

from typing import Any, NamedTuple

from jtrees.leaves.hierarchical import fit_hierarchical as fit_hierarchical, refit_hierarchical as refit_hierarchical
from jtrees.leaves.linear import Linear as Linear
from jtrees.leaves.shrunk import fit_shrunk as fit_shrunk, shrunk_fit_error as shrunk_fit_error
from jtrees.leaves.values import Values as Values
from jtrees.tasks import Classification, Task
from jtrees.validation import check_choice

KINDS = ("constant", "linear")


class Kind(NamedTuple):
    """A class of trainable leaves, with the fields that do not depend on data.

    Attributes:
      of: the class.
      fixed: its static fields by name.
    """

    of: Any
    fixed: dict[str, Any]

    def start(self, *arguments: Any) -> Any:
        """Returns random initial leaves: ``(key, num_leaves, x, y, outputs)``."""
        return self.of.start(*arguments, **self.fixed)

    def empty(self, *arguments: Any) -> Any:
        """Returns leaves to be refitted: ``(num_leaves, features, outputs, dtype)``."""
        return self.of.empty(*arguments, **self.fixed)


def kind_of(leaves: str, task: Task) -> Kind:
    """Returns the kind of trainable leaves for a name: :class:`Values` with the loss of the task, or :class:`Linear`.

    Args:
      leaves: ``"constant"`` or ``"linear"``.
      task: what is predicted.

    Raises:
      ValueError: for an unknown name, and for linear leaves of another loss than the squared error.

    Example:
      >>> jtrees.leaves.kind_of("linear", jtrees.Regression()).of.__name__
      'Linear'
      >>> jtrees.leaves.kind_of("constant", jtrees.Regression(loss_function="poisson")).fixed
      {'loss': Poisson()}
    """
    check_choice("leaves", leaves, KINDS)
    if leaves == "constant":
        return Kind(Values, {"loss": task.leaf_loss})
    if not task.is_least_squares:
        what = "in classification: leaves hold class frequencies" if isinstance(task, Classification) else f"for {task}"
        raise ValueError(f'leaves must be "constant" {what}')
    return Kind(Linear, {})
