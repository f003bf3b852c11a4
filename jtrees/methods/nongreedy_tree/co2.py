"""CO2: oblique splits trained greedily, level by level (Norouzi, Collins, Fleet and Kohli, "CO2 Forest", 2015).

Each node is trained on the surrogate loss of a tree of depth one. CO2's tree is the initial tree of non-greedy trees
(Norouzi et al., NeurIPS 2015).
"""

from typing import Literal

from jaxtyping import Array
import numpy as np

from jtrees import pytree
from jtrees.methods.nongreedy_tree.greedy import Growing
from jtrees.methods.nongreedy_tree.greedy_recipe import GreedyRecipe, grow, strengths_of
from jtrees.methods.nongreedy_tree.surrogate import MAX_DEPTH
from jtrees.search import Run, Runs, SearchResult, options


@pytree.dataclass(kw_only=True)
class CO2(GreedyRecipe):
    """CO2's recipe: a greedy oblique tree, with all nodes of a level trained side by side.

    The tree grows from the root down. Each node is initialised with the split of the largest information gain (in
    regression the largest variance reduction) on the samples that reach it. This split uses one feature, or one output
    of a ridge regression. Stochastic gradient descent then minimises the surrogate loss of a tree of depth one, whose
    two leaves belong to the node. Rows of splits stay in the ball ``|w|^2 <= nu``, bias included. The learning rate
    decays to zero on each level.

    The trained split is kept if its gain exceeds the gain of the initial split. At the end, leaves are set to means or
    smoothed class frequencies, and shrunk towards the values of their ancestors. The paper has only axis-aligned
    initial splits (``ridge=False``), no preconditioner and no shrinkage.

    Features and targets are scaled to mean 0 and deviation 1, so nu is comparable between data sets. The report is a
    :class:`jtrees.methods.GreedyReport`.

    Attributes:
      depth: depth of the tree, 1 to 20.
      epochs: number of passes over the data for each level. None: 100, with at least 300 and at most 7500 updates.
        Batches of fewer than 128 samples may take more updates, up to 960,000 samples for each level.
      batch_size: samples in a mini-batch, at most n. The last samples of a pass that do not fill a mini-batch are
        skipped until the next shuffle.
      learning_rate: initial learning rate. None: 0.5, or 8 divided by the number of features if that is less.
      nu: squared radius of the ball, above 0.
      momentum: momentum of the steps, in [0, 1) (see :func:`jtrees.training.lazy_momentum`).
      bins: number of bins of a feature. Their edges are the thresholds of initial splits.
      ridge: whether initial splits may also use outputs of a ridge regression. For several targets these are the
        principal components of the outputs, for classes the linear discriminants. It has no effect in tables with more
        than 1024 features.
      shrink: whether constant leaves are shrunk towards their ancestors' means or class frequencies at the end
        (:func:`jtrees.leaves.fit_hierarchical`). It has an effect only for the squared error and the log loss. The
        strength has the lowest loss on the validation set. If there is no validation set, the held-out rows of the runs
        of ``precondition="auto"`` are used instead. If there are no such runs, generalised cross-validation chooses the
        strength.
      precondition: strength of the preconditioner, from 0 (none) to below 1. It helps gradient descent if features are
        correlated. ``"auto"``: the best of 0, 0.9 and 0.99 in runs on four fifths of the rows. It is 0 if the features
        are nearly uncorrelated, or if there are fewer than 500 rows or more than 512 features. If ``shrink`` is True, a
        table of 100 to 1024 rows and at most 512 features has at least one such run.
      rows: approximate number of rows that splits are trained on; a longer table is sampled. Leaves are fitted to all
        rows. ``"auto"``: 20,000, and at least 16 for each leaf. None: all rows.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(jtrees.CO2(depth=1, epochs=5), x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> fit.report.search.active_leaves
      2
    """

    depth: int = options.depth(8, MAX_DEPTH)
    epochs: int | None = options.optional_count(10)
    batch_size: int = options.count(128)
    learning_rate: float | None = options.optional_positive()
    nu: float = options.positive(100.0)
    momentum: float = options.part(0.9)
    bins: int = options.count(32, minimum=2)
    ridge: bool = options.flag(True)
    shrink: bool = options.flag(True)
    precondition: float | Literal["auto"] = options.precondition()
    rows: int | Literal["auto"] | None = options.rows()

    @property
    def level_epochs(self) -> int | None:
        return self.epochs

    def trained(self, runs: Runs, trials: list[SearchResult | None]) -> list[SearchResult]:
        states, losses = grow(runs)
        results = runs.fetch(runs.map(_result, states, strengths_of(runs, trials)))
        return [one._replace(history=np.concatenate(lost)) for one, lost in zip(results, losses, strict=True)]


def _result(run: Run, state: Growing, strength: Array) -> SearchResult:
    greedy = run.recipe.greedy(run)
    tree, _ = greedy.finished_level(state, run.batch)
    return greedy.result(tree, state.run.step, state.run.finite, run, strength)
