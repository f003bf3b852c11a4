"""GET: annealed scaled sigmoids, hard leaves and many starts.

The source is Algorithm 1 of Mao & Cao, "Can a Single Tree Outperform an Entire Forest?", 2024. ``get`` is the method
for :func:`jtrees.train`, and ``GET`` is the paper's recipe.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, ops, pytree, topology, training, validation as checks
from jtrees.methods.annealed.algorithm import Annealed, Default
from jtrees.search import Ranges, option
from jtrees.tasks import Regression, Task, check_log_loss
from jtrees.training import Batch
from jtrees.tree import ObliqueTree
from pallas_kernels import Implementation

# Updates under each sharpness. 3000 is the paper's number. Linear leaves are equally accurate with 1000 updates, and
# those of deep trees with 250 (experiments.options).
_EPOCHS, _EPOCHS_LINEAR, _EPOCHS_LINEAR_DEEP = 3000, 1000, 250
_DEEP = 6  # depth beyond which trees are deep


def get(
    depth: int,
    alpha: training.Number,
    *,
    leaves: Literal["constant", "linear"] = "constant",
    task: Task = Regression(),
    l1: float | Array = 0.0,
    implementation: Implementation = None,
    scored: bool = True,
) -> training.Method:
    """Returns the GET method, which minimises the expected loss of a tree with scaled sigmoids (eq. 3 to 5).

    The loss is the mean over the samples, where the paper has the sum. Parameters are an :class:`ObliqueTree`.
    Hardening refits its leaves by hard routing. The ``score`` is the loss of the hard tree:

    - the mean squared error, for constant leaves;
    - the expected mean squared error on new samples (:func:`jtrees.leaves.fit_shrunk`), for linear leaves;
    - the log loss, for classes, whose leaves hold logits during training and class frequencies after hardening.

    The method assumes that x and regression targets, ``(n,)`` or ``(n, k)``, are scaled to about [0, 1].

    Args:
      depth: depth of the tree, 1 to 16.
      alpha: sharpness, the factor of the scores in the sigmoid, above 0: a number, a traced number, or an optax
        schedule of the step.
      leaves: ``"constant"``, or ``"linear"`` for GET-Linear.
      task: what is predicted.
      l1: strength of an L1 penalty on the split weights, ``l1 * sum_j |w_j|_1``.
      implementation: implementation of the loss and its gradient, XLA or a kernel: see :mod:`jtrees.ops`.
      scored: whether the loss comes with the score of the hard tree. The score of linear leaves costs a fit. If False,
        the score is the loss.

    Raises:
      ValueError: for a depth or an alpha out of range, an unknown kind of leaves, or linear leaves in classification.
    """
    options: Any = {"leaves": leaves, "task": task, "l1": l1, "implementation": implementation, "scored": scored}
    return soft_method(depth, alpha, name="alpha", route="sigmoid", **options)


def soft_method(
    depth: int,
    sharpness: training.Number,
    *,
    name: str,
    route: Any,
    leaves: str,
    task: Task,
    l1: float | Array,
    implementation: Implementation,
    scored: bool,
) -> training.Method:
    """Returns a method that trains a tree on the expected loss of a soft routing of sharpened scores."""
    # `name` is the name of the sharpness in messages, and `route` is the routing of `expected_loss`. `get` describes
    # the other arguments.
    depth, kind = checks.check_depth(depth), kinds.kind_of(leaves, task)
    check_log_loss(task)
    if not callable(sharpness):
        checks.check_number(name, sharpness, above=0)
    checks.check_number("l1", l1, least=0)

    def init(batch: Batch, *, key: Array) -> ObliqueTree:
        """Returns weights and biases from U(-1, 1), and the initial leaves of their kind."""
        task.check(batch.y)
        nodes, (_, p), dtype = topology.num_nodes(depth), batch.x.shape, batch.x.dtype
        weights_key, bias_key, leaves_key = jax.random.split(key, 3)
        weights = jax.random.uniform(weights_key, (nodes, p), dtype, -1, 1)
        bias = jax.random.uniform(bias_key, (nodes,), dtype, -1, 1)
        return ObliqueTree(weights, bias, kind.start(leaves_key, nodes + 1, batch.x, batch.y, task.shape))

    def loss(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        x, y, weight = batch
        factor = training.at_step(sharpness, step)
        w, b = factor * params.weights, factor * params.bias
        options = {"route": route, "implementation": implementation}
        loss, leaf = ops.expected_loss(w, b, params.leaves, x, y, weight=weight, **options)
        score = params.leaves.criterion(leaf, x, y, weight) if scored else loss
        return loss + l1 * jnp.abs(params.weights).sum(), score

    return training.Method(init, loss, lambda params, batch: params.refit(*batch))


@pytree.dataclass(kw_only=True)
class GET(Annealed):
    """GET's recipe (Algorithm 1): many starts under increasingly steep sigmoids, the first from CART.

    Each start trains under one sharpness after another, on full batches, by AdamW with a linear warm-up, then cosine
    decay. Features have mean 0 and deviation 1/3. A stage starts from the best hard tree of the previous stage, with
    refitted leaves. With ``cart=True``, CART is returned if no start beats it. The best tree has the lowest

    - mean squared error on the training data, for constant leaves;
    - expected mean squared error on new data (:func:`jtrees.leaves.fit_shrunk`), for linear leaves;
    - mean log loss on the training data, for classes;
    - mean squared error or log loss on ``validation``, if given.

    For linear leaves, the reported loss is at least the mean squared error on the training data, and CART is fitted to
    the residuals of a linear regression. In tables of more than 64 features, linear leaves share a ridge regression of
    all rows. Each leaf corrects it along 64 features: the output of the ridge regression, and the columns that matter
    most to the target. The search splits the same 64 features.

    The search is successive halving. If there is no ``validation``, the short stages hold out a fifth of the rows, and
    CART is grown without these rows too. If CART predicts the held-out rows as well as the best start, no start
    continues, and the model is CART, grown on all rows of a stage. In a table of at most 1000 rows, different starts
    hold out different fifths. Linear leaves hold out no rows and use the expected error.

    The options ``epochs=3000``, ``halving=False``, ``ridge=False``, ``precondition=0`` and ``shrink=False`` are close
    to the paper's procedure, and take three to ten times as long. Its subtree polish is :class:`jtrees.Polished`.

    A tree of :class:`jtrees.Boosted` has other defaults for options that are None: ``starts=1``, ``epochs=20``,
    ``learning_rate=0.03``, ``alpha_ranges=((20, 60),)``, ``cart="binned"``, ``precondition=0``, and no ``ridge``,
    ``shrink`` or ``halving``. ``rows="auto"`` is then 4000, and at least 60 for each leaf. Such a tree splits at most
    64 features: of a random half, those that vary most with the targets of the round.

    The report is a :class:`jtrees.methods.AnnealedReport`.

    Attributes:
      depth: depth of the tree, 1 to 16.
      leaves: ``"constant"``, or ``"linear"`` for the squared error. For classes and other losses,
        ``Boosted(GET(leaves="linear"))`` and :class:`jtrees.Refined` add trees with linear leaves.
      starts: number of starts, including the starts from CART. None: 10.
      epochs: updates under each sharpness, in the long stages. None: 3000 for constant leaves; 1000 for linear leaves,
        or 250 if the depth is above 6. If only the best starts continue (``halving``), a stage of linear leaves ends
        on CPUs when its criterion stalls: three of its about 20 evaluations lower the criterion by less than 1 per
        cent in total.
      learning_rate: peak learning rate. None: 0.01.
      alpha_ranges: ranges of the sharpnesses of a start, in the order of use: pairs (low, high). None: the paper's
        ``((5, 25), (50, 150))``.
      l1: strength of the L1 penalty on split weights (of scaled data).
      cart: whether start 0 is CART (needs scikit-learn). If it is False, the tree may be worse than CART. ``"binned"``:
        CART over 256 bins of each feature, within the compiled program. None: True.
      ridge: whether start 1 is CART on the outputs of a ridge regression (of indicators of the classes). This needs
        ``cart=True``, constant leaves, at most 256 classes or outputs, and at most 2048 features or at most 2048
        samples. None: True.
      precondition: strength of the preconditioner, from 0 (none) to below 1. It helps gradient descent if features are
        correlated. ``"auto"``: 0.9, 0.99 or 0.999 for every second random start, 0 for the other starts and for more
        than 512 features. None: ``"auto"``.
      shrink: whether constant leaves are shrunk towards their ancestors' means or class frequencies at the end, which
        raises the training loss (:func:`jtrees.leaves.fit_hierarchical`). None: True.
      halving: whether only the best fifth of the starts (at least two) trains for all epochs, after a tenth of the
        epochs for all starts. None: True.
      rows: approximate number of rows that a stage is trained on. A longer table is sampled, once for the short stages
        and again for the long stages. The leaves of the result are fitted to all rows. ``"auto"``: 20,000, and at least
        16 for each leaf. None: all rows.
      implementation: implementation of the training step, None for the fastest: see :mod:`jtrees.ops`.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(jtrees.GET(depth=1, starts=1, epochs=20), x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> print(fit.predict([[-0.5], [0.5]]))
      [-1.  1.]
    """

    alpha_ranges: Ranges | None = option(None)

    soft = staticmethod(get)
    defaults = Annealed.defaults | {"alpha_ranges": Default(((5.0, 25.0), (50.0, 150.0)), boosted=((20.0, 60.0),))}

    @property
    def sharpness_ranges(self) -> np.ndarray:
        return np.asarray(self.alpha_ranges, np.float32)

    @property
    def updates(self) -> int:
        if self.epochs is not None:
            return self.epochs
        if self.leaves == "constant":
            return _EPOCHS
        return _EPOCHS_LINEAR if self.depth <= _DEEP else _EPOCHS_LINEAR_DEEP
