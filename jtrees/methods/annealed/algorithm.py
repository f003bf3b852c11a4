"""Algorithm 1 of GET with successive halving: many starts under increasingly sharp routings, the first from CART.

:class:`jtrees.GET` and :class:`jtrees.RADDT` are recipes of this algorithm, with their soft routing and sharpnesses.

1. ``grow_carts`` and ``initial_starts`` (starts.py) grow CART, which is from the authors' program, and draw the
   sharpnesses and the random splits (lines 4-6).
2. ``train_stages`` (stages.py) trains a start under one sharpness after another (lines 7-14).
3. :meth:`Annealed.search` calls ``train_stages`` twice with halving: briefly for all starts, then with all updates for
   the best starts.
4. ``best_tree`` (result.py) refits the best tree in the user's units and compares it with CART (line 15).
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, pytree, topology, training, validation as checks
from jtrees.methods.annealed import boosted_tree
from jtrees.methods.annealed.limits import limited_by_deadline, narrowed
from jtrees.methods.annealed.result import best_tree
from jtrees.methods.annealed.stages import StartResult, train_stages
from jtrees.methods.annealed.starts import DEVIATIONS, Carts, grow_carts, held_out_rows, initial_starts
from jtrees.search import Fitted, Problem, Recipe, Run, gather, option
from jtrees.search.minibatch import refitted
from jtrees.search.recipe import GrowArguments
from jtrees.search.sample import most_rows, sampled
from jtrees.tasks import Task, check_log_loss
from jtrees.tree import ObliqueTree
from pallas_kernels import Implementation

# If there is halving, all starts first train for a tenth of the epochs. A fifth of the starts continues, and at least
# two.
_SHORT, _KEPT, _FEWEST_KEPT = 10, 5, 2
_WEAK_ROWS, _WEAK_ROWS_OF_LEAF = 4000, 60  # rows of a round of boosting, and fewest rows of a round for each leaf


class Default(NamedTuple):
    """The value of an option that is None: for a single tree, and for a tree of a boosted sum."""

    single: Any
    boosted: Any


@pytree.dataclass(kw_only=True)
class Annealed(Recipe):
    """A recipe of the annealed algorithm. :class:`jtrees.GET` describes the options.

    Attributes:
      soft: the function that returns the method, with the arguments of :func:`jtrees.methods.get`.
      defaults: the values of the options that are None.
    """

    soft: ClassVar[Callable[..., training.Method]]
    deviations, clips_near = DEVIATIONS, False

    # The values for a boosted sum were chosen for GET, by its losses on held-out rows.
    defaults: ClassVar[dict[str, Default]] = {
        "starts": Default(10, boosted=1),
        "epochs": Default(None, boosted=20),
        "learning_rate": Default(0.01, boosted=0.03),
        "cart": Default(True, boosted="binned"),
        "ridge": Default(True, boosted=False),
        "precondition": Default("auto", boosted=0.0),
        "shrink": Default(True, boosted=False),
        "halving": Default(True, boosted=False),
    }

    depth: int = option(4, most=16)
    leaves: Literal["constant", "linear"] = option("constant")
    starts: int | None = option(None)
    epochs: int | None = option(None)
    learning_rate: float | None = option(None, above=0)
    l1: float = option(0.0, least=0)
    cart: bool | Literal["binned"] | None = option(None)
    ridge: bool | None = option(None)
    precondition: float | Literal["auto"] | None = option(None, least=0, below=1)
    shrink: bool | None = option(None)
    halving: bool | None = option(None)
    rows: int | Literal["auto"] | None = option("auto")
    implementation: Implementation = option(None)

    def method(self, sharpness: Array, task: Task, *, scored: bool) -> training.Method:
        """Returns the method under a sharpness. If ``scored``, its loss also returns the score of the hard tree."""
        options: Any = {"leaves": self.leaves, "l1": self.l1, "implementation": self.implementation}
        return self.soft(self.depth, sharpness, task=task, scored=scored, **options)

    @property
    def sharpness_ranges(self) -> np.ndarray:
        """Lowest and highest sharpness of each stage, ``(stages, 2)``. Each start draws its sharpnesses from them."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """Number of sharpnesses."""
        return len(self.sharpness_ranges)

    @property
    def updates(self) -> int:
        """Number of updates in each stage."""
        return self.epochs  # type: ignore[return-value]

    @property
    def _continuing(self) -> int:
        """Number of starts that continue after the short stages."""
        return max(_FEWEST_KEPT, self.starts // _KEPT)  # type: ignore[operator]

    @property
    def halves(self) -> bool:
        """Whether there are short stages."""
        return bool(self.halving) and self.starts > self._continuing  # type: ignore[operator]

    def between(self, run: Run, splits: ObliqueTree, score: Array) -> tuple[ObliqueTree, Array]:
        """Returns the initial splits of the next stage and their score."""
        return splits, score

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        check_log_loss(task)
        kinds.kind_of(self.leaves, task)  # raises for linear leaves with a loss of classes
        numbers = topology.num_nodes(self.depth) * (shape[1] + 1)  # parameters of the splits of a start
        checks.check_size("starts", self.starts, numbers)
        most_rows(self)

    def tree_leaves(self, task: Task) -> str:
        return self.leaves

    def keeps_monotone(self, task: Task) -> bool:
        return self.leaves == "constant"

    def with_defaults(self) -> Any:
        return self._filled("single")

    def with_boosting_defaults(self) -> Any:
        rows = max(_WEAK_ROWS, _WEAK_ROWS_OF_LEAF * 2**self.depth) if self.rows == "auto" else self.rows
        return self._filled("boosted").replace(rows=rows)

    def _filled(self, tree: str) -> Any:
        """Returns the recipe with the values for a single tree or a tree of a sum in the options that are None."""
        missing = [name for name in self.defaults if getattr(self, name) is None]
        return self.replace(**{name: getattr(self.defaults[name], tree) for name in missing})

    async def grow_arguments(self, problem: Problem) -> GrowArguments | None:
        # A subclass with another ``search`` finds other trees than ``grow``.
        return boosted_tree.grow_arguments(self, problem) if type(self).search is Annealed.search else None

    grow = staticmethod(boosted_tree.grow)

    async def search(self, problem: Problem) -> Fitted:
        """Trains all starts for a tenth of the updates, then the best starts for all updates."""
        # The short stages hold out rows. The losses on the held-out rows compare the starts with each other and with
        # CART. No rows are held out if there is a validation set. Linear leaves hold out no rows either: their
        # criterion is an expected error on new data.
        recipe = limited_by_deadline(self, problem)
        return await recipe._search(problem.replace(recipe=recipe))

    async def _search(self, problem: Problem) -> Fitted:
        """Returns the result of :meth:`search`, with all starts."""
        all_rows, narrowing = await narrowed(problem)
        sample = sampled(all_rows, most_rows(self))
        validates = problem.has_validation_set
        holds_out = self.halves and self.leaves == "constant" and not validates
        masks = held_out_rows(sample) if holds_out else []
        carts = await grow_carts(sample, masks)
        starts = initial_starts(sample, carts)
        if not self.halves:
            full = await gather(*(train_stages(sample, s.splits, s.long, self.updates, s.matrix) for s in starts))
            return best_tree(problem, starts, carts, [[result] for result in full], narrowing=narrowing)

        folds, epochs = [sample.holding_out(mask) for mask in masks] or [sample], max(1, self.updates // _SHORT)
        stages = (
            train_stages(folds[k % len(folds)], start.splits, start.short, epochs, start.matrix)
            for k, start in enumerate(starts)
        )
        short = await gather(*stages)
        scores, best_cart = np.array([result.score for result in short]), -1
        if masks:
            scores, best_cart = await self._compared(folds, short, carts)
            # A tree that was trained without some rows is not the result.
            short = [result._replace(score=np.inf) for result in short]
        order = np.argsort(scores, kind="stable")[: self._continuing] if best_cart < 0 else []
        chosen = [int(k) for k in order if np.isfinite(scores[k])]
        results = [[result] for result in short]
        if chosen and (masks or problem.monitor.has_time()):
            # If the scores of all stages are compared, all stages must train on one sample of the rows.
            fresh = sampled(all_rows, most_rows(self), 1 if masks or validates else 0)
            if masks:  # the program of the short stages serves the long stages too
                fresh = fresh.holding_out(np.zeros(fresh.shape[0], bool))
            stages = (
                train_stages(fresh, short[k].splits, starts[k].long, self.updates, starts[k].matrix) for k in chosen
            )
            for k, result in zip(chosen, await gather(*stages), strict=True):
                results[k].append(result)
        return best_tree(problem, starts, carts, results, best_cart, narrowing)

    async def _compared(self, folds: list[Problem], short: list[StartResult], carts: Carts) -> tuple[np.ndarray, int]:
        """Returns the scores of all starts, and the CART tree that beats the starts, of :func:`beside_cart`."""
        trees = [(folds[k % len(folds)], result.tree) for k, result in enumerate(short)]
        trees += [(fold, tree) for fold, fold_trees in zip(folds, carts.fold_trees, strict=True) for tree in fold_trees]
        values = await gather(*(fold.map(refitted, tree) for fold, tree in trees))
        losses = np.array([value.host[1] for value in values])
        scores = np.where([result.finite for result in short], losses[: len(short)], np.inf)
        if not carts.trees:
            return scores, -1
        evaluations: Any = [fold.evaluation for fold in folds]
        share = np.array([np.sum(rows.weight, dtype=np.float64) for rows in evaluations])
        return beside_cart(scores, losses[len(short) :].reshape(len(folds), -1), share, self._continuing)


def beside_cart(
    losses: np.ndarray, cart_losses: np.ndarray, share: np.ndarray, continuing: int
) -> tuple[np.ndarray, int]:
    """Returns the scores of the starts of a run, and the number of the CART tree that beats all of them, or -1.

    CART is grown without the held-out rows. If CART predicts the held-out rows as well as the best start, no start
    continues: the splits of many features follow noise. If there are several folds, the starts that would continue must
    be better than CART on average. Folds differ in difficulty, so the score of a start is its loss minus CART's loss.
    The mean over several starts guards against a lucky loss.

    Args:
      losses: loss of each start on the rows that it holds out, infinite if it is not finite, ``(starts,)``.
      cart_losses: loss of each CART tree on each fold, ``(folds, trees)``.
      share: total weight of each fold, ``(folds,)``.
      continuing: number of starts that would continue.
    """
    best = int((share @ cart_losses).argmin())
    differences, several = losses - np.resize(cart_losses[:, best], len(losses)), len(cart_losses) > 1
    lowest = np.sort(differences)[: continuing if several else 1]
    lowest = lowest[np.isfinite(lowest)]
    is_better = len(lowest) > 0 and lowest.mean() < 0
    return differences if several else losses, -1 if is_better else best
