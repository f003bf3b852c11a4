"""LatentTree: a tree and what it is for, learnt together by differentiating an argmin (Zantedeschi et al., "Learning
Binary Decision Trees by Argmin Differentiation", ICML 2021, Algorithm 2).

``latent`` is the method for :func:`jtrees.train`; ``fit_latent`` is the recipe from a table to a fitted model. The
layer for larger networks is :class:`jtrees.nn.LatentTree`.
"""

from collections.abc import Callable
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

from jtrees import isotonic, leaves as fitting, losses, routing, topology, training, validation as checks
from jtrees.methods.table import Scale, checked_table, checked_validation
from jtrees.tree import ObliqueTree

MAX_DEPTH = 10
_MARGIN = 0.1  # of the range of the training targets: answers go no further beyond it, as those of linear leaves
SPLITS, PREDICTORS, INPUTS = ("linear", "elu", "mlp"), ("linear", "mlp"), ("z", "xz")
# (features, nodes, rngs) -> a module from (n, features) to scores (n, nodes) whose only state is parameters.
MakeSplit = Callable[[int, int, nnx.Rngs], Callable[[Array], Array]]
Split = Literal["linear", "elu", "mlp"] | MakeSplit


class Architecture(NamedTuple):
    """What a model is made of, apart from its parameters: the arguments of :func:`latent`, and ``outputs``, None for
    one number a sample, ``(n,)``.
    """

    depth: int
    outputs: int | None
    split: Any
    predictor: str
    inputs: str
    hidden: int
    dropout: float


class Network(nnx.Module):
    """Split functions, their biases, and the predictor on what the tree makes of a sample."""

    def __init__(self, features: int, of: Architecture, *, dtype: Any, rngs: nnx.Rngs):
        nodes = topology.num_nodes(of.depth)
        self.split = make_split(of.split, features, nodes, hidden=of.hidden, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(nodes, dtype))
        width = 2 * nodes + 1 + (features if of.inputs == "xz" else 0)
        linear = partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        sizes = [width, *([of.hidden, of.hidden] if of.predictor == "mlp" else []), of.outputs or 1]
        self.layers = nnx.List([linear(*pair) for pair in itertools.pairwise(sizes)])
        self.of = of

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
        return last(out) if self.of.outputs is not None else last(out)[:, 0]


def split_scores(split: Callable[[Array], Array], x: Float[Array, "n p"], nodes: int) -> Float[Array, "nodes n"]:
    """What split functions say, without the biases.

    Raises:
      ValueError: for a module of one's own that gives another shape.
    """
    raw = split(x)
    if raw.shape != (x.shape[0], nodes):
        raise ValueError(f"split must map x of shape {x.shape} to ({x.shape[0]}, {nodes}), got {raw.shape}")
    return raw.T


def make_split(kind: Split, features: int, nodes: int, *, hidden: int, dtype: Any, rngs: nnx.Rngs) -> Any:
    """Split functions of all nodes as one module: ``"linear"``, ``"elu"`` (linear, then ELU), ``"mlp"``, or one's own.

    Raises:
      ValueError: for an unknown name.
    """
    linear = partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
    if callable(kind):
        return kind(features, nodes, rngs)
    checks.check_choice("split", kind, SPLITS, "a function (features, nodes, rngs) -> module")
    if kind == "mlp":
        return nnx.Sequential(linear(features, hidden), nnx.elu, linear(hidden, nodes))
    one = linear(features, nodes, use_bias=False)
    return one if kind == "linear" else nnx.Sequential(one, nnx.elu)


@lru_cache(maxsize=128)
def _graph(features: int, of: Architecture, dtype: Any) -> nnx.GraphDef:
    abstract = nnx.eval_shape(lambda: Network(features, of, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, _, others = nnx.split(abstract, nnx.Param, ...)
    if jax.tree.leaves(others):
        raise ValueError("split must have parameters as its only state, got a module with other variables")
    return graph


def _network(params: Any, x: Array, of: Architecture) -> Network:
    return nnx.merge(_graph(x.shape[1], of, x.dtype), params)


def scores_of(params: Any, x: Float[Array, "n p"], of: Architecture) -> Float[Array, "nodes n"]:
    """Scores of all splits."""
    return _network(params, x, of).scores(x)


def activity(scores: Float[Array, "nodes n"], penalty: Any) -> Float[Array, " all_nodes"]:
    """The activity of the nodes on samples; ``penalty`` is that of one sample."""
    return isotonic.prune(routing.rewards(scores), jnp.asarray(penalty, scores.dtype) * scores.shape[1])


def outputs_of(
    params: Any, x: Array, of: Architecture, active: Array | None, penalty: Any = None, *, key: Array | None = None
) -> Float[Array, "n *k"]:
    """What the predictor says, in a tree as active as told, or (None) as it is on these samples under a penalty."""
    network = _network(params, x, of)
    scores = network.scores(x)
    active = activity(scores, penalty) if active is None else active
    return network.answer(x, routing.position(routing.rewards(scores), active), key)


def latent(
    depth: int,
    penalty: float | Array,
    *,
    classes: int | None = None,
    targets: int | None = None,
    loss: losses.SampleLoss | None = None,
    split: Split = "linear",
    predictor: Literal["linear", "mlp"] = "linear",
    inputs: Literal["z", "xz"] = "xz",
    hidden: int = 64,
    dropout: float = 0.0,
) -> training.Method:
    """LatentTree: minimise the loss of a predictor on ``[x ; z]``, z the traversals of a tree that is pruned meanwhile.

    Parameters are a state of flax modules. The loss is that of the soft traversal, and is its own score. ``predict``
    solves the pruning on the samples that it is given; a fitted model of :func:`fit_latent` keeps the activity that the
    nodes had on the training data. ``harden`` gives an :class:`ObliqueTree` where the tree says everything, that is for
    linear splits and ``inputs="z"`` with a linear predictor: its splits, nodes below an inactive one pruned, a constant
    in each leaf set from x and y; else None. Meant for features of mean 0 and deviation 1.

    Args:
      depth: depth of the tree, 1 to 10.
      penalty: price of an active node *per sample*, above 0: the paper's lambda divided by the size of its batch. So
        the same penalty prunes alike whatever the number of samples. A number or a traced one.
      classes: number of classes: y then holds classes 0..K-1, the outputs are logits. None: regression.
      targets: number of columns of y, ``(n, targets)``, in regression; None: y is ``(n,)``.
      loss: ``(outputs, y) -> (n,)``; by default squared error (the mean over targets), or the log loss of logits.
      split: how nodes score samples: ``"linear"``, ``"elu"`` (linear, then ELU), ``"mlp"`` with one hidden layer, or
        ``(features, nodes, rngs) -> module`` from ``(n, features)`` to ``(n, nodes)``.
      predictor: ``"linear"``, or ``"mlp"``: two hidden layers, ELU.
      inputs: what the predictor sees, ``"z"`` or ``"xz"``.
      hidden: width of hidden layers.
      dropout: part of the units of the predictor's hidden layers left out in training, 0 up to but not including 1.

    Raises:
      ValueError: for a depth, a penalty, a count or a part out of range, or an unknown option.
    """
    of = architecture(depth, classes, targets, split, predictor, inputs, hidden, dropout)
    checks.check_number("penalty", penalty)
    loss_of = losses.sample_loss(loss, classes)

    def init(x: Array, y: Array, *, key: Array) -> Any:
        network = Network(x.shape[1], of, dtype=x.dtype, rngs=nnx.Rngs(key))
        network.bias[...] = centered(split_scores(network.split, x, len(network.bias)))
        return nnx.state(network, nnx.Param)

    def total(params: Any, x: Array, y: Array, *, key: Array, step: Array) -> tuple[Array, Array]:
        expected = x.shape[:1] if targets is None else (x.shape[0], targets)
        if y.shape != expected:
            raise ValueError(f"y must have shape {expected}, got {y.shape}")
        value = loss_of(outputs_of(params, x, of, None, penalty, key=key), y).mean()
        return value, value

    def predict(params: Any, x: Array) -> Array:
        outputs = outputs_of(params, x, of, None, penalty)
        return outputs if classes is None else jax.nn.softmax(outputs, axis=1)

    def harden(params: Any, x: Array, y: Array) -> ObliqueTree | None:
        if not _is_tree(of):
            return None
        return hard_tree(params, x, jnp.asarray(y), penalty, of=of, classes=classes)

    return training.Method(init, total, predict, harden)


def check_depth(depth: Any) -> int:
    """The depth as an int between 1 and 10; ``ValueError`` if it is none."""
    if checks.check_depth(depth) > MAX_DEPTH:
        raise ValueError(f"depth must be from 1 to {MAX_DEPTH}, got {depth}")
    return int(depth)


def _is_tree(of: Architecture) -> bool:
    """Whether the splits say everything."""
    return (of.split, of.predictor, of.inputs) == ("linear", "linear", "z")


def architecture(depth, classes, targets, split, predictor, inputs, hidden, dropout) -> Architecture:
    """Arguments of :func:`latent` as one, or ``ValueError``."""
    depth = check_depth(depth)
    if classes is not None and checks.check_count("classes", classes) < 2:
        raise ValueError(f"classes must be at least 2, got {classes}")
    if targets is not None:
        checks.check_count("targets", targets)
        if classes is not None:
            raise ValueError("targets is for regression: with classes it must be None")
    if not callable(split):
        checks.check_choice("split", split, SPLITS, "a function (features, nodes, rngs) -> module")
    checks.check_choice("predictor", predictor, PREDICTORS)
    checks.check_choice("inputs", inputs, INPUTS)
    checks.check_count("hidden", hidden)
    checks.check_part("dropout", dropout)
    return Architecture(depth, classes or targets, split, predictor, inputs, hidden, float(dropout))


def centered(raw: Float[Array, "nodes n"]) -> Float[Array, " nodes"]:
    """Biases by which every split passes through the mean of the scores of the samples that reach its node."""
    inside, biases = jnp.ones_like(raw[:1], dtype=bool), []
    for score in topology.levels(raw):
        count = jnp.maximum(inside.sum(1, dtype=raw.dtype), 1)
        biases.append(-jnp.where(inside, score, 0).sum(1) / count)
        right = score + biases[-1][:, None] > 0
        inside = topology.interleave(inside & ~right, inside & right)
    return jnp.concatenate(biases)


@partial(jax.jit, static_argnames=("of", "classes"))
def hard_tree(
    params: Any, x: Array, y: Array, penalty: Any, *, of: Architecture, classes: int | None = None
) -> ObliqueTree:
    """The hard tree of linear splits in which inactive nodes do not split, with constant leaves set from x and y."""
    network = _network(params, x, of)
    splits = activity(network.scores(x), penalty)[: topology.num_nodes(of.depth)] > 0
    weights = jnp.where(splits[:, None], network.split.kernel[...].T, 0)
    tree = ObliqueTree(weights, jnp.where(splits, network.bias[...], -1), None)
    leaf, num = tree.leaf_index(x), topology.num_leaves(of.depth)
    if classes is None:
        return tree.replace(leaves=fitting.fit_constant(leaf, y, num))
    weight = jnp.ones(x.shape[0], x.dtype)
    return tree.replace(leaves=fitting.fit_frequencies(leaf, y, num, classes, sample_weight=weight))


# --- The recipe ------------------------------------------------------------------------------------------------------


@struct.dataclass
class LatentModel:
    """A fitted LatentTree: splits, activity of the nodes on the training data, predictor; in the user's own units.

    Attributes:
      params: state of the network.
      active: activity of the nodes of the whole tree, ``(2**(depth + 1) - 1,)``; 0: pruned.
      scale: the map from raw features and to raw targets.
      architecture: what the network is made of.
      classes: number of classes, or None.
      bounded: whether answers are kept near the training targets.
    """

    params: Any
    active: Array
    scale: Scale
    architecture: Architecture = struct.field(pytree_node=False)
    classes: int | None = struct.field(pytree_node=False)
    bounded: bool = struct.field(pytree_node=False)

    def predict(self, x: ArrayLike) -> np.ndarray:
        """The answers, ``(n,)``, or class probabilities, ``(n, K)``.

        In regression by squared error answers are kept between the least and the greatest training target, and a tenth
        of their range beyond: a predictor that sees x has no bounds of its own, and what it makes of an outlier can be
        anything.

        Raises:
          ValueError: for another rank or width, or values that are not finite.
        """
        outputs = np.asarray(_predict(self, self._unit(x)), np.float64)
        return outputs if self.classes is not None else self.scale.y_min + self.scale.y_unit * outputs

    def traverse(self, x: ArrayLike) -> np.ndarray:
        """How far each sample is at each node of the whole tree: z, ``(nodes, n)``.

        Raises:
          ValueError: as :meth:`predict`.
        """
        return np.asarray(_position(self, self._unit(x)))

    def _unit(self, x: ArrayLike) -> np.ndarray:
        return self.scale.x(np.asarray(checks.check_x(x, features=len(self.scale.x_center))))


@jax.jit
def _position(model: LatentModel, x: Array) -> Array:
    return routing.position(routing.rewards(scores_of(model.params, x, model.architecture)), model.active)


@jax.jit
def _predict(model: LatentModel, x: Array) -> Array:
    outputs = outputs_of(model.params, x, model.architecture, model.active)
    if model.classes is not None:
        return jax.nn.softmax(outputs, axis=1)
    return _near_targets(outputs) if model.bounded else outputs


def _near_targets(outputs: Array) -> Array:
    """Answers on targets scaled to [0, 1]."""
    return jnp.clip(outputs, -_MARGIN, 1 + _MARGIN)


@struct.dataclass
class LatentResult:
    """What :func:`fit_latent` found.

    Attributes:
      model: the fitted model.
      tree: the :class:`ObliqueTree` that it stands for, where it stands for one: linear splits, and a linear predictor
        that sees z alone. Its leaves are constants set from the training data, in the user's units. Else None, and
        what was learnt needs its predictor.
      losses: training loss before each update, on scaled targets, ``(steps,)``.
      score: loss of the model on ``validation`` where that was given, else on the training data; on scaled targets.
      step: number of updates that it had seen.
    """

    model: LatentModel
    tree: ObliqueTree | None
    losses: np.ndarray
    score: float
    step: int


class Recipe(NamedTuple):
    """What a compiled program depends on."""

    architecture: Architecture
    classes: int | None
    targets: int | None
    loss: Any
    batch_size: int
    epochs: int
    steps_an_epoch: int
    patience: int

    @property
    def bounded(self) -> bool:
        """Whether answers are kept near the training targets: where they are means of them."""
        return (self.classes, self.targets, self.loss) == (None, None, None)


def fit_latent(
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: Array,
    depth: int = 4,
    penalty: float = 0.01,
    task: Literal["regression", "classification"] = "regression",
    loss: losses.SampleLoss | None = None,
    split: Split = "linear",
    predictor: Literal["linear", "mlp"] = "linear",
    inputs: Literal["z", "xz"] = "xz",
    hidden: int = 64,
    dropout: float = 0.0,
    epochs: int = 100,
    batch_size: int = 128,
    learning_rate: float = 0.01,
    patience: int = 10,
    validation: tuple[ArrayLike, ArrayLike] | None = None,
) -> LatentResult:
    """LatentTree's whole recipe: from a table of numbers to a tree and its predictor.

    Mini-batches, Adam (the paper's quasi-hyperbolic Adam was no better on two sets: ``experiments.paper_latent``), a
    learning rate divided by ten when the training loss of an epoch has not fallen for some time, split biases from the
    means of the samples that reach each node. The model returned is that of the last update or, with ``validation``,
    the one that did best there, looked at once an epoch; its activity is solved for on the whole training part.
    Features are scaled to mean 0 and deviation 1, targets to [0, 1]. Defaults are for tables of some thousand rows; for
    half a million the paper has batches of 512, a learning rate of 0.001, a patience of 2.

    Args:
      x: features, ``(n, p)``, finite.
      y: targets, ``(n,)``, finite and not constant; in classification whole numbers 0..K-1, every class present.
      key: for everything random.
      depth: as for :func:`latent`, like everything that is not said here.
      penalty: price of an active node, per sample: the paper's lambda over its batch.
      task: ``"regression"`` or ``"classification"``.
      loss: ``(outputs, y) -> (n,)`` on scaled targets, or on logits; a function of a module compiles once.
      split: see there.
      predictor: see there.
      inputs: see there.
      hidden: see there.
      dropout: see there.
      epochs: passes over the data.
      batch_size: samples in a mini-batch; n if that is less. Those left over in a pass rest until the next.
      learning_rate: at the start.
      patience: epochs without a lower loss before the learning rate falls.
      validation: ``(x, y)`` to choose the best epoch by; not trained on.

    Raises:
      ValueError: naming the argument, what was expected and what came.
      FloatingPointError: if training became non-finite.
    """
    table, classes = checked_table(x, y, None, task)
    held_out = None if validation is None else checked_validation(validation, table.x.shape[1], classes)
    of = architecture(depth, classes, None, split, predictor, inputs, hidden, dropout)
    checks.check_number("penalty", penalty)
    checks.check_number("learning_rate", learning_rate)
    batch_size = min(checks.check_count("batch_size", batch_size), len(table.x))
    epochs, patience = checks.check_count("epochs", epochs), checks.check_count("patience", patience)
    recipe = Recipe(of, classes, None, loss, batch_size, epochs, len(table.x) // batch_size, patience)
    scale = Scale.of(table, 1.0)
    judge = None if held_out is None else (scale.x(held_out.x), scale.y(held_out.y))
    result, active, tree = run(scale.x(table.x), scale.y(table.y), judge, key, penalty, learning_rate, recipe)
    if not result.finite:
        raise FloatingPointError("training became non-finite: try a smaller learning_rate")
    model = LatentModel(result.params, active, scale, of, classes, recipe.bounded)
    tree = scale.from_unit(tree) if _is_tree(of) else None
    return LatentResult(model, tree, np.asarray(result.losses), float(result.score), int(result.step))


@partial(jax.jit, static_argnames="recipe")
def run(x, y, held_out, key, penalty, learning_rate, recipe):
    """The training run on scaled data, the activity on all of them, and where splits are linear the hard tree."""
    of, classes = recipe.architecture, recipe.classes
    method = latent(
        of.depth,
        penalty,
        classes=classes,
        targets=recipe.targets,
        loss=recipe.loss,
        split=of.split,
        predictor=of.predictor,  # type: ignore[arg-type]
        inputs=of.inputs,  # type: ignore[arg-type]
        hidden=of.hidden,
        dropout=of.dropout,
    )
    loss_of = losses.sample_loss(recipe.loss, classes)
    activity_of = lambda params: activity(scores_of(params, x, of), penalty)

    def judged(params: Any) -> Array:
        x_new, y_new = (x, y) if held_out is None else held_out
        outputs = outputs_of(params, x_new, of, activity_of(params))
        return loss_of(_near_targets(outputs) if recipe.bounded else outputs, y_new).mean()

    plateau = optax.contrib.reduce_on_plateau(
        factor=0.1, patience=recipe.patience, accumulation_size=recipe.steps_an_epoch
    )
    result = training.train(
        method,
        x,
        y,
        key=key,
        optimizer=optax.chain(optax.adam(learning_rate), plateau),
        steps=recipe.epochs * recipe.steps_an_epoch,
        batch_size=recipe.batch_size,
        score_every=0 if held_out is None else recipe.steps_an_epoch,
        score=judged,
    )
    tree = hard_tree(result.params, x, y, penalty, of=of, classes=classes) if of.split == "linear" else None
    return result, activity_of(result.params), tree
