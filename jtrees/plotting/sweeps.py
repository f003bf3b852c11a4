"""Plots sweeps: the loss against each option and against the size of the model."""

from typing import Any

import numpy as np

from jtrees.plotting._common import literal, new_axes
from jtrees.selection import SweepResult

_WIDE = 10.0  # ratio of the largest to the smallest value above which an axis is logarithmic


def plot_sweep(result: SweepResult) -> np.ndarray:
    """Plots the loss of each run of a sweep against each option, and against the size of its model.

    A point is a run, with its mean loss over the folds. A line connects the means of the finished runs that share a
    value of the option. Runs that are not finished are left out. The axes of an option that only these runs have are
    empty. Values that are not numbers stand side by side.

    Args:
      result: the result of :func:`jtrees.sweep`.

    Returns:
      The axes, one for each option and one for the sizes, ``(options + 1,)``.

    Raises:
      ValueError: if no run is finished.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.DGT(depth=1, epochs=20, widths=(), precondition=0)
      >>> result = jtrees.sweep(recipe, x, x[:, 0], grid={"learning_rate": (0.01, 0.03)}, key=jax.random.key(0))
      >>> [ax.get_xlabel() for ax in jtrees.plotting.plot_sweep(result)]
      ['learning_rate', 'numbers in the model']
    """
    rows = [row for row in result.rows() if row["state"] == "finished"]
    if not rows:
        raise ValueError("result must have a finished run to plot, got none")
    names = list(dict.fromkeys(name for options in result.options for name in options))
    width = 1 + len(names)
    axes = np.ravel(new_axes(None, ncols=width, figsize=(3.2 * width, 3), sharey=True, layout="constrained"))
    for ax, name in zip(axes, [*names, "size"], strict=True):
        shown = [row for row in rows if name in row]
        if shown:  # else only runs that are not finished have the option
            _plot(ax, [row[name] for row in shown], np.array([row["loss"] for row in shown]), connected=name != "size")
        ax.set_xlabel("numbers in the model" if name == "size" else literal(name))
    axes[0].set_ylabel("loss")
    return axes


def _plot(ax: Any, values: list[Any], losses: np.ndarray, *, connected: bool) -> None:
    is_number = all(isinstance(value, (int, float, np.number)) and not isinstance(value, bool) for value in values)
    if is_number:
        places = np.asarray(values, float)
        if places.min() > 0 and places.max() > _WIDE * places.min():
            ax.set_xscale("log")
    else:
        texts = [literal(str(value)) for value in values]
        levels = list(dict.fromkeys(texts))
        places = np.array([levels.index(text) for text in texts], float)
        ax.set_xticks(range(len(levels)), levels, rotation=30, ha="right")
    ax.plot(places, losses, "o", color="0.7", markersize=4)
    if connected:
        means = {place: losses[places == place].mean() for place in np.unique(places)}
        ax.plot(list(means), list(means.values()), color="k", marker="o", markersize=3)
