"""A search over many starts, the first ones from CART, each trained under increasingly sharp routings.

GET and RADDT use this search; each adds its soft routing (a :class:`jtrees.Method` for a sharpness) and its schedule of
sharpnesses. The result is the best hard tree of all starts, or CART itself if none is better.
"""

from collections.abc import Callable
import dataclasses
from functools import partial
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, splitting, topology, training, validation as checks
from jtrees.data import Data, Scaling, Table, without_padding
from jtrees.search._cart import grown_cart, grown_in_bins, grown_on_ridge
from jtrees.search._one_start import EVALUATIONS, Run, Stages
from jtrees.search._precondition import WIDEST, Spectrum, drawn_folds, matrix, spectrum
from jtrees.search.monitor import Monitor
from jtrees.search.recipe import Finished, Round, Rounds, Search, SearchResult
from jtrees.tasks import Task
from jtrees.training import NOT_TAKEN, Batch, map_starts
from jtrees.tree import ObliqueTree

# Unit of the features, in standard deviations: about the range of a uniform variable. The paper's learning rate,
# sharpnesses and random initialisation assume features in [0, 1].
DEVIATIONS = 3.0
# Slopes of linear leaves in the user's units for which products with fractions of a deviation stay in float32's range.
_FLATTEST, _STEEPEST = 1e-37, 1e36
_DECOMPOSITION = 2  # cost of decomposing a (p, p) matrix, in elements of a step per p**3
_NONE_EXPECTED = 1e30  # a criterion above it, for targets in [0, 1], means that no expected error is defined
# Strengths of the preconditioners of the random starts, in turn. Those from CART, which come first, have none: splits
# of single features ask for none, and those of a ridge regression know the correlations.
_STRENGTHS = (0.9, 0.0, 0.99, 0.0, 0.999, 0.0)
_BINS = 256  # of a feature, for CART within a compiled program
_WIDEST_RIDGE = 2048  # features and samples beyond which there is no ridge regression, which costs min(n, p)**3
# With halving, starts first have this part of the epochs, and this part of them goes on, but at least so many, which on
# one CPU take as long as one.
_SHORT, _KEPT, _FEWEST_KEPT = 10, 5, 2
# Short stages leave a fifth of the rows out. In tables of at most so many rows the starts leave out each fifth in turn,
# as one fifth says little of whether they are better than CART.
_FOLDS, _FEW_ROWS = 5, 1000


class Start(NamedTuple):
    """What ``prepare`` returns.

    Attributes:
      splits: splits of the first m starts, from CART, ``(m, nodes, p)``; or the edges of the bins that they are grown
        from, ``(p, bins)``; or None.
      spectrum: of the features, or None without preconditioning.
      fold: fold of each row, -1 of those in none, ``(n,)``: the short stages of start i leave out fold i, counted from
        0 again after the last; or None.
      grown: as ``splits``, but grown without each fold, ``(folds, m, nodes, p)``; or None.
      shares: total weight of each fold, ``(folds,)``, or None; summed on the host, as a sum over devices that no other
        depends on may wait for ever.
    """

    splits: Any
    spectrum: Spectrum | None = None
    fold: Any = None
    grown: Any = None
    shares: Any = None


class Runs(NamedTuple):
    """The state of the search.

    Attributes:
      runs: those of all starts, stacked.
      fold, grown, shares: as in :class:`Start`.
      beaten_by: index of those of the grown trees that have the lowest loss on the rows left out, if the starts do not
        predict these better; else -1.
    """

    runs: Run
    fold: Any
    grown: Any
    shares: Any
    beaten_by: Array

    @property
    def folds(self) -> int:
        """Number of folds that the short stages leave out in turn."""
        return 1 if self.grown is None else len(self.grown.bias)

    def fold_of(self, number: Array) -> Any:
        """Returns the fold that the short stages of a start leave out; one number where that is the same for all."""
        return number % self.folds if self.folds > 1 else 0

    def weight(self, number: Array, batch: Batch, inside: Any, outside: Any) -> Array:
        """Returns the weights of rows inside and outside the short stages of a start, 0 where a flag is not set."""
        weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
        return jnp.where(jnp.where(self.fold == self.fold_of(number), outside, inside), weight, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Restarts:
    """The functions of the search, and their options.

    Attributes:
      stages: the training of a start.
      sharpness: as for :func:`restarts`, as are ``depth``, ``leaves``, ``starts``, ``cart`` and ``shrink``.
      ridge: whether start 1 is CART on the outputs of a ridge regression.
      kept: number of starts that go on after the short stages; None without halving.
      strengths: strength of the preconditioner of each start, ``(starts,)``, or None.
    """

    stages: Stages
    sharpness: Callable[[Array], Array]
    depth: int
    leaves: str
    starts: int
    cart: bool | str
    ridge: bool
    shrink: bool
    kept: int | None
    strengths: Any

    def scaling(self, table: Table) -> Scaling:
        fitted = Scaling.fit(table, DEVIATIONS)
        if self.leaves == "linear":
            _check_slopes(fitted)
        return fitted

    def prepare(self, batch: Batch, *, key: Array, monitor: Monitor | None = None) -> Start:
        splits = fold = grown = shares = None
        monitor = Monitor() if monitor is None else monitor
        holds_out = self.kept is not None and self.leaves == "constant"
        folds = min(_FOLDS, self.starts) if len(batch.x) <= _FEW_ROWS and self.cart is True else 1
        if self.cart == "binned":
            splits = monitor.on_rows(lambda rows: splitting.edges_of(np.asarray(rows.x), _BINS), without_padding(batch))
        elif self.cart:
            splits = self._grown(batch, monitor.part(1 / (1 + folds) if holds_out else 1))
        if holds_out:
            fold = drawn_folds(batch, key, folds)
            if self.cart is True:
                without = [jax.tree.map(lambda a, i=i: a[fold != i], batch) for i in range(folds)]
                trees = [self._grown(one, monitor.part(1 / (folds - i))) for i, one in enumerate(without)]
                grown = jax.tree.map(lambda *a: np.stack(a), *trees)
                weight = np.ones(len(fold)) if batch.weight is None else np.asarray(batch.weight)
                shares = np.bincount(fold + 1, weight, folds + 1)[1:].astype(np.float32)
        return Start(splits, None if self.strengths is None else spectrum(batch), fold, grown, shares)

    def init(self, start: Start, batch: Batch, *, key: Array) -> Runs:
        count, each = len(self.stages.lengths), self._sharpnesses
        nodes, p = topology.num_nodes(self.depth), batch.x.shape[1]
        # One draw for all, as draws dominate the compile time of this function.
        drawn = jax.random.uniform(key, (self.starts, count + nodes * (p + 1)), batch.x.dtype)
        splits = 2 * drawn[:, count:].reshape(self.starts, nodes, p + 1) - 1
        weights, bias = splits[..., :-1], splits[..., -1]
        # By the rows held out a start that has seen them would be preferred to the others.
        given, of, matrices = start.splits, start.spectrum, None
        if start.grown is not None:
            given = jax.tree.map(lambda a: jnp.stack([a[i % len(a), i] for i in range(a.shape[1])]), start.grown)
        if self.cart == "binned":
            w, b = grown_in_bins(batch, given, self.stages.task, self.depth)
            given = ObliqueTree(w[None], b[None], None)
        if of is not None:
            matrices = jnp.stack([matrix(of, s) for s in self.strengths])
        if given is not None:
            m = len(given.bias)
            if of is not None:
                roots = jnp.stack([matrix(of, s, 0.5) for s in self.strengths[:m]])
                given = jax.vmap(ObliqueTree.composed)(given, roots)
            weights, bias = weights.at[:m].set(given.weights), bias.at[:m].set(given.bias)
        one, splits = partial(self.stages.init, batch=batch), ObliqueTree(weights, bias, None)
        sharpness = [self.sharpness(drawn[:, i : i + each]) for i in range(0, count, each)]
        runs = jax.vmap(one)(jnp.arange(self.starts), splits, jnp.concatenate(sharpness, axis=1), matrices)
        fold, grown, shares = jax.tree.map(jnp.asarray, (start.fold, start.grown, start.shares))
        return Runs(runs, fold, grown, shares, jnp.array(-1, jnp.int32))

    def round(self, at: Round, state: Runs, batch: Batch, validation: Batch | None) -> tuple[Runs, Array]:
        if self.kept is None:
            runs, losses = map_starts(lambda run: self.stages.round(at, run, batch, validation), state.runs)
            return state._replace(runs=runs), losses
        begins, short = (at.stage == self.stages.short) & (at.before == 0), at.stage < self.stages.short
        holds_out = _holds_out(state, validation)
        # Whether rows are left out comes out of the branch, too, for what follows to depend on it: of two sums over
        # devices that are independent, one device may begin with one and the next with the other, and wait for ever
        # (XLA on a CPU).
        runs, beaten_by, leaves_out = jax.lax.cond(
            begins,
            lambda: (*self._ranked(state, batch, validation), jnp.array(False)),
            lambda: (state.runs, state.beaten_by, short),
        )
        weight = lambda run: state.weight(run.number, batch, True, ~leaves_out) if holds_out else batch.weight
        one = lambda run: self.stages.round(at, run, batch._replace(weight=weight(run)), validation)
        none = jnp.full((self.starts, at.most), NOT_TAKEN, batch.x.dtype)
        count = jnp.where(short, self.starts, jnp.where(beaten_by >= 0, 0, self.kept))
        some: Any = {"count": count, "others": (runs, none)}
        runs, losses = map_starts(one, runs, **some)
        return state._replace(runs=runs, beaten_by=beaten_by), none.at[runs.number].set(losses)

    def result(self, of: Runs, batch: Batch, validation: Batch | None) -> SearchResult:
        state = of.runs
        best = jax.vmap(Run.best_so_far)(state)
        scores = jnp.where(state.training.finite, best.score, jnp.inf)
        index = jnp.argmin(scores)
        chosen = jax.tree.map(lambda a: a[index], best)
        splits = jax.tree.map(lambda a: a[index], state).on_x(chosen.params)
        extra = {"sharpness": state.sharpness, "losses": state.scores, "steps": state.steps}
        extra = {name: jnp.zeros_like(a).at[state.number].set(a) for name, a in extra.items()}
        extra["start"] = state.number[index]
        extra["beaten_by"] = of.beaten_by
        extra["dropped"] = self.starts - state.training.finite.sum()
        return SearchResult(splits, scores[index], state.training.finite.any(), chosen.step, extra)

    def finish(
        self, result: SearchResult, start: Start, data: Data, *, monitor: Monitor | None = None, **_: Any
    ) -> Finished:
        grown = None if self.cart == "binned" else start.splits
        if not result.finite and grown is None:
            raise FloatingPointError(f"all {self.starts} starts became non-finite: try a smaller learning_rate")
        carts = [] if grown is None else self._carts(grown, data, Monitor() if monitor is None else monitor)
        by_cart = [[(*self._refitted(splits, data), -1 - i) for splits in trees] for i, trees in enumerate(carts)]
        losses = [min(loss for _, loss, _ in one) for one in by_cart]
        cart_loss, ridge_loss = (*losses, np.nan, np.nan)[:2]
        beaten_by = int(result.extra["beaten_by"])
        candidates = by_cart[beaten_by] if beaten_by >= 0 else [*itertools.chain(*by_cart)]
        if result.finite and beaten_by < 0:
            splits = data.scaling.restore_splits(result.model)
            candidates.append((*self._refitted(splits, data), int(result.extra["start"])))
        tree, loss, chosen = min(candidates, key=lambda candidate: candidate[1])  # CART, if as good
        report = {name: np.asarray(result.extra[name]) for name in ("sharpness", "steps")}
        report["losses"] = np.asarray(result.extra["losses"], np.float64) * data.loss_unit
        if self.strengths is not None:
            report["precondition"] = self.strengths
        report |= {"cart_loss": float(cart_loss), "ridge_loss": float(ridge_loss), "chosen": chosen}
        report["dropped"] = int(result.extra["dropped"])
        if self.shrink and self.leaves == "constant":
            tree = data.refit(tree, self._empty(data), shrink=True)[0]
            loss = data.loss(tree)
        tree = tree.merged()
        return Finished(tree, tree, loss, report)

    @property
    def _sharpnesses(self) -> int:
        """Number of sharpnesses of a start, without those of the short stages."""
        return len(self.stages.lengths) - self.stages.short

    def _grown(self, batch: Batch, monitor: Monitor) -> ObliqueTree:
        """Returns the splits that the first starts begin with, stacked."""
        rows, task = without_padding(batch), self.stages.task
        of_cart = lambda rows: grown_cart(rows, task, self.depth, self.leaves)
        trees = [monitor.part(0.5 if self.ridge else 1).on_rows(of_cart, rows)]
        if self.ridge:
            trees.append(monitor.on_rows(lambda rows: grown_on_ridge(rows, task, self.depth, 1 / DEVIATIONS), rows))
        return jax.tree.map(lambda *a: np.stack([np.asarray(one) for one in a]), *trees)

    def _ranked(self, state: Runs, batch: Batch, validation: Batch | None) -> tuple[Run, Array]:
        """Returns the starts, the best first, at their best trees, and which of the grown trees they do not better."""
        best = jax.vmap(Run.best_so_far)(state.runs)
        scores, beaten_by = best.score, state.beaten_by
        if _holds_out(state, validation):

            def evaluated(number: Array, splits: ObliqueTree) -> Array:
                inside, outside = state.weight(number, batch, True, False), state.weight(number, batch, False, True)
                tree = self.stages.with_leaves(splits, batch)
                outputs = tree.refit(*batch._replace(weight=inside)).apply(batch.x)
                # Not over the sum of weights, another sum over devices, which depends on none of those of the refit.
                return (outside * self.stages.task.prediction_loss(outputs, batch.y)).sum()

            splits = jax.vmap(Run.on_x)(state.runs, best.params)
            if state.grown is None:
                scores = map_starts(evaluated, state.runs.number, splits)
            else:

                def of_start_and_grown(number: Array, splits: ObliqueTree) -> Array:
                    grown = jax.tree.map(lambda a: a[state.fold_of(number)], state.grown)
                    return jax.vmap(partial(evaluated, number))(jax.tree.map(_joined, splits, grown))

                # With each start, for all to be mapped over as many devices as elsewhere.
                losses = map_starts(of_start_and_grown, state.runs.number, splits)
                scores, beaten_by = self._beside_grown(losses, state)
            best = best.replace(score=jnp.full_like(scores, jnp.inf))  # it was of fewer rows
        training = state.runs.training  # of which only `finite` is still needed
        order = jnp.argsort(jnp.where(training.finite, scores, jnp.inf))
        ranked = jax.tree.map(lambda a: a[order], state.runs._replace(splits=best.params, best=best, training=None))
        return ranked._replace(training=training.replace(finite=training.finite[order])), beaten_by

    def _beside_grown(self, losses: Array, state: Runs) -> tuple[Array, Array]:
        """Returns the scores of the starts, and which of the grown trees they do not better.

        Args:
          losses: losses of each start and of the grown trees, on the rows that it leaves out, ``(starts, 1 + m)``.
          state: the state, its starts in the order of their numbers.
        """
        own, of_grown = losses[:, 0], losses[:, 1:]
        best_grown = of_grown[: state.folds].sum(0).argmin()
        scores, compared = own, 1
        ahead = own - of_grown[:, best_grown]
        if state.folds > 1:
            # Folds differ in weight, and in how hard they are to predict. Of losses on different rows the lowest is
            # lucky, so that of those that would go on the mean is compared.
            scores = ahead = ahead / jnp.maximum(state.shares[state.fold_of(state.runs.number)], 1e-30)
            compared = self.kept
        finite = state.runs.training.finite
        ahead = jnp.sort(jnp.where(finite, ahead, jnp.inf))[:compared]
        better = ahead.mean(where=jnp.arange(len(ahead)) < finite.sum()) < 0
        # The losses are 0 where no row is held out, of fewer than five.
        beaten = ~better & (~finite.any() | (jnp.where(finite, own, 0).max() != 0))
        return scores, jnp.where(beaten, best_grown, -1).astype(jnp.int32)

    def _empty(self, data: Data) -> Any:
        """Returns leaves to be refitted."""
        of_shape = topology.num_leaves(self.depth), data.table.x.shape[1], self.stages.task.shape
        return self.stages.kind.empty(*of_shape)

    def _refitted(self, splits: ObliqueTree, data: Data) -> tuple[ObliqueTree, float]:
        """Returns the tree refitted in the user's units, and the loss it is chosen by."""
        tree, criterion = data.refit(splits, self._empty(data))
        loss = data.loss(tree)
        if data.validation is not None or self.leaves == "constant":
            return tree, loss
        # At least the tree's training loss, which exceeds the criterion where outliers are clipped in scaled data; the
        # training loss alone where too few rows have weight for an expected error.
        return tree, max(criterion if criterion < _NONE_EXPECTED * data.loss_unit else 0.0, loss)

    def _carts(self, grown: ObliqueTree, data: Data, monitor: Monitor) -> list[list[ObliqueTree]]:
        """Returns, for each of the grown trees, its splits in the user's units.

        CART's tolerances are absolute and its thresholds exact on raw features only, so of it there are two, grown on
        scaled features and (where float32 represents them) on raw ones.
        """
        trees = [jax.tree.map(lambda a, i=i: a[i], grown) for i in range(len(grown.bias))]
        carts = [[data.scaling.restore_splits(tree)] for tree in trees]
        if data.scaling.origin is None and monitor.has_time():
            table, task = data.table, self.stages.task
            rows = Batch(table.x, table.y, table.weight)  # type: ignore[arg-type]
            of_cart = lambda rows: grown_cart(rows, task, self.depth, self.leaves)
            carts[0].append(monitor.part(0.5).on_rows(of_cart, rows))
        return carts


def restarts(
    task: Task,
    shape: tuple[int, int],
    *,
    method: Callable[[Any], training.Method],
    stages: int,
    sharpness: Callable[[Array], Array],
    depth: int,
    leaves: str,
    starts: int,
    epochs: int,
    learning_rate: Any,
    cart: bool | str,
    ridge: bool,
    precondition: float | str,
    shrink: bool,
    halving: bool,
    between: Callable[[ObliqueTree, Batch], ObliqueTree] | None = None,
) -> Search:
    """Returns the search over many starts under increasingly sharp routings.

    Each start trains under its sharpnesses in turn, full batch, with AdamW (linear warm-up, then cosine decay); a stage
    is initialised with the hard tree of the previous one. Hard trees are evaluated during training and the best is kept
    (every epoch for constant leaves and classes, about 20 times in a stage where an evaluation costs more).

    With ``halving``, all starts have a tenth of the epochs under each sharpness. The fifth of them (at least two) with
    the lowest loss on the validation set then train for all epochs under each sharpness, from their best trees. Without
    such a set, short stages leave a fifth of the rows out, which take its place; for linear leaves the criterion does,
    as it is an expected error already. If CART grown without these rows, on the features or on the outputs of the ridge
    regression, predicts them as well as the best start does, none goes on, and that CART is the result: splits of many
    features follow noise. In a table of at most 1000 rows, beside CART, the starts leave out each fifth in turn. Their
    losses are then compared with those of CART on the same rows, and those that would go on must be better on average:
    of losses on different rows the lowest is lucky. A search that a deadline ends before still compares them, and
    trains those that go on for one round.

    Args:
      task: what is predicted.
      shape: shape of the features.
      method: ``sharpness -> Method``.
      stages: number of sharpnesses.
      sharpness: maps draws from U(0, 1), ``(starts, stages)``, to the sharpness of each start in each stage.
      depth: depth of the tree.
      leaves: kind of leaves.
      starts: number of starts.
      epochs: updates in each stage.
      learning_rate: peak learning rate.
      cart: whether start 0 is CART.
      ridge: whether start 1 is CART on the outputs of a ridge regression; only beside CART (``cart=True``), for
        constant leaves, and unless both features and samples are more than 2048.
      precondition: strength of the preconditioner of all starts; ``"auto"``: half of the random starts have one.
      shrink: whether constant leaves are finally drawn towards their ancestors'.
      halving: whether most starts train only shortly.
      between: ``(splits, batch) -> splits``, which may move their biases after each stage; or None.

    Raises:
      ValueError: for linear leaves in classification, and for more starts than 32-bit array sizes allow.
    """
    kind, (n, p), nodes = kinds.kind_of(leaves, task), shape, topology.num_nodes(depth)
    checks.check_count("starts", starts, most=checks.MAX_NUMBERS // (nodes * (p + 1)))
    short, kept = max(1, epochs // _SHORT), max(_FEWEST_KEPT, starts // _KEPT)
    halving = halving and starts > kept
    lengths = ((short,) * stages if halving else ()) + (epochs,) * stages
    ridge = ridge and cart is True and leaves == "constant" and starts > 1 and min(n, p) <= _WIDEST_RIDGE
    strengths = None
    if precondition != "auto":
        strengths = np.full(starts, precondition, np.float32) if precondition != 0 else None
    elif p <= WIDEST:
        strengths = np.append(np.zeros(1 + ridge), np.resize(_STRENGTHS, starts))[:starts].astype(np.float32)
    options: Any = {"depth": depth, "leaves": leaves, "starts": starts, "cart": cart, "ridge": ridge, "shrink": shrink}
    functions = _Restarts(
        Stages(task, kind, method, lengths, stages if halving else 0, learning_rate, between),
        sharpness=sharpness,
        kept=kept if halving else None,
        strengths=strengths,
        **options,
    )
    elements = nodes * n
    if leaves == "linear":  # an evaluation decomposes a (p, p) matrix for each node and leaf
        elements += (2 * nodes + 1) * _DECOMPOSITION * p**3 * min(1, EVALUATIONS / epochs)
    return Search(
        task=task,
        rounds=Rounds(lengths, starts * int(elements)),
        init=functions.init,
        round=functions.round,
        result=functions.result,
        finish=functions.finish,
        prepare=functions.prepare,
        scaling=functions.scaling,
        closing=stages if halving and leaves == "constant" else None,  # the starts are compared before they go on
        tree_leaves=leaves,
    )


def _joined(one: Array, others: Array) -> Array:
    """Returns an array before others, ``(1 + m, ...)``."""
    return jnp.concatenate([one[None], others])


def _holds_out(state: Runs, validation: Batch | None) -> bool:
    """Whether the short stages leave rows out."""
    return state.fold is not None and validation is None


def _check_slopes(scaling: Scaling) -> None:
    """Raises ``ValueError`` if slopes in the user's units are outside the range of float32."""
    if scaling.y_unit is None:  # outputs are not in the units of the targets
        return
    varying = np.flatnonzero(~scaling.constant)
    slopes = np.atleast_1d(scaling.y_unit)[:, None] / scaling.x_unit[varying]
    if len(bad := np.argwhere((slopes < _FLATTEST) | (slopes > _STEEPEST))):
        output, column = bad[0][0], varying[bad[0][1]]
        raise ValueError(
            f"x and y must be in units in which linear leaves have slopes that float32 holds, got a range of "
            f"{np.atleast_1d(scaling.y_unit)[output]:.3g} in y and a deviation of "
            f"{scaling.x_unit[column] / DEVIATIONS:.3g} in column {column} of x: multiply one of them"
        )
