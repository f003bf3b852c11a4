"""Kinds of leaves, and how each is fitted from a hard routing: constants, class frequencies, linear models.

Every kind knows the same few things: what a leaf answers (``at``), what every leaf would answer (``outputs``) and lose
(``losses``), itself set anew from a hard routing (``refit``) and what the tree is then judged by (``criterion``), the
parameters to train it from (``trainable``), itself in other units (``rescaled``), the numbers that it holds (``count``)
and how it reads (``describe``). The axis over the leaves comes first in every array.
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
    mid_range as mid_range,
)
from jtrees.leaves.linear import Linear as Linear
from jtrees.leaves.shrunk import fit_shrunk as fit_shrunk, shrunk_fit_error as shrunk_fit_error
from jtrees.tasks import Classification, Task
from jtrees.validation import check_choice

KINDS = ("constant", "linear")


def kind_of(leaves: str, task: Task) -> Any:
    """The kind of leaves that is trained under a name: :class:`Constant`, :class:`Linear`, or in classification
    :class:`Logit`.

    Args:
      leaves: ``"constant"`` or ``"linear"``.
      task: what is predicted.

    Raises:
      ValueError: for another name, and for linear leaves in classification.
    """
    check_choice("leaves", leaves, KINDS)
    if not isinstance(task, Classification):
        return Constant if leaves == "constant" else Linear
    if leaves == "linear":
        raise ValueError('leaves must be "constant" in classification: leaves hold class frequencies')
    return Logit
