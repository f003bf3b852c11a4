"""LatentTree: a tree and what it is for, learnt together by differentiating an argmin (Zantedeschi et al., "Learning
Binary Decision Trees by Argmin Differentiation", ICML 2021, Algorithm 2).

``latent`` is the method for :func:`jtrees.train`; ``LatentTree`` is the recipe from a table to a fitted model. The
layer for larger networks is :class:`jtrees.nn.LatentTree`.
"""

from functools import lru_cache, partial
import itertools
from typing import Any, Literal, NamedTuple

from flax import nnx, struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float
import numpy as np
import optax

from jtrees import leaves as kinds, losses, prediction, routing, topology, training, validation as checks
from jtrees.methods.one_run import OneRun, check_found
from jtrees.nn.latent_tree import MAX_DEPTH, Split, activity, check_split, make_split, split_scores
from jtrees.recipes import Fit, Found, Watch, number, static
from jtrees.table import Scale, Table, mean_loss
from jtrees.tasks import Classification, Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_WIDEST = 2**15  # hidden layers: two of them make a matrix of 2**30 numbers
_MARGIN = 0.1  # of the range of the training targets: answers go no further beyond it, as those of linear leaves
PREDICTORS, INPUTS = ("linear", "mlp"), ("z", "xz")


class Architecture(NamedTuple):
    """What a model is made of, apart from its parameters: fields of :class:`LatentTree`."""

    depth: int
    split: Any = "linear"
    predictor: str = "linear"
    inputs: str = "xz"
    hidden: int = 64
    dropout: float = 0.0


class Network(nnx.Module):
    """Split functions, their biases, and the predictor on what the tree makes of a sample."""

    def __init__(self, features: int, of: Architecture, task: Task, *, dtype: Any, rngs: nnx.Rngs):
        nodes = topology.num_nodes(of.depth)
        self.split = make_split(of.split, features, nodes, hidden=of.hidden, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(nodes, dtype))
        width = 2 * nodes + 1 + (features if of.inputs == "xz" else 0)
        linear = partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        sizes = [width, *([of.hidden, of.hidden] if of.predictor == "mlp" else []), task.outputs or 1]
        self.layers = nnx.List([linear(*pair) for pair in itertools.pairwise(sizes)])
        self.of, self.task = of, task

    def scores(self, x: Float[Array, "n p"]) -> Float[Array, "nodes n"]:
        """Right iff above 0."""
        return split_scores(self.split, x, len(self.bias)) + self.bias[...][:, None]

    def answer(self, x: Float[Array, "n p"], z: Float[Array, "all_nodes n"], key: Array | None) -> Float[Array, "n *k"]:
        """What the predictor says; a key lets units drop out."""
        out = z.T if self.of.inputs == "z" else jnp.concatenate([x, z.T], axis=1)
        *hidden, last = self.layers
        for i, layer in enumerate(hidden):
            out = nnx.elu(layer(out))
            if key is not None and self.of.dropout > 0:
                kept = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - self.of.dropout, out.shape)
                out = jnp.where(kept, out / (1 - self.of.dropout), 0)
        return last(out).reshape(-1, *self.task.shape)


@lru_cache(maxsize=128)
def _graph(features: int, of: Architecture, task: Task, dtype: Any) -> tuple[nnx.GraphDef, Any]:
    """The network without its parameters, and the structure of these."""
    abstract = nnx.eval_shape(lambda: Network(features, of, task, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state, others = nnx.split(abstract, nnx.Param, ...)
    if jax.tree.leaves(others):
        raise ValueError("split must have parameters as its only state, got a module with other variables")
    return graph, jax.tree.structure(state)


def _network(params: Any, x: Array, of: Architecture, task: Task) -> Network:
    graph, structure = _graph(x.shape[1], of, task, x.dtype)
    return nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(params)))


def scores_of(params: Any, x: Float[Array, "n p"], of: Architecture, task: Task) -> Float[Array, "nodes n"]:
    """Scores of all splits."""
    return _network(params, x, of, task).scores(x)


def outputs_of(
    params: Any,
    batch: Batch,
    of: Architecture,
    task: Task,
    active: Array | None,
    penalty: Any = None,
    *,
    key: Array | None = None,
) -> Float[Array, "n *k"]:
    """What the predictor says, in a tree as active as told, or (None) as it is on these samples under a penalty."""
    network = _network(params, batch.x, of, task)
    scores = network.scores(batch.x)
    active = activity(scores, penalty, batch.weight) if active is None else active
    return network.answer(batch.x, routing.position(routing.rewards(scores), active), key)


def latent(
    of: Architecture | int,
    penalty: float | Array,
    *,
    task: Task = Regression(),
    loss: losses.SampleLoss | None = None,
) -> training.Method:
    """LatentTree: minimise the loss of a predictor on ``[x ; z]``, z the traversals of a tree that is pruned meanwhile.

    Parameters are those of a flax module. The loss is that of the soft traversal, and is its own score. ``predict``
    solves the pruning on the samples that it is given; a model fitted by the recipe keeps the activity that the nodes
    had on the training data. ``harden`` gives an :class:`ObliqueTree` where the tree says everything, that is for
    linear splits and ``inputs="z"`` with a linear predictor: its splits, nodes below an inactive one pruned, a
    constant in each leaf set from x and y; else None. Meant for features of mean 0 and deviation 1. Samples of more
    weight count for more in the pruning, too.

    Args:
      of: what the model is made of; a whole number stands for ``Architecture(depth)``.
      penalty: price of an active node *per sample*, above 0: the paper's lambda divided by the size of its batch. So
        the same penalty prunes alike whatever the number of samples. A number or a traced one.
      task: what is predicted. In classification outputs are logits.
      loss: ``(outputs, y) -> (n,)``; by default squared error (of several targets the mean), or the log loss of logits.

    Raises:
      ValueError: for a depth, a penalty, a count or a part out of range, or an unknown option.
    """
    of = checked_architecture(of if isinstance(of, Architecture) else Architecture(of))
    checks.check_number("penalty", penalty)
    loss_of = losses.sample_loss(loss, task)

    def init(batch: Batch, *, key: Array) -> Any:
        task.check(batch.y)
        network = Network(batch.x.shape[1], of, task, dtype=batch.x.dtype, rngs=nnx.Rngs(key))
        network.bias[...] = centered(split_scores(network.split, batch.x, len(network.bias)), batch.weight)
        return nnx.to_pure_dict(nnx.state(network, nnx.Param))

    def total(params: Any, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        lost = loss_of(outputs_of(params, batch, of, task, None, penalty, key=key), batch.y)
        value = losses.weighted_mean(lost, batch.weight)
        return value, value

    def predict(params: Any, x: Array) -> Array:
        return task.link(outputs_of(params, Batch(x, None), of, task, None, penalty))

    def harden(params: Any, batch: Batch) -> ObliqueTree | None:
        if not is_tree(of):
            return None
        batch = jax.tree.map(jnp.asarray, batch)
        active = activity(scores_of(params, batch.x, of, task), penalty, batch.weight)
        return hard_tree(params, batch, active, of, task)

    return training.Method(init, total, predict, harden)


def is_tree(of: Architecture) -> bool:
    """Whether the splits say everything."""
    return (of.split, of.predictor, of.inputs) == ("linear", "linear", "z")


def checked_architecture(of: Architecture) -> Architecture:
    """The same, checked; ``ValueError`` if it cannot be built."""
    check_split(of.split)
    checks.check_choice("predictor", of.predictor, PREDICTORS)
    checks.check_choice("inputs", of.inputs, INPUTS)
    checks.check_part("dropout", of.dropout)
    depth, hidden = checks.check_depth(of.depth, MAX_DEPTH), checks.check_count("hidden", of.hidden, most=_WIDEST)
    return of._replace(depth=depth, hidden=hidden, dropout=float(of.dropout))


def centered(raw: Float[Array, "nodes n"], weight: Float[Array, " n"] | None = None) -> Float[Array, " nodes"]:
    """Biases by which every split passes through the mean of the scores of the samples that reach its node."""
    inside, biases = jnp.ones_like(raw[:1], dtype=bool), []
    each = jnp.ones_like(raw[0]) if weight is None else weight
    for score in topology.levels(raw):
        count = jnp.where(inside, each, 0).sum(1)
        biases.append(-jnp.where(inside, score * each, 0).sum(1) / jnp.where(count > 0, count, 1))
        right = score + biases[-1][:, None] > 0
        inside = topology.interleave(inside & ~right, inside & right)
    return jnp.concatenate(biases)


def hard_tree(params: Any, batch: Batch, active: Array, of: Architecture, task: Task) -> ObliqueTree:
    """The hard tree of linear splits in which inactive nodes do not split, with constant leaves set from the batch."""
    network = _network(params, batch.x, of, task)
    splits = active[: topology.num_nodes(of.depth)] > 0
    weights = jnp.where(splits[:, None], network.split.kernel[...].T, 0)
    bias = jnp.where(splits, network.bias[...], -1)
    empty = kinds.kind_of("constant", task).empty(topology.num_leaves(of.depth), 0, task.shape, batch.x.dtype)
    return ObliqueTree(weights, bias, empty).refit(*batch)


# --- The model -------------------------------------------------------------------------------------------------------


@struct.dataclass
class LatentModel:
    """A fitted LatentTree: splits, activity of the nodes on the training data, predictor; in the user's own units.

    Attributes:
      params: of the network: a dict of arrays.
      active: activity of the nodes of the whole tree, ``(2**(depth + 1) - 1,)``; 0: pruned.
      scale: the map from raw features and to raw targets; None: none is made.
      architecture: what the network is made of.
      features: number of features, p.
      task: what is predicted.
      bounded: whether answers are kept near the training targets.
    """

    params: Any
    active: Array
    scale: Scale | None
    architecture: Architecture = struct.field(pytree_node=False)
    features: int = struct.field(pytree_node=False)
    task: Task = struct.field(pytree_node=False)
    bounded: bool = struct.field(pytree_node=False)

    def apply(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """What :meth:`predict` answers, as a pure function of arrays."""
        x = x if self.scale is None else self.scale.enter(x)
        outputs = outputs_of(self.params, Batch(x, None), self.architecture, self.task, self.active)
        outputs = _near_targets(outputs) if self.bounded else outputs
        predictions = self.task.link(outputs)
        return predictions if self.scale is None else self.scale.leave(predictions)

    def predict(self, x: ArrayLike) -> Any:
        """The answers, ``(n,)`` or ``(n, k)``, or class probabilities, ``(n, K)``.

        In regression by squared error answers are kept between the least and the greatest training target, and a tenth
        of their range beyond: a predictor that sees x has no bounds of its own, and what it makes of an outlier can be
        anything.

        Raises:
          ValueError: for another rank or width, or values that are not finite.
        """
        return prediction.predict(self, x)

    def traverse(self, x: ArrayLike) -> Any:
        """How far each sample is at each node of the whole tree: z, ``(nodes, n)``.

        Raises:
          ValueError: as :meth:`predict`.
        """
        x = prediction.entered(self.scale, x, self.features)
        return prediction.evaluate(_position, self.bare(), x, features=self.features).T

    @property
    def num_parameters(self) -> int:
        """Numbers that the network holds."""
        return sum(np.size(a) for a in jax.tree.leaves(self.params))

    def __repr__(self) -> str:
        of = self.architecture
        parts = f"split={of.split!r}, predictor={of.predictor!r}, inputs={of.inputs!r}, {self.task}"
        return f"LatentModel(depth={of.depth}, features={self.features}, {parts}, parameters={self.num_parameters})"

    @property
    def units(self) -> Scale | None:
        """Where samples enter and answers leave: see :func:`jtrees.prediction.predict`."""
        return self.scale

    def bare(self) -> "LatentModel":
        """The model without them."""
        return self.replace(scale=None)


def _position(model: LatentModel, x: Array) -> Array:
    return routing.position(routing.rewards(scores_of(model.params, x, model.architecture, model.task)), model.active).T


def _near_targets(outputs: Array) -> Array:
    """Answers on targets scaled to [0, 1]."""
    return jnp.clip(outputs, -_MARGIN, 1 + _MARGIN)


# --- The recipe ------------------------------------------------------------------------------------------------------


@struct.dataclass(kw_only=True)
class LatentTree(OneRun):
    """LatentTree's whole recipe: from a table of numbers to a tree and its predictor.

    Mini-batches, Adam (the paper's quasi-hyperbolic Adam was no better on two sets: ``experiments.paper_latent``), a
    learning rate divided by ten when the training loss of an epoch has not fallen for some time, split biases from the
    means of the samples that reach each node. The model is that of the last update or, with ``validation``, the one
    that did best there; its activity is solved for on the whole training part. Features are scaled to mean 0 and
    deviation 1, targets to [0, 1]. Defaults are for tables of some thousand rows; for half a million the paper has
    batches of 512, a learning rate of 0.001, a patience of 2.

    The fit's ``tree`` is the :class:`ObliqueTree` that the model stands for, where it stands for one: linear splits,
    and a linear predictor that sees z alone. Its leaves are constants or class frequencies set from the training data.
    Else it is None, and what was learnt needs its predictor. Where ``loss`` is one of your own, the loss of the fit is
    that, on scaled targets. See :class:`OneRun` for the options that it shares with others.

    Attributes:
      depth: depth of the tree, 1 to 10.
      penalty: price of an active node, per sample: the paper's lambda over its batch.
      loss: ``(outputs, y) -> (n,)`` on scaled targets, or on logits; a function of a module compiles once. By default
        squared error, or log loss.
      split: how nodes score samples: ``"linear"``, ``"elu"`` (linear, then ELU), ``"mlp"`` with one hidden layer, or
        ``(features, nodes, rngs) -> module`` from ``(n, features)`` to ``(n, nodes)``.
      predictor: ``"linear"``, or ``"mlp"``: two hidden layers, ELU.
      inputs: what the predictor sees, ``"z"`` or ``"xz"``.
      hidden: width of hidden layers.
      dropout: part of the units of the predictor's hidden layers left out in training, 0 up to but not including 1.
      patience: epochs without a lower loss before the learning rate falls.
    """

    depth: int = static(default=4)
    penalty: float = 0.01
    loss: losses.SampleLoss | None = static(default=None)
    split: Split = static(default="linear")
    predictor: Literal["linear", "mlp"] = static(default="linear")
    inputs: Literal["z", "xz"] = static(default="xz")
    hidden: int = static(default=64)
    dropout: float = static(default=0.0)
    patience: int = static(default=10)

    def architecture(self) -> Architecture:
        """What the model is made of."""
        return Architecture(self.depth, self.split, self.predictor, self.inputs, self.hidden, self.dropout)

    def checked(self, table: Table) -> Any:
        of = checked_architecture(self.architecture())
        _graph(table.x.shape[1], of, table.task, jnp.dtype(jnp.float32))  # refuses splits with a state of their own
        self._check_loss(table)
        recipe = super().checked(table).replace(depth=of.depth, hidden=of.hidden, dropout=of.dropout)
        patience = checks.check_count("patience", self.patience)
        return recipe.replace(penalty=number("penalty", self.penalty, checks.check_number), patience=patience)

    def _check_loss(self, table: Table) -> None:
        outputs = jax.ShapeDtypeStruct((len(table.x), *table.task.shape), jnp.float32)
        y = jax.ShapeDtypeStruct(table.y.shape, jnp.int32 if isinstance(table.task, Classification) else jnp.float32)
        jax.eval_shape(self.sample_loss(table.task), outputs, y)

    def work(self, p: int) -> int:
        inner = self.hidden * (self.hidden + p) if "mlp" in (self.split, self.predictor) else 0
        return 32 * topology.num_nodes(self.depth) + inner // 8

    def method(self, table: Table) -> training.Method:
        return latent(self.architecture(), self.penalty, task=table.task, loss=self.loss)

    def optimizer(self, steps: int, an_epoch: int) -> optax.GradientTransformation:
        plateau = optax.contrib.reduce_on_plateau(factor=0.1, patience=self.patience, accumulation_size=an_epoch)
        return optax.chain(optax.adam(self.learning_rate), plateau)

    def ends_in_constants(self) -> bool:
        return is_tree(self.architecture())

    def bounded(self, task: Task) -> bool:
        """Whether answers are kept near the training targets: where they are means of them."""
        return isinstance(task, Regression) and self.loss is None

    def _activity(self, params: Any, table: Table) -> Array:
        weight = None if table.weight is None else training.normalised(table.batch).weight
        return activity(scores_of(params, table.x, self.architecture(), table.task), self.penalty, weight)

    def answers(self, params: Any, table: Table, x: Array) -> Array:
        outputs = outputs_of(params, Batch(x, None), self.architecture(), table.task, self._activity(params, table))
        return _near_targets(outputs) if self.bounded(table.task) else outputs

    def end(self, state: training.TrainState, table: Table, judge: Table | None) -> Found:
        found, of = super().end(state, table, judge), self.architecture()
        active = self._activity(found.model, table)
        tree = hard_tree(found.model, table.batch, active, of, table.task) if self.ends_in_constants() else None
        return found._replace(extra={"active": active, "tree": tree})

    def finish(
        self, found: Found, start: Any, table: Table, judge: Table | None, *, scale: Scale, key: Array, watch: Watch
    ) -> Fit:
        check_found(found)
        of, p, bounded = self.architecture(), table.x.shape[1], self.bounded(table.task)
        model = LatentModel(found.model, found.extra["active"], scale, of, p, table.task, bounded)
        tree = None if found.extra["tree"] is None else scale.from_unit(found.extra["tree"])
        loss = float(found.score) if self.loss is not None else mean_loss(model, judge or table, scale)
        return Fit(model, tree, loss, int(found.step), np.zeros(0), {"active": np.asarray(found.extra["active"])})
