"""TEL: an ensemble of soft trees that are trained jointly, with conditional computation (Hazimeh et al., "The Tree
Ensemble Layer: Differentiability meets Conditional Computation", ICML 2020).

``tel`` is the method for :func:`jtrees.train`; ``TEL`` is the recipe from a table to a fitted ensemble. The layer for
larger networks is :class:`jtrees.nn.TreeEnsemble`.
"""

from typing import Any, Literal

from flax import struct
import jax.numpy as jnp
from jaxtyping import Array, Float
import optax

from jtrees import io, losses, routing, topology, training, validation as checks
from jtrees.data import Data
from jtrees.methods.tel.ensemble import Ensemble, hardened, random_ensemble
from jtrees.methods.tel.lazy_step import lazy_step
from jtrees.routing import conditional
from jtrees.search import (
    Finished,
    Recipe,
    Schedule,
    Search,
    SearchResult,
    check_finite,
    loss_of,
    minibatch,
    options,
)
from jtrees.soft_model import SoftModel
from jtrees.tasks import Regression, Task, with_loss
from jtrees.training import Batch, LazyAdamState

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
    task = with_loss(task, loss)

    def init(batch: Batch, *, key: Array) -> Ensemble:
        task.check(batch.y)
        return random_ensemble(key, depth, trees, batch.x.shape[1], task.shape, batch.x.dtype)

    def lost(outputs: Array, batch: Batch) -> Array:
        return losses.weighted_mean(task.loss(outputs, batch.y), batch.weight)

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

    harden = lambda params, batch: hardened(params, batch, task)
    return training.Method(init, total, harden, update=None if learning_rate is None else update)


# --- The model -------------------------------------------------------------------------------------------------------


@io.part
@struct.dataclass
class SoftEnsemble:
    """Trained soft trees, on scaled data.

    Attributes:
      params: the trees.
      gamma: width of the uncertain region of a split's score.
      step: ``"smooth"`` or ``"logistic"``.
    """

    params: Ensemble
    gamma: Array
    step: str = struct.field(pytree_node=False)

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """The sum over the trees."""
        return self.params.outputs(x, self.gamma, step=self.step)

    @property
    def features(self) -> int:
        """Number of features, p."""
        return self.params.weights.shape[-1]

    def __str__(self) -> str:
        trees, nodes = self.params.bias.shape[-2:]
        return f"trees={trees}, depth={topology.depth_of(nodes)}, features={self.features}, step={self.step!r}"


@io.model
@struct.dataclass
class EnsembleModel(SoftModel):
    """Fitted soft trees, whose outputs add up: its network is a :class:`SoftEnsemble`.

    Of trees deeper than some seven levels, the last bits of a prediction may depend on which samples come with it:
    whether a block of them is followed on its way or scored whole (:func:`jtrees.routing.conditional_ensemble`).
    """


# --- The recipe ------------------------------------------------------------------------------------------------------


@struct.dataclass(kw_only=True)
class TEL(Recipe):
    """TEL's recipe: an ensemble of soft trees, trained jointly.

    Mini-batches and Adam. The model is that of the last update or, with ``validation``, the one with the lowest loss
    there, evaluated once an epoch. Features are scaled to mean 0 and deviation 1, targets to [0, 1]. The report has
    ``reachable_leaves``, how many leaves a training sample reaches in a tree, on average, and ``overflows``, whether
    the training samples together need more than ``width``. Where ``loss`` is given, the loss of the fit is that, on
    scaled targets.

    Attributes:
      depth: depth of the trees, 1 to 16.
      trees: number of trees.
      epochs: passes over the data; None: as many as make 2000 updates, and at least 12.
      batch_size: samples in a mini-batch; n if that is less. Those left over in a pass rest until the next.
      learning_rate: of Adam.
      gamma: width of the uncertain region of a split's score, above 0: the smaller, the fewer leaves a sample reaches.
      loss: ``(outputs, y) -> (n,)`` on scaled targets, or on logits; a function of a module compiles once. By default
        squared error, or log loss.
      l2: strength of the L2 penalty on split weights (of scaled data).
      step: ``"smooth"``, or ``"logistic"``: the same ensemble with sigmoids of the same size, to compare with.
      lazy: whether a step moves only what its batch met, which keeps deep trees cheap (see :func:`jtrees.methods.tel`);
        else all.
      hard: whether the model is the forest of hard trees with leaves refitted jointly (see :func:`hardened`).
      width: number of paths that are followed at once, as for :func:`jtrees.routing.conditional_ensemble`; None: what
        was measured.
    """

    depth: int = options.depth(4)
    trees: int = options.count(10)
    epochs: int | None = options.optional_count(100)
    batch_size: int = options.count(128)
    learning_rate: float = options.positive(0.01)
    gamma: float = options.positive(0.5)
    loss: losses.SampleLoss | None = options.loss()
    l2: float = options.not_negative(0.0)
    step: Literal["smooth", "logistic"] = options.choice("smooth", STEPS)
    lazy: bool = options.flag(True)
    hard: bool = options.flag(False)
    width: int | None = options.optional_count(None)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        task, (n, p) = with_loss(task, self.loss), shape
        schedule = Schedule.of(n, self.epochs, self.batch_size)
        a_tree = topology.num_leaves(self.depth) * (p + (task.outputs or 1))
        checks.check_count("trees", self.trees, most=checks.MAX_NUMBERS // a_tree)
        lazy = self.lazy and self.step == "smooth"  # under logistic steps a batch meets everything
        of: Any = {"step": self.step, "l2": self.l2, "width": self.width}
        method = tel(
            self.depth, self.trees, self.gamma, task=task, learning_rate=self.learning_rate if lazy else None, **of
        )
        optimizer = training.lazy_adam(self.learning_rate) if lazy else optax.adam(self.learning_rate)

        def outputs(params: Ensemble, batch: Batch, x: Array) -> Array:
            return params.outputs(x, self.gamma, step=self.step, width=self.width)

        def model(params: Ensemble, batch: Batch) -> Any:
            return hardened(params, batch, task) if self.hard else SoftEnsemble(params, self.gamma, self.step)  # type: ignore[arg-type]

        def reached(params: Ensemble, batch: Batch) -> tuple[Array, Array]:
            """Leaves that a sample reaches in a tree, and whether all need more than ``width``."""
            if self.step != "smooth":
                return jnp.asarray(topology.num_leaves(self.depth)), jnp.zeros((), bool)
            splits = params.weights, params.bias
            count, overflows = routing.reachable_leaves(batch.x, *splits, self.gamma, width=self.width)
            real = jnp.ones(len(batch.x)) if batch.weight is None else batch.weight > 0
            return jnp.average(count.mean(0), weights=real.astype(batch.x.dtype)), overflows

        def finish(result: SearchResult, start: Any, data: Data, **_: Any) -> Finished:
            check_finite(result)
            model = result.model if self.hard else EnsembleModel(result.model, None, data.table.task)
            model, (leaves, overflows) = data.scaling.restore(model), result.extra
            report = {"reachable_leaves": float(leaves), "overflows": bool(overflows)}
            loss = data.loss(model) if self.hard else loss_of(result, model, data, task)
            return Finished(model, None, loss, report)

        # Where paths are followed it may be much less work; a round is then shorter than it might be.
        elements: Any = {"elements_per_sample": 4 * self.trees * topology.num_nodes(min(self.depth, 10))}
        functions: Any = {"outputs": outputs, "model": model, "extra": reached, "finish": finish}
        return minibatch(task, method, optimizer, schedule, **elements, **functions)
