"""LatentTree: a tree and a predictor, trained jointly by differentiating an argmin.

The source is Zantedeschi et al., "Learning Binary Decision Trees by Argmin Differentiation", ICML 2021, Algorithm 2.
``latent`` is the method for :func:`jtrees.train`, and ``LatentTree`` is the recipe. The layer for larger networks is
:class:`jtrees.nn.LatentTree`.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import optax

from jtrees import io, losses, prediction, pytree, routing, training, validation as checks
from jtrees.methods.latent_tree.architecture import MAX_DEPTH, WIDEST, Architecture, Split, is_tree
from jtrees.methods.latent_tree.network import LatentNetwork, active_on, centered
from jtrees.search import Fitted, NetworkRecipe, Preconditioning, Problem, Run, checked_values, option
from jtrees.search.minibatch import output_loss
from jtrees.soft_model import SoftModel, near_targets
from jtrees.tasks import Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_LEAST = 2e-3  # early stopping: relative learning rate below which training ends; 0.001 is the first below it


def latent(architecture: Architecture | int, penalty: float | Array, *, task: Task = Regression()) -> training.Method:
    """Returns the LatentTree method: minimises the loss of a predictor on ``[x ; z]``, z traversals of a pruned tree.

    Parameters belong to a flax module. The loss is the loss of the soft traversal, and the score equals the loss. A
    model fitted by the recipe keeps the activity of the nodes on the training data.

    ``harden`` returns an :class:`ObliqueTree` if the tree alone determines the prediction, and else None. This is the
    case for linear splits and a linear predictor with ``inputs="z"``. The hardened tree has the same splits, is pruned
    below inactive nodes, and has constant leaves fitted to x and y. The method assumes features of mean 0 and deviation
    1. Sample weights also affect the pruning.

    Args:
      architecture: the architecture; an integer stands for ``Architecture(depth)``.
      penalty: penalty of an active node *per sample*, above 0. It is the paper's lambda divided by the paper's batch
        size, so pruning does not depend on the number of samples. It may be traced.
      task: what is predicted, and by which loss. In classification, outputs are logits.

    Raises:
      ValueError: for an unknown option, or an option out of range.
    """
    from jtrees.methods.latent_tree import modules  # imported here: loading flax.nnx takes a fifth of a second

    if not isinstance(architecture, Architecture):
        architecture = Architecture(architecture)
    architecture = Architecture(**checked_values(LatentTree, **architecture._asdict()))
    checks.check_number("penalty", penalty, above=0)

    def init(batch: Batch, *, key: Array) -> Any:
        task.check(batch.y)
        center = partial(centered, weight=batch.weight)
        return modules.initial(key, batch.x, architecture, task, center, task.initial(batch))

    def total(params: Any, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        network = modules.network_of(params, batch.x, architecture, task)
        scores = network.scores(batch.x)
        active = routing.activity(scores, penalty, batch.weight)
        outputs = partial(network.outputs, batch.x, scores, active)
        loss_of = lambda outputs: losses.weighted_mean(task.loss(outputs, batch.y), batch.weight)
        return loss_of(outputs(key)), loss_of(outputs())  # the score is without dropout

    def harden(params: Any, batch: Batch) -> ObliqueTree | None:
        batch = jax.tree.map(jnp.asarray, batch)
        return active_on(batch, params, architecture, task, penalty).hard_tree(batch)

    return training.Method(init, total, harden)


@io.model
@pytree.dataclass(repr=False)
class LatentModel(SoftModel):
    """A fitted LatentTree; its network is a :class:`LatentNetwork`."""

    def traverse(self, x: ArrayLike) -> Any:
        """Returns the traversal z of each sample at all nodes, ``(nodes, n)``.

        Raises:
          ValueError: in the cases of :meth:`predict`.
        """
        arguments: Any = {"features": self.features, "scaling": self.scaling, "medians": self.medians}
        return prediction.evaluate(LatentNetwork.position, self.network, x, **arguments).T


class _Hardened(NamedTuple):
    """The network of a run and its hard tree, or None if the tree alone does not determine the prediction."""

    network: LatentNetwork
    tree: ObliqueTree | None


@pytree.dataclass(kw_only=True)
class LatentRecipe(NetworkRecipe):
    """The options and the training that :class:`jtrees.LatentTree` and :class:`jtrees.LatentClustering` share."""

    # The base class has linear splits and a linear predictor.

    depth: int = option(4, most=MAX_DEPTH)
    penalty: float = option(0.01, above=0)
    weight_decay: float = option(0.3, least=0)
    inputs: Literal["z", "xz"] = option("xz")
    patience: int = option(10)
    early_stopping: bool = option(True)

    model_type = LatentModel

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        from jtrees.methods.latent_tree import modules

        modules.graph_of(shape[1], self._architecture, task, jnp.dtype(jnp.float32))  # raises for splits with state
        super().check(task, shape)

    @property
    def _architecture(self) -> Architecture:
        return Architecture(self.depth, inputs=self.inputs)

    def method(self, run: Run) -> training.Method:
        return latent(self._architecture, self.penalty, task=run.task)

    def optimizer(self, run: Run) -> optax.GradientTransformation:
        plateau = training.reduce_until_vanished(
            factor=0.1,
            least=_LEAST if self.early_stopping else 0.0,
            patience=self.patience,
            accumulation_size=self.schedule(len(run.batch.x)).every,
        )
        return optax.chain(optax.adamw(self.learning_rate, weight_decay=self.weight_decay), plateau)

    def has_vanished(self, opt_state: Any) -> Array:
        return opt_state[1].vanished

    def _network(self, run: Run, params: Any) -> LatentNetwork:
        batch = training.state.normalised(run.batch)
        return active_on(batch, params, self._architecture, run.task, self.penalty)

    def evaluate(self, run: Run, params: Any) -> Array:
        bounded = near_targets if self.is_bounded(run.task) else lambda outputs: outputs
        outputs = lambda network, x: bounded(network.outputs(x))
        return output_loss(run.task, outputs, self._network(run, params), run.evaluation)

    def model(self, run: Run, params: Any) -> _Hardened:
        network = self._network(run, params)
        return _Hardened(network, network.hard_tree(run.batch))

    def finish(self, problem: Problem, fitted: Fitted, preconditioning: Preconditioning | None = None) -> Fitted:
        """Returns the result in the user's units; ``fitted`` has a :class:`_Hardened`."""
        network, tree = fitted.scaled
        fitted = fitted._replace(scaled=network.replace(task=problem.task.of_models))
        fitted = super().finish(problem, fitted, preconditioning)._replace(scaled=tree)
        if tree is None or fitted.model is None:
            return fitted
        data: Any = problem.data
        with problem.restoring():
            tree = data.refit(data.scaling.restore_splits(tree), "constant")[0].merged()
        return fitted._replace(tree=tree)


@pytree.dataclass(kw_only=True)
class LatentTree(LatentRecipe):
    """LatentTree's recipe: a tree, and a predictor on the traversals of samples.

    The search trains on mini-batches with AdamW. The learning rate is divided by ten when the training loss reaches a
    plateau. Split biases are initialised to the means of the samples that reach each node. Features are scaled to mean
    0 and deviation 1, targets to [0, 1].

    The model has the parameters after the last update. If ``validation`` is given, the model has the evaluated
    parameters with the lowest validation loss. The activity of its nodes is computed on the whole training data. The
    defaults suit thousands of rows. For half a million rows, the paper has batches of 512, a learning rate of 0.001 and
    a patience of 2.

    For linear splits and a linear predictor on z alone, the fit's ``tree`` is an :class:`ObliqueTree`. Its leaves are
    constants or class frequencies fitted to the training data. In all other cases ``tree`` is None, as predictions need
    the predictor. A user-defined loss of the task, on scaled targets or on logits, is also the loss of the fit. The
    report is a :class:`jtrees.search.TrainingReport`; ``model.network.active`` has the activity of all nodes.

    Attributes:
      depth: depth of the tree, 1 to 10.
      epochs: number of passes over the data; None: as in :class:`jtrees.DGT`.
      batch_size: samples in a mini-batch, as in :class:`jtrees.DGT`.
      learning_rate: initial learning rate.
      penalty: penalty of an active node per sample: the paper's lambda divided by its batch size.
      weight_decay: strength of AdamW's decay of all parameters, relative to the learning rate. The paper has no decay.
        No decay (0) is better if hundreds of features carry no information, or if differences of nearly equal features
        carry the targets.
      split: split function: ``"linear"``, ``"elu"`` (linear, then ELU), ``"mlp"`` with one hidden layer, or
        ``(features, nodes, rngs) -> module`` from ``(n, features)`` to ``(n, nodes)``.
      predictor: ``"linear"``, or ``"mlp"`` with two hidden layers and ELU.
      inputs: inputs of the predictor, ``"z"`` or ``"xz"``.
      hidden: width of hidden layers.
      dropout: dropout rate of the predictor's hidden layers, in [0, 1).
      patience: number of epochs without a lower loss before the learning rate is reduced. If ``epochs`` is None, the
        unit is a hundredth of all updates.
      early_stopping: whether training can end early. It ends when the learning rate is a thousandth of its initial
        value, or after a quarter of all evaluations in a row without a lower loss on ``validation``.
      precondition: strength of the preconditioner, as in :class:`jtrees.DGT`. User-defined splits always have 0.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(jtrees.LatentTree(depth=1, epochs=20), x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> fit.tree is None, fit.model.traverse(x).shape  # the model is a tree and its predictor; three nodes
      (True, (3, 40))
    """

    split: Split = option("linear")
    predictor: Literal["linear", "mlp"] = option("linear")
    hidden: int = option(64, most=WIDEST)
    dropout: float = option(0.0, least=0, below=1, traced=False)
    precondition: float | Literal["auto"] = option("auto", least=0, below=1)

    @property
    def _architecture(self) -> Architecture:
        return Architecture(self.depth, self.split, self.predictor, self.inputs, self.hidden, self.dropout)

    def is_bounded(self, task: Task) -> bool:
        return task.in_units and task.link_name in ("identity", "sorted")

    def tree_leaves(self, task: Task) -> str | None:
        return "constant" if is_tree(self._architecture) else None

    @property
    def strength(self) -> float | str:
        return 0.0 if callable(self.split) else self.precondition  # a preconditioner is for linear functions
