"""TEL: an ensemble of soft trees that are trained jointly, with conditional computation.

The source is Hazimeh et al., "The Tree Ensemble Layer: Differentiability meets Conditional Computation", ICML 2020.
``tel`` is the method for :func:`jtrees.train`, and ``TEL`` is the recipe. The layer for larger networks is
:class:`jtrees.nn.TreeEnsemble`.
"""

import math
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float
import optax

from jtrees import io, losses, pytree, topology, training, validation as checks
from jtrees.methods.tree_ensemble.ensemble import Ensemble, hardened, random_ensemble
from jtrees.methods.tree_ensemble.lazy_step import lazy_step
from jtrees.routing import conditional
from jtrees.search import NetworkRecipe, Run, checked_values, option
from jtrees.search.minibatch import output_loss
from jtrees.tasks import Regression, Task
from jtrees.training import Batch, LazyAdamState


def tel(
    depth: int,
    trees: int = 10,
    gamma: float | Array = 0.5,
    *,
    task: Task = Regression(),
    step: Literal["smooth", "logistic"] = "smooth",
    l2: float | Array = 0.0,
    learning_rate: training.Number | None = None,
    width: int | None = None,
) -> training.Method:
    """Returns the TEL method, which minimises the loss of a sum of soft trees. Parameters are an :class:`Ensemble`.

    ``harden`` returns a ``Forest(combine="sum")`` for gamma 0, with the leaves of all trees refitted jointly (see
    :func:`hardened`). The method assumes features of mean 0 and deviation 1 (the paper uses batch normalisation), and
    regression targets of order 1. In classification, leaves hold logits.

    :class:`jtrees.TEL` describes the arguments, except two. ``task`` is what is predicted, and by which loss.
    ``learning_rate`` is a number or a schedule for lazy Adam. With it, the method updates only rows of splits and
    leaves that the batch touches, so the cost does not grow with the ensemble. The penalty applies only to weights with
    a gradient. The optimiser must be ``lazy_adam(learning_rate)``, because the method uses its state. None: dense
    gradients, for any optimiser.

    Raises:
      ValueError: for a number out of range, or an unknown option.
    """
    checked = checked_values(TEL, depth=depth, trees=trees, gamma=gamma, l2=l2, step=step)
    depth, trees = checked["depth"], checked["trees"]
    width = conditional.checked_width(width, depth)
    if learning_rate is not None and step != "smooth":
        raise ValueError('learning_rate must be None with step="logistic": every number has a gradient')
    outputs = lambda params, x: params.outputs(x, gamma, step=step, width=width)

    def init(batch: Batch, *, key: Array) -> Ensemble:
        task.check(batch.y)
        ensemble = random_ensemble(key, depth, trees, batch.x.shape[1], task.shape, batch.x.dtype)
        # The mean of the targets would otherwise take the first updates.
        return ensemble.replace(leaf_values=ensemble.leaf_values + task.initial(batch).astype(batch.x.dtype) / trees)

    def batch_loss(outputs: Array, batch: Batch) -> Array:
        return losses.weighted_mean(task.loss(outputs, batch.y), batch.weight)

    def total(params: Ensemble, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        loss = batch_loss(outputs(params, batch.x), batch)
        return loss + l2 * jnp.square(params.weights).sum(), loss

    def update(
        params: Ensemble, opt_state: LazyAdamState, batch: Batch, *, key: Array, step: Array
    ) -> tuple[Ensemble, LazyAdamState, tuple[Array, Array]]:
        options: Any = {"gamma": gamma, "width": width, "l2": l2, "learning_rate": learning_rate}
        loss_of_outputs = lambda outputs: batch_loss(outputs, batch)
        params, opt_state, loss = lazy_step(params, opt_state, batch.x, loss_of_outputs, **options)
        return params, opt_state, (loss, loss)

    harden = lambda params, batch: hardened(params, batch, task)
    return training.Method(init, total, harden, update=None if learning_rate is None else update)


@io.part
@pytree.dataclass
class SoftEnsemble:
    """Trained soft trees, on scaled data."""

    params: Ensemble  # the trees
    gamma: Array  # width of the uncertain region of a split's score
    step: str = pytree.field(pytree_node=False)  # `"smooth"` or `"logistic"`

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the sum of the trees' outputs."""
        return self.params.outputs(x, self.gamma, step=self.step)

    @property
    def features(self) -> int:
        return self.params.weights.shape[-1]

    def __str__(self) -> str:
        trees, nodes = self.params.bias.shape[-2:]
        return f"trees={trees}, depth={topology.depth_of(nodes)}, features={self.features}, step={self.step!r}"


@pytree.dataclass(kw_only=True)
class TEL(NetworkRecipe):
    """TEL's recipe: an ensemble of soft trees, trained jointly.

    The search trains on mini-batches with Adam. The ensemble soon overfits, so early stopping chooses the number of
    updates on held-out rows. The model has the parameters after the last update. If ``validation`` is given, the model
    has the evaluated parameters with the lowest validation loss. Features are scaled to mean 0 and deviation 1, targets
    to [0, 1]. A user-defined loss of the task, on scaled targets or on logits, is also the loss of the fit.
    :func:`jtrees.routing.reachable_leaves` returns the number of leaves that a sample reaches, and whether ``width``
    suffices. For trees of at least 7 levels, the last bits of a prediction may depend on the other samples of its
    block, which decide together whether conditional computation is used
    (:func:`jtrees.routing.conditional_ensemble`). The report is a :class:`jtrees.search.TrainingReport`.

    Attributes:
      depth: depth of the trees, 1 to 16.
      trees: number of trees.
      epochs: number of passes over the data; None: as in :class:`jtrees.DGT`.
      batch_size: samples in a mini-batch, as in :class:`jtrees.DGT`.
      learning_rate: learning rate of Adam.
      gamma: width of the uncertain region of a split's score, above 0 (the paper: 0.0001 to 1). A sample reaches fewer
        leaves if gamma is smaller.
      l2: strength of the penalty ``sum w^2`` of split weights (of scaled data).
      step: ``"smooth"``, or ``"logistic"`` for sigmoids of the same width, for comparison, without conditional
        computation.
      lazy: whether a step updates only rows touched by its batch, which keeps deep trees cheap (see
        :func:`jtrees.methods.tel`).
      hard: whether the model is the forest of hard trees with leaves refitted jointly (see :func:`hardened`).
      width: capacity of the frontier of paths, as in :func:`jtrees.routing.conditional_ensemble`. None: a measured
        default for the depth; all splits are scored if the trees have fewer than 7 levels.
      early_stopping: whether evaluations choose the number of updates. A trial run on four fifths of the rows is
        evaluated on the other rows after each epoch, or 100 times if ``epochs`` is None. It ends if a quarter of all
        evaluations in a row do not lower the loss. The last training takes the updates of the lowest loss. There is no
        trial for fewer than 100 rows. With ``validation``, the training itself is evaluated, and ends by the same rule.
      precondition: strength of the preconditioner, as in :class:`jtrees.DGT`. A trial has all updates.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(jtrees.TEL(depth=1, trees=2, epochs=20), x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> splits = fit.model.network.params.weights, fit.model.network.params.bias
      >>> count, overflows = jtrees.routing.reachable_leaves(fit.model.scaling.transform(x), *splits, gamma=0.5)
      >>> fit.model.predict(x).shape, count.shape, bool(overflows)
      ((40,), (2, 40), False)
    """

    depth: int = option(4, most=16)
    trees: int = option(10)
    gamma: float = option(0.5, above=0)
    l2: float = option(0.0, least=0)
    step: Literal["smooth", "logistic"] = option("smooth")
    lazy: bool = option(True)
    hard: bool = option(False)
    width: int | None = option(None)
    early_stopping: bool = option(True)
    precondition: float | Literal["auto"] = option("auto", least=0, below=1)

    chooses_updates = True

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        checks.check_size("trees", self.trees, topology.num_leaves(self.depth) * (shape[1] + math.prod(task.shape)))
        super().check(task, shape)

    @property
    def _is_lazy(self) -> bool:
        return self.lazy and self.step == "smooth"  # with logistic steps, a batch touches all rows

    def method(self, run: Run) -> training.Method:
        options: Any = {"step": self.step, "l2": self.l2, "width": self.width}
        rate = self.learning_rate if self._is_lazy else None
        return tel(self.depth, self.trees, self.gamma, task=run.task, learning_rate=rate, **options)

    def optimizer(self, run: Run) -> optax.GradientTransformation:
        return training.lazy_adam(self.learning_rate) if self._is_lazy else optax.adam(self.learning_rate)

    def model(self, run: Run, params: Ensemble) -> Any:
        return hardened(params, run.batch, run.task) if self.hard else SoftEnsemble(params, self.gamma, self.step)  # type: ignore[arg-type]

    def evaluate(self, run: Run, params: Ensemble) -> Array:
        if self.hard:
            return super().evaluate(run, params)
        outputs = lambda params, x: params.outputs(x, self.gamma, step=self.step, width=self.width)
        return output_loss(run.task, outputs, params, run.evaluation)
