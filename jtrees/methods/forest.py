"""Bagging over any method: many trees, each trained on a bootstrap sample, side by side in one compiled program."""

from typing import Any, Literal

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
import optax

from jtrees import training, validation as checks
from jtrees.tree import ObliqueTree, evaluate


@struct.dataclass
class Forest:
    """Trees that answer together.

    Attributes:
      trees: one :class:`ObliqueTree` with a leading axis over the trees on every array; ``jax.tree.map(lambda a: a[i],
        forest.trees)`` is one of them.
      vote: whether each tree has one vote for the class that it finds most probable, rather than a mean being taken.
    """

    trees: ObliqueTree
    vote: bool = struct.field(pytree_node=False, default=False)

    @property
    def num_trees(self) -> int:
        """Number of trees."""
        return self.trees.weights.shape[0]

    def predict(self, x: ArrayLike) -> Any:
        """The mean of what the trees answer, or the share of trees that vote for each class.

        Args:
          x: samples, ``(n, p)``: NumPy (answered in NumPy) or JAX.

        Returns:
          ``(n,)``, or ``(n, k)``.

        Raises:
          ValueError: for another rank or width, or values that are not finite.
        """
        return evaluate(_votes if self.vote else _mean, self.trees, x)


def _outputs(trees: ObliqueTree, x: Array) -> Array:
    return jax.vmap(lambda tree: tree.predict(x))(trees)


def _as_votes(outputs: Array) -> Array:
    if outputs.ndim < 3:
        raise ValueError('combine must be "mean" for trees that answer one number, got "vote"')
    return jax.nn.one_hot(jnp.argmax(outputs, axis=-1), outputs.shape[-1], dtype=outputs.dtype)


def _mean(trees: ObliqueTree, x: Array) -> Array:
    return _outputs(trees, x).mean(0)


def _votes(trees: ObliqueTree, x: Array) -> Array:
    return _as_votes(_outputs(trees, x)).mean(0)


@struct.dataclass
class ForestResult:
    """What training a forest leaves.

    Attributes:
      forest: the trees.
      in_bag: how often each tree's sample holds each row, ``(trees, n)``.
      out_of_bag: what the trees that did not see a row answer for it, ``(n,)`` or ``(n, k)``; NaN where all did (a tree
        whose run was not finite is not asked, though it is in the forest).
      losses: the loss of each tree before each update, ``(trees, steps)``.
      finite: whether each run was finite, ``(trees,)``.
    """

    forest: Forest
    in_bag: Int[Array, "trees n"]
    out_of_bag: Float[Array, "n *k"]
    losses: Float[Array, "trees steps"]
    finite: Bool[Array, " trees"]


def bag_size(n: int, fraction: float) -> int:
    """Rows in a bootstrap sample of n rows.

    Raises:
      ValueError: for a fraction that is not above 0 and at most 1.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, got {fraction!r}")
    return max(1, round(fraction * n))


def train_forest(
    method: training.Method,
    x: Float[Array, "n p"],
    y: Array,
    *,
    key: Array,
    optimizer: optax.GradientTransformation,
    steps: int,
    trees: int = 30,
    fraction: float = 1.0,
    combine: Literal["mean", "vote"] = "mean",
    batch_size: int | None = None,
) -> ForestResult:
    """Trains a method on many bootstrap samples (bagging, Breiman 1996), as DGT-Forest does.

    Pure, like :func:`jtrees.train`: compile it as a whole. On a CPU two trees are trained side by side, elsewhere all.

    Args:
      method: what to train; its ``harden`` must give an :class:`ObliqueTree`.
      x: samples.
      y: targets, first axis n.
      key: for the samples, and for training.
      optimizer: any optax transformation.
      steps: number of updates of each tree.
      trees: number of trees.
      fraction: size of a bootstrap sample as a part of n, above 0 and up to 1; drawn with replacement.
      combine: ``"mean"`` of outputs, or ``"vote"`` for the class that has most of them.
      batch_size: as for :func:`jtrees.train`.

    Raises:
      ValueError: for a count, fraction or option out of range, and as :func:`jtrees.train`.
    """
    checks.check_count("trees", trees)
    if combine not in ("mean", "vote"):
        raise ValueError(f'combine must be "mean" or "vote", got {combine!r}')
    x, y = jnp.asarray(x), jnp.asarray(y)
    if x.ndim != 2 or y.shape[:1] != x.shape[:1]:
        raise ValueError(f"x must have shape (n, p) and y (n, ...), got {x.shape} and {y.shape}")
    n = x.shape[0]
    size = bag_size(n, fraction)

    def run(key: Array) -> _Tree:
        draw_key, train_key = jax.random.split(key)
        drawn = jax.random.randint(draw_key, (size,), 0, n)
        result = training.train(
            method, x[drawn], y[drawn], key=train_key, optimizer=optimizer, steps=steps, batch_size=batch_size
        )
        tree = method.harden(result.params, x[drawn], y[drawn])
        if tree is None:
            raise ValueError("method must harden to an ObliqueTree to be bagged, got one that does not")
        in_bag = jnp.zeros(n, jnp.int32).at[drawn].add(1)
        return _Tree(tree, in_bag, result.losses, result.score, result.finite)

    found = training.multi_start(run, jax.random.split(key, trees)).candidates
    outputs = _outputs(found.tree, x)
    outputs = _as_votes(outputs) if combine == "vote" else outputs
    asked = (found.in_bag == 0) & found.finite[:, None]
    asked = asked.reshape(asked.shape + (1,) * (outputs.ndim - 2))
    out_of_bag = jnp.where(asked, outputs, 0).sum(0) / asked.sum(0).astype(outputs.dtype)
    return ForestResult(Forest(found.tree, combine == "vote"), found.in_bag, out_of_bag, found.losses, found.finite)


@struct.dataclass
class _Tree:
    """One tree of a forest, as :func:`jtrees.multi_start` takes it."""

    tree: ObliqueTree
    in_bag: Array
    losses: Array
    score: Array
    finite: Array
