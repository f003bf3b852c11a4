"""Draws three oblique splits beside a hundred axis-aligned trees: ``python docs/figures/oblique.py FILE``.

The class depends on two directions across all eight features, and forms a checkerboard of two by two in their plane.
The picture shows the plane. Both models receive only the eight features.
"""

from pathlib import Path
import sys

import jax
import matplotlib.pyplot as plt
import numpy as np

import jtrees

FEATURES, TRAIN, TEST = 8, 2000, 2000


def made(rows: int, rng: np.random.Generator, directions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns random features and their classes."""
    x = rng.normal(size=(rows, FEATURES))
    plane = x @ directions
    return x, (plane[:, 0] * plane[:, 1] > 0).astype(int)


def draw() -> plt.Figure:
    """Returns the figure: the classes, a tree of depth 2, and a forest of 100 trees, with the accuracy on new rows."""
    from sklearn.ensemble import RandomForestClassifier

    rng = np.random.default_rng(0)
    directions = np.linalg.qr(rng.normal(size=(FEATURES, 2)))[0]
    x, y = made(TRAIN, rng, directions)
    new, truth = made(TEST, rng, directions)
    recipe = jtrees.GET(depth=2, starts=10, epochs=500)
    tree = jtrees.fit(recipe, x, y, key=jax.random.key(0), task="classification").tree
    forest = RandomForestClassifier(100, random_state=0).fit(x, y)
    leaves = sum(one.get_n_leaves() for one in forest.estimators_)
    side = np.linspace(-2.5, 2.5, 161)
    grid = np.stack([each.ravel() for each in np.meshgrid(side, side)], axis=1)
    at = grid @ directions.T  # the points of the plane as rows of eight features
    shown = {
        f"one oblique tree: {tree.num_leaves} leaves": (tree.predict(at)[:, 1], tree.predict(new).argmax(1)),
        f"random forest: 100 trees, {leaves:,} leaves": (forest.predict_proba(at)[:, 1], forest.predict(new)),
    }
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained", sharey=True)
    plane = new @ directions
    axes[0].scatter(*plane[:800].T, c=truth[:800], cmap="coolwarm", s=5)
    axes[0].set_title("two classes, 8 features", fontsize=10)
    for ax, (title, (probability, predicted)) in zip(axes[1:], shown.items(), strict=True):
        values = np.asarray(probability).reshape(len(side), -1)
        ax.pcolormesh(side, side, values, cmap="coolwarm", vmin=0, vmax=1, shading="nearest", rasterized=True)
        ax.set_title(f"{title}\n{100 * np.mean(np.asarray(predicted) == truth):.1f} % of new rows right", fontsize=10)
    for ax in axes:
        ax.set(xlim=(-2.5, 2.5), ylim=(-2.5, 2.5), aspect="equal", xticks=[], yticks=[])
        ax.set_xlabel("one direction across all features", fontsize=8)
    axes[0].set_ylabel("another direction", fontsize=8)
    return figure


if __name__ == "__main__":
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    draw().savefig(sys.argv[1], dpi=80)
