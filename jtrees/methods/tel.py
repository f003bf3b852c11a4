"""TEL: an ensemble of soft trees that are trained jointly, with conditional computation (Hazimeh et al., "The Tree
Ensemble Layer: Differentiability meets Conditional Computation", ICML 2020).

``tel`` is the method for :func:`jtrees.train`; ``TEL`` is the recipe from a table to a fitted ensemble. The layer for
larger networks is :class:`jtrees.nn.TreeEnsemble`.
"""

from typing import Any, Literal

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float
import numpy as np
import optax

from jtrees import losses, prediction, routing, topology, training, validation as checks
from jtrees.forest import Forest
from jtrees.methods.ensemble import Ensemble, hardened, random_ensemble
from jtrees.methods.lazy_adam import LazyAdamState, lazy_adam, lazy_step
from jtrees.methods.one_run import OneRun, check_found
from jtrees.recipes import Fit, Found, Watch, number, static
from jtrees.routing import conditional
from jtrees.table import Scale, Table, mean_loss
from jtrees.tasks import Regression, Task
from jtrees.training import Batch

STEPS = ("smooth", "logistic")


# --- The method ------------------------------------------------------------------------------------------------------


def tel(
    depth: int,
    trees: int = 10,
    gamma: float | Array = 0.1,
    *,
    task: Task = Regression(),
    loss: losses.SampleLoss | None = None,
    step: Literal["smooth", "logistic"] = "smooth",
    l2: float | Array = 0.0,
    learning_rate: training.Number | None = None,
    width: int | None = None,
) -> training.Method:
    """TEL: minimise the loss of the sum of soft trees. Parameters are an :class:`Ensemble`.

    ``harden`` makes gamma 0 and refits the leaves of all trees jointly (see :func:`hardened`): a
    ``Forest(combine="sum")``. Meant for features of mean 0 and deviation 1 (the paper has batch normalisation before
    the layer, for the same), and regression targets of size one.

    Args:
      depth: depth of the trees, 1 to 16.
      trees: how many.
      gamma: width of the uncertain region of a split's score, above 0 (the paper: 0.0001 to 1).
      task: what is predicted. In classification leaves hold logits.
      loss: ``(outputs, y) -> (n,)``; by default squared error (of several targets the mean), or the log loss of logits.
      step: ``"smooth"``, TEL's; or ``"logistic"`` of the same size, without conditional computation, to compare with.
      l2: strength of ``sum w^2`` over the split weights.
      learning_rate: where given, the method takes steps of its own, lazy Adam at this rate (a number or a schedule),
        in rows of splits and leaves that the batch meets alone: work that does not grow with the ensemble. The penalty
        then moves only weights that have a gradient. The optimiser must be ``lazy_adam(learning_rate)``, whose state is
        used. None: gradients of everything, for any optimiser.
      width: as for :func:`jtrees.routing.conditional_ensemble`.

    Raises:
      ValueError: for a number out of range, or an unknown option.
    """
    depth, trees = checks.check_depth(depth), checks.check_count("trees", trees)
    checks.check_number("gamma", gamma)
    checks.check_not_negative("l2", l2)
    checks.check_choice("step", step, STEPS)
    width = conditional.checked_width(width, depth)
    if learning_rate is not None and step != "smooth":
        raise ValueError('learning_rate must be None with step="logistic": every number has a gradient')
    loss_of = losses.sample_loss(loss, task)

    def init(batch: Batch, *, key: Array) -> Ensemble:
        task.check(batch.y)
        return random_ensemble(key, depth, trees, batch.x.shape[1], task.shape, batch.x.dtype)

    def lost(outputs: Array, batch: Batch) -> Array:
        return losses.weighted_mean(loss_of(outputs, batch.y), batch.weight)

    def total(params: Ensemble, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        value = lost(params.outputs(batch.x, gamma, step=kind, width=width), batch)
        return value + l2 * jnp.square(params.weights).sum(), value

    def update(
        params: Ensemble, opt_state: LazyAdamState, batch: Batch, *, key: Array, step: Array
    ) -> tuple[Ensemble, LazyAdamState, tuple[Array, Array]]:
        of_outputs = lambda outputs: lost(outputs, batch)
        options: Any = {"gamma": gamma, "width": width, "l2": l2, "learning_rate": learning_rate}
        moved = lazy_step(params, opt_state, batch.x, of_outputs, **options)
        return *moved[:2], (moved[2], moved[2])

    kind = step

    def predict(params: Ensemble, x: Array) -> Array:
        return task.link(params.outputs(x, gamma, step=kind, width=width))

    harden = lambda params, batch: hardened(params, batch, task)
    return training.Method(init, total, predict, harden, update=None if learning_rate is None else update)


# --- What is fitted --------------------------------------------------------------------------------------------------


@struct.dataclass
class EnsembleModel:
    """Soft trees whose answers add up, fitted to a table: what answers.

    Of trees deeper than some seven levels, the last bits of an answer may depend on which samples come with it: whether
    a block of them is followed on its way or scored whole (:func:`jtrees.routing.conditional_ensemble`).

    Attributes:
      params: the trees.
      gamma: width of the uncertain region of a split's score.
      scale: the map from raw features and to raw targets; None: none is made.
      step: ``"smooth"`` or ``"logistic"``.
      task: what is predicted.
    """

    params: Ensemble
    gamma: Array
    scale: Scale | None
    step: str = struct.field(pytree_node=False)
    task: Task = struct.field(pytree_node=False)

    def apply(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """What :meth:`predict` answers, as a pure function of arrays."""
        x = x if self.scale is None else self.scale.enter(x)
        predictions = self.task.link(self.params.outputs(x, self.gamma, step=self.step))
        return predictions if self.scale is None else self.scale.leave(predictions)

    def predict(self, x: ArrayLike) -> Any:
        """The answers, ``(n,)`` or ``(n, k)``, or class probabilities, ``(n, K)``.

        Raises:
          ValueError: for another rank or width, or values that are not finite.
        """
        return prediction.predict(self, x)

    @property
    def features(self) -> int:
        """Number of features, p."""
        return self.params.weights.shape[-1]

    @property
    def num_parameters(self) -> int:
        """Numbers that the trees hold."""
        return sum(np.size(a) for a in jax.tree.leaves(self.params))

    def __repr__(self) -> str:
        trees, nodes = self.params.bias.shape[-2:]
        parts = f"trees={trees}, depth={topology.depth_of(nodes)}, features={self.features}, step={self.step!r}"
        return f"EnsembleModel({parts}, {self.task}, parameters={self.num_parameters})"

    @property
    def units(self) -> Scale | None:
        """Where samples enter and answers leave: see :func:`jtrees.prediction.predict`."""
        return self.scale

    def bare(self) -> "EnsembleModel":
        """The model without them."""
        return self.replace(scale=None)


# --- The recipe ------------------------------------------------------------------------------------------------------


@struct.dataclass(kw_only=True)
class TEL(OneRun):
    """TEL's whole recipe: from a table of numbers to an ensemble of soft trees, trained jointly.

    Mini-batches and Adam. The model is that of the last update or, with ``validation``, the one that did best there,
    looked at once an epoch. Features are scaled to mean 0 and deviation 1, targets to [0, 1]. The report has
    ``reachable_leaves``, how many leaves a training sample reaches in a tree, on average, and ``overflows``, whether
    the training samples together need more than ``width``. Where ``loss`` is one of your own, the loss of the fit is
    that, on scaled targets. See :class:`OneRun` for the options that it shares with others.

    Attributes:
      depth: depth of the trees, 1 to 16.
      trees: how many.
      gamma: width of the uncertain region of a split's score, above 0: the smaller, the fewer leaves a sample reaches.
      loss: ``(outputs, y) -> (n,)`` on scaled targets, or on logits; a function of a module compiles once. By default
        squared error, or log loss.
      l2: strength of the L2 penalty on split weights (of scaled data).
      step: ``"smooth"``, or ``"logistic"``: the same ensemble with sigmoids of the same size, to compare with.
      lazy: whether a step moves only what its batch met, which keeps deep trees cheap (see :func:`tel`); else all.
      hard: whether the model is the forest of hard trees with leaves refitted jointly (see :func:`hardened`).
      width: room for paths, as for :func:`jtrees.routing.conditional_ensemble`; None: what was measured.
    """

    depth: int = static(default=4)
    trees: int = static(default=10)
    gamma: float = 0.5
    loss: losses.SampleLoss | None = static(default=None)
    l2: float = 0.0
    step: Literal["smooth", "logistic"] = static(default="smooth")
    lazy: bool = static(default=True)
    hard: bool = static(default=False)
    width: int | None = static(default=None)

    def checked(self, table: Table) -> Any:
        recipe = super().checked(table)
        checks.check_choice("step", self.step, STEPS)
        self.sample_loss(table.task)  # refuses what is no function
        depth = checks.check_depth(self.depth)
        a_tree = topology.num_leaves(depth) * (table.x.shape[1] + (table.task.outputs or 1))
        return recipe.replace(
            depth=depth,
            trees=checks.check_count("trees", self.trees, most=checks.MAX_NUMBERS // a_tree),
            gamma=number("gamma", self.gamma, checks.check_number),
            l2=number("l2", self.l2, checks.check_not_negative),
            lazy=checks.check_flag("lazy", self.lazy),
            hard=checks.check_flag("hard", self.hard),
            width=None if self.width is None else checks.check_count("width", self.width),
        )

    def work(self, p: int) -> int:
        # Where paths are followed it may be much less; a round is then shorter than it might be.
        return 4 * self.trees * topology.num_nodes(min(self.depth, 10))

    def method(self, table: Table) -> training.Method:
        options: Any = {"task": table.task, "loss": self.loss, "step": self.step, "l2": self.l2}
        options |= {"width": self.width, "learning_rate": self.learning_rate if self._rests else None}
        return tel(self.depth, self.trees, self.gamma, **options)

    def optimizer(self, steps: int, an_epoch: int) -> optax.GradientTransformation:
        return lazy_adam(self.learning_rate) if self._rests else optax.adam(self.learning_rate)

    @property
    def _rests(self) -> bool:
        """Whether what a batch does not meet rests; under logistic steps it meets everything."""
        return self.lazy and self.step == "smooth"

    def answers(self, params: Ensemble, table: Table, x: Array) -> Array:
        return params.outputs(x, self.gamma, step=self.step, width=self.width)

    def end(self, state: training.TrainState, table: Table, judge: Table | None) -> Found:
        found = super().end(state, table, judge)
        reachable, overflows = jnp.asarray(topology.num_leaves(self.depth)), jnp.zeros((), bool)
        if self.step == "smooth":
            splits = found.model.weights, found.model.bias
            count, overflows = routing.reachable_leaves(table.x, *splits, self.gamma, width=self.width)
            real = jnp.ones(len(table.x)) if table.weight is None else table.weight > 0
            reachable = jnp.average(count.mean(0), weights=real.astype(table.x.dtype))
        forest = hardened(found.model, table.batch, table.task) if self.hard else None
        return found._replace(extra={"reachable": reachable, "overflows": overflows, "forest": forest})

    def finish(
        self, found: Found, start: Any, table: Table, judge: Table | None, *, scale: Scale, key: Array, watch: Watch
    ) -> Fit:
        check_found(found)
        gamma: Any = self.gamma
        model: Any = EnsembleModel(found.model, gamma, scale, self.step, table.task)
        if self.hard:
            model = _forest_from_unit(found.extra["forest"], scale)
        own = self.loss is not None and not self.hard
        loss = float(found.score) if own else mean_loss(model, judge or table, scale)
        report = {"reachable_leaves": float(found.extra["reachable"]), "overflows": bool(found.extra["overflows"])}
        return Fit(model, None, loss, int(found.step), np.zeros(0), report)


def _forest_from_unit(forest: Forest, scale: Scale) -> Forest:
    """A forest whose answers are summed, in the user's units: each tree answers its share of what targets begin at."""
    trees = len(forest)
    if scale.y_low is not None:
        origin = scale.origin
        if origin is not None and origin.y is not None:
            origin = origin.replace(y=origin.y / np.float32(trees))
        scale = scale.replace(y_low=scale.y_low / trees, origin=origin)
    each = [scale.from_unit(forest[i]) for i in range(trees)]
    return forest.replace(trees=jax.tree.map(lambda *arrays: jnp.stack(arrays), *each))
