"""Rows to hold out: a share of the rows, or the same share of every class."""

from typing import Any

import numpy as np

from jtrees.validation import quoted


def held_out_rows(order: np.ndarray, share: float, strata: np.ndarray | None = None) -> np.ndarray:
    """Returns a share of the rows, to be held out, from numbers of the rows in random order.

    At least one row is held out, unless there are ``strata``: labels of the rows, ``(n,)``. Each label then has this
    share of its rows held out, rounded down. So every label remains.
    """
    if strata is None:
        return order[: max(1, round(share * len(order)))]
    groups = [order[strata[order] == label] for label in np.unique(strata)]
    return np.concatenate([group[: int(share * len(group))] for group in groups])


def divided(
    rows: int, share: float, random_state: Any, strata: np.ndarray | None = None, *, name: str = "share"
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the training rows and of the held-out rows, by scikit-learn, which its users expect.

    If there are ``strata``, labels of the rows, ``(n,)``, every label has this share. Errors call the share ``name``.
    """
    from sklearn.model_selection import train_test_split  # imported here because it is slow

    options: Any = {"test_size": share, "random_state": random_state, "stratify": strata}
    try:
        training, held_out = train_test_split(np.arange(rows), **options)
    except ValueError as error:
        message = str(error).replace("The test_size", "The number of held-out rows")
        raise ValueError(f"{name} must suit the {rows} rows, got {quoted(share)}: {message}") from None
    return np.asarray(training), np.asarray(held_out)
