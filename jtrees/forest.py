"""Forest: an ensemble of models of the same type."""

from typing import Any, Literal, get_args

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Float
import numpy as np

from jtrees import io, losses, prediction, processes, pytree, sharding, validation as checks
from jtrees.tasks.base import linked
from jtrees.tree import ObliqueTree

_GATHERED = 2**18  # number of values gathered at once on the host


@io.model
@pytree.dataclass
class Forest:
    """Models of the same type and shape, usually trees, whose predictions are combined.

    ``len(forest)`` is the number of models, and ``forest[i]`` is one model.

    Attributes:
      trees: an :class:`ObliqueTree` (or another model) in which every array has a leading axis over the trees. All
        trees have the same origin and the same medians.
      combine: how predictions are combined: ``"mean"``, ``"sum"``, or ``"vote"``. The result of a vote is, for each
        class, the fraction of the trees for which the class is the most probable.
      link: link function of the combined prediction: ``"identity"``; ``"exp"``; ``"softmax"`` or ``"sorted"``, over the
        last axis.
    """

    trees: Any
    combine: Literal["mean", "sum", "vote"] = pytree.field(pytree_node=False, default="mean")
    link: losses.Link = pytree.field(pytree_node=False, default="identity")

    def __len__(self) -> int:
        return jax.tree.leaves(self.trees)[0].shape[0]

    def __getitem__(self, i: int) -> Any:
        if not -len(self) <= i < len(self):  # also ends iteration over the trees
            raise IndexError(f"the forest has {len(self)} trees, got index {i}")
        return jax.tree.map(lambda a: a[i], self.trees)

    def combined(self, answers: Float[Array, "trees n *k"]) -> Float[Array, "n *k"]:
        """Returns the combination of the trees' predictions.

        Raises:
          ValueError: for votes of trees with scalar predictions, or for an unknown option.
        """
        checks.check_choice("combine", self.combine, ("mean", "sum", "vote"))
        checks.check_choice("link", self.link, get_args(losses.Link))
        if self.combine == "vote":
            answers = votes(answers)
        out = answers.sum(0) if self.combine == "sum" else answers.mean(0)
        return linked(self.link, out)

    def apply(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns predictions, as a pure function of arrays."""
        x = prediction.fill_gaps(x, self.medians)
        trees = self.trees.replace(medians=None) if isinstance(self.trees, ObliqueTree) else self.trees
        return self.combined(jax.vmap(lambda tree: tree.apply(x))(trees))

    def predict(self, x: ArrayLike) -> Any:
        """Returns predictions. Checks x, and compiles :meth:`apply` and runs it block by block.

        Args:
          x: samples, ``(n, p)``, a NumPy or JAX array.

        Returns:
          Predictions of the same array type as x, ``(n,)`` or ``(n, k)``.

        Raises:
          ValueError: if x has a wrong rank or width, or values that are not finite. Also if the trees have an origin of
            predictions and the link is not additive over trees: the origin would be added after the link.
        """
        self.check_origin()
        if isinstance(self.trees, ObliqueTree) and not prediction.is_on_device(self, x):
            return (processes.on_host(self) if processes.lost_xla() else self)._predict_on_host(x)
        # prediction.predict scales the result like the prediction of one tree, so a sum is computed from the mean.
        if self.combine == "sum" and self.link in ("identity", "sorted"):
            return len(self) * self.replace(combine="mean").predict(x)
        return prediction.predict(self, x)

    def check_origin(self) -> None:
        """Raises ``ValueError`` for an origin of predictions that would be added after a vote or a link."""
        origin = self.trees.origin if isinstance(self.trees, ObliqueTree) else None
        if origin is None or origin.y is None:
            return
        if self.link in ("exp", "softmax") or self.combine == "vote":
            expected = f"no origin of predictions with link={checks.quoted(self.link)}, combine={self.combine!r:.80}"
            raise ValueError(f"trees must have {expected}, got {checks.quoted(origin)}")

    def _predict_on_host(self, x: Any) -> np.ndarray:
        """Returns predictions for a NumPy array in double precision."""
        origin = _first(jax.tree.map(np.asarray, self.trees.origin))  # on the host, where an index compiles nothing
        options: Any = {"scaling": origin, "medians": self.medians}
        out = prediction.evaluate_leaves(self.trees, x, finish=_outputs_of(self), **options)
        count = len(self)
        out = out if self.combine == "sum" else out / count
        if origin is not None and origin.y is not None:
            out = out + np.asarray(origin.y, np.float64) * (count if self.combine == "sum" else 1)
        return linked(self.link, out)

    @property
    def features(self) -> int:
        """Number of features, p."""
        return self.trees.features

    @property
    def scaling(self) -> Any:
        """The common scaling of the trees: see ``jtrees.prediction.predict``."""
        scaling = _first(self.trees.scaling)
        if isinstance(self.trees, Forest) and self.trees.combine == "sum" and getattr(scaling, "y", None) is not None:
            scaling = scaling.replace(y=np.asarray(scaling.y, np.float64) * len(self[0]))  # a tree predicts a share
        return scaling

    @property
    def medians(self) -> Any:
        """The medians that fill missing values, ``(p,)``, or None: see :class:`ObliqueTree`."""
        return _first(getattr(self.trees, "medians", None))

    def with_medians(self, medians: Any) -> "Forest":
        """Returns the forest with the medians that fill missing values, ``(p,)``."""
        return self.replace(trees=self.trees.with_medians(medians))

    def without_scaling(self) -> "Forest":
        """Returns the forest of scaled data."""
        return self.replace(trees=self.trees.without_scaling())

    def restored(self, scaling: Any) -> "Forest":
        """Returns a forest in the user's units, from a forest of trees of scaled data with summed outputs.

        Each tree predicts an equal share of the offset of the targets.
        """
        trees, origin = len(self), scaling.origin
        low, unit = scaling.y_low, scaling.y_unit
        if self.link == "softmax":
            low, unit = np.float64(0), np.float64(1)
        elif self.link == "exp":  # a unit of the predictions is an offset of the outputs
            low, unit = np.log(scaling.y_unit), np.float64(1)
        if origin is not None:
            additive = origin.y is not None and self.link != "exp"
            origin = origin.replace(y=np.asarray(origin.y) / np.float32(trees) if additive else None)
        scaling = scaling.replace(y_low=low / trees, y_unit=unit, origin=origin)
        on_host = jax.tree.map(np.asarray, self.trees.leaves)
        leaves = [scaling.restore_leaves(jax.tree.map(lambda a, i=i: a[i], on_host)) for i in range(trees)]
        leaves, origins = (jax.tree.map(lambda *a: np.stack(a), *parts) for parts in (leaves, [origin] * trees))
        restored = scaling.restore_splits(self.trees).replace(leaves=leaves, origin=origins).merged()
        return self.replace(trees=jax.tree.map(sharding.from_host, restored))

    def padded(self, count: int, share: Any) -> "Forest":
        """Returns a forest of ``count`` trees with the same sum. The outputs of the added trees are 0.

        ``share`` is the offset that each tree predicts, ``(*k,)``. None: the trees have no offset.
        """
        added = count - len(self)
        append = lambda a, values: np.concatenate([np.asarray(a), np.broadcast_to(values, (added, *a.shape[1:]))])
        trees = jax.tree.map(lambda a: append(a, np.zeros((), a.dtype)), self.trees.replace(origin=None))
        if (origin := self.trees.origin) is not None:
            origin = jax.tree.map(lambda a: append(a, np.asarray(a)[:1]), origin)
            if share is not None:  # the first tree predicts what the shares lack
                rest = len(self) * np.asarray(origin.y[0], np.float64) - count * np.asarray(share, np.float64)
                add = lambda a: np.concatenate([a[:1] + rest.astype(a.dtype), a[1:]])
                trees = trees.replace(leaves=trees.leaves.with_outputs(add))
                origin = origin.replace(y=np.broadcast_to(share, origin.y.shape))
        return self.replace(trees=jax.tree.map(sharding.from_host, trees.replace(origin=origin)))

    @property
    def num_parameters(self) -> int:
        """Total number of parameters of the trees (host only)."""
        return sum(self[i].num_parameters for i in range(len(self)))

    def __repr__(self) -> str:
        shared = type(self.trees).__name__
        if isinstance(self.trees, ObliqueTree):
            shared += f", depth={self.trees.depth}, features={self.trees.weights.shape[-1]}"
        return f"Forest({len(self)} x {shared}, combine={self.combine!r}, link={self.link!r})"


def _first(stacked: Any) -> Any:
    return jax.tree.map(lambda a: a[0], stacked)


def _outputs_of(forest: Forest) -> Any:
    """Returns a function of ``leaf`` and ``x`` that sums the outputs of the leaves over the trees."""
    # `leaf` has shape (n, trees). The sum is computed in double precision, block by block.
    leaves, trees = jax.tree.map(np.asarray, forest.trees.leaves), len(forest)
    checks.check_choice("combine", forest.combine, ("mean", "sum", "vote"))
    checks.check_choice("link", forest.link, get_args(losses.Link))
    vote = forest.combine == "vote"
    if leaves.is_constant:
        values = np.asarray(leaves.predictions(), np.float64)
        values = votes(values) if vote else values
        flat, first = values.reshape(-1, *values.shape[2:]), np.arange(trees) * values.shape[1]
        width = flat[:1].size  # numbers of a leaf
        block_outputs = lambda leaf, x: flat[leaf + first].sum(1)
    else:
        tree_leaves = [jax.tree.map(lambda a, i=i: a[i], leaves) for i in range(trees)]
        width = leaves.intercept[0, :1].size

        def block_outputs(leaf: np.ndarray, x: np.ndarray) -> np.ndarray:
            outputs = (part.at(reached, x) for part, reached in zip(tree_leaves, leaf.T, strict=True))
            # NumPy would add the trees of a single row in another order than the trees of several rows.
            return sum(votes(values[None])[0] if vote else values for values in outputs)  # type: ignore[return-value]

    def outputs(leaf: np.ndarray, x: np.ndarray) -> np.ndarray:
        size = max(1, _GATHERED // (trees * width))
        return np.concatenate([block_outputs(leaf[i : i + size], x[i : i + size]) for i in range(0, len(x), size)])

    return outputs


def votes(answers: Any) -> Any:
    """Returns the most probable class of each tree in one-hot encoding, from predictions ``(trees, n, k)``."""
    if answers.ndim < 3:
        raise ValueError('combine must be "mean" or "sum" for trees that predict one number, got "vote"')
    return (answers.argmax(-1)[..., None] == np.arange(answers.shape[-1])).astype(answers.dtype)
