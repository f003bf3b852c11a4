"""Kinds of leaves, and how each is fitted by a hard routing: constants, class frequencies, linear models.

Every kind has the same methods: predictions of the leaf of each sample (``at``), outputs (``outputs``) and losses
(``losses``) of every leaf, fitting by a hard routing (``refit``) and the criterion of the fit (``criterion``), its
trainable form (``trainable``), a change of units (``rescaled``), the number of parameters (``count``) and a description
(``describe``). The axis over the leaves comes first in every array.
"""

from typing import Any

from jtrees.leaves.constant import (
    Constant as Constant,
    Frequency as Frequency,
    Logit as Logit,
    class_counts as class_counts,
    constant_fit_error as constant_fit_error,
    fit_constant as fit_constant,
    fit_frequencies as fit_frequencies,
    frequencies_fit_error as frequencies_fit_error,
)
from jtrees.leaves.hierarchical import fit_hierarchical as fit_hierarchical, refit_hierarchical as refit_hierarchical
from jtrees.leaves.linear import Linear as Linear
from jtrees.leaves.shrunk import fit_shrunk as fit_shrunk, shrunk_fit_error as shrunk_fit_error
from jtrees.tasks import Classification, Task
from jtrees.validation import check_choice

KINDS = ("constant", "linear")


def kind_of(leaves: str, task: Task) -> Any:
    """Returns the class of trainable leaves for a name: :class:`Constant`, :class:`Linear`, or in classification
    :class:`Logit`.

    Args:
      leaves: ``"constant"`` or ``"linear"``.
      task: what is predicted.

    Raises:
      ValueError: for an unknown name, and for linear leaves in classification.
    """
    check_choice("leaves", leaves, KINDS)
    if not isinstance(task, Classification):
        return Constant if leaves == "constant" else Linear
    if leaves == "linear":
        raise ValueError('leaves must be "constant" in classification: leaves hold class frequencies')
    return Logit
