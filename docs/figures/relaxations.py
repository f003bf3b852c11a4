"""Draws the relaxation of each method with the functions that train it.

``python docs/figures/relaxations.py FOLDER`` writes the figures. The tree has depth 2 and one feature x in [-1, 1]. The
root splits at 0, and its children split at -0.5 and 0.5.
"""

from pathlib import Path
import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jtrees import isotonic, routing

X = jnp.linspace(-1, 1, 401)
SCORES = jnp.stack([X, X + 0.5, X - 0.5])
VALUES = jnp.asarray([0.0, 1.0, 0.3, 0.8])
GREYS = ("0.75", "0.45", "0.0")


def _axes(count: int, titles: tuple[str, ...]) -> tuple[plt.Figure, np.ndarray]:
    figure, axes = plt.subplots(1, count, figsize=(3.6 * count, 2.8), layout="constrained")
    for ax, title in zip(np.atleast_1d(axes), titles, strict=True):
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("x", fontsize=9)
    return figure, np.atleast_1d(axes)


def get() -> plt.Figure:
    """GET: products of sigmoids of the scaled scores, which approach the hard tree as the sharpness grows."""
    figure, axes = _axes(2, ("probability of the second leaf", "expected value of the tree"))
    for alpha, grey in zip((5, 25, 100), GREYS, strict=True):
        right = jax.nn.sigmoid(alpha * SCORES)
        axes[0].plot(X, routing.leaf_probabilities(right)[1], color=grey, label=f"sharpness {alpha}")
        axes[1].plot(X, VALUES @ routing.leaf_probabilities(right), color=grey)
    axes[1].plot(X, VALUES[routing.leaf_index(SCORES)], color="tab:red", lw=0.8, ls="--", label="hard tree")
    for ax in axes:
        ax.legend(fontsize=8)
    return figure


def raddt() -> plt.Figure:
    """RADDT: a softmin of the violations of the paths, normalised once over all leaves."""
    figure, axes = _axes(2, ("violation of the path to each leaf", "probability of the second leaf"))
    for leaf, violated in enumerate(routing.path_violations(SCORES)):
        axes[0].plot(X, violated, label=f"leaf {leaf}")
    for sharpness, grey in zip((5, 25, 100), GREYS, strict=True):
        axes[1].plot(X, routing.violation(SCORES, sharpness)[1], color=grey, label=f"sharpness {sharpness}")
    for ax in axes:
        ax.legend(fontsize=8)
    return figure


def dgt() -> plt.Figure:
    """DGT: the hard tree in the forward pass, and a gradient for every split with a score inside the window."""
    figure, axes = _axes(2, ("forwards: the hard tree", "backwards: derivative by each score"))
    output, pull = jax.vjp(lambda scores: routing.path_sum(scores, VALUES, 0.4), SCORES)
    (slopes,) = pull(jnp.ones_like(output))
    axes[0].plot(X, output, color="0")
    for name, slope in zip(("root", "left child", "right child"), slopes, strict=True):
        axes[1].plot(X, slope, label=name)
    axes[1].legend(fontsize=8)
    return figure


def latent() -> plt.Figure:
    """LatentTree: traversals between 0 and the activity of the node. A larger penalty prunes from the leaves up."""
    figure, axes = _axes(2, ("traversal of three leaves", "activity of the seven nodes"))
    scores = 2 * SCORES
    q = routing.rewards(scores)
    activity = lambda penalty: isotonic.prune(q, penalty, nested=True)
    traversed = routing.position(q, activity(1.0))
    for leaf in (0, 1, 2):
        axes[0].plot(X, traversed[3 + leaf], label=f"leaf {leaf}")
    penalties = jnp.geomspace(1, 1000, 60)
    active = jax.vmap(activity)(penalties)
    for node in range(7):
        axes[1].plot(penalties, active[:, node], label="root" if node == 0 else None, color=f"C{node}")
    axes[1].set(xscale="log", xlabel="penalty of an active node")
    for ax in axes:
        ax.legend(fontsize=8)
    return figure


def nongreedy() -> plt.Figure:
    """Non-greedy: an upper bound of the loss of a sample, which is tight for large scores."""
    figure, axes = _axes(2, ("loss and bound, one split", "loss and bound, depth 2"))
    score = jnp.linspace(-2, 2, 401)
    losses = jnp.asarray([1.0, 0.0])
    shown = ((score[None], losses, score), (2 * SCORES, jnp.asarray([1.0, 0.2, 0.6, 0.0]), X))
    for ax, (scores, leaf_losses, x) in zip(axes, shown, strict=True):
        bound = (leaf_losses[:, None] - 2 * routing.path_violations(scores)).max(0)
        ax.plot(x, bound, color="0", label="bound")
        ax.plot(x, leaf_losses[routing.leaf_index(scores)], color="tab:red", ls="--", label="loss of the hard tree")
        ax.legend(fontsize=8)
    axes[0].set_xlabel("score of the split", fontsize=9)
    return figure


def tel() -> plt.Figure:
    """TEL: the smooth step, exactly 0 or 1 outside its width, and the number of leaves that a sample reaches."""
    figure, axes = _axes(2, ("smooth step", "leaves reached, of 4"))
    for gamma, grey in zip((2.0, 1.0, 0.25), GREYS, strict=True):
        right = routing.smooth_step(SCORES, gamma)
        axes[0].plot(X, right[0], color=grey, label=f"gamma {gamma:g}")
        axes[1].plot(X, (routing.leaf_probabilities(right) > 0).sum(0), color=grey)
    axes[0].plot(X, jax.nn.sigmoid(6 * X), color="tab:red", lw=0.8, ls="--", label="a sigmoid")
    axes[0].legend(fontsize=8)
    axes[1].set_ylim(0, 4.2)
    return figure


ALL = {"get": get, "raddt": raddt, "dgt": dgt, "latent": latent, "nongreedy": nongreedy, "tel": tel}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "jtrees"
    for name, figure in ALL.items():
        figure().savefig(folder / f"{name}.svg", metadata={"Date": None})
