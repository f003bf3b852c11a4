"""A search over many starts, the first from CART, each trained under increasingly sharp routings.

GET and RADDT use this search; each adds its soft routing (a :class:`jtrees.Method` for a sharpness) and its schedule of
sharpnesses. The result is the best hard tree of all starts, or CART itself if none is better.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import leaves as kinds, ops, splitting, topology, training, validation as checks, warmstart
from jtrees.data import Data, Scaling, Table, without_padding
from jtrees.search._minibatch import prediction_loss
from jtrees.search._precondition import WIDEST, Spectrum, drawn_rows, matrix, spectrum
from jtrees.search.recipe import Finished, Round, Rounds, Search, SearchResult
from jtrees.tasks import Classification, Policy, Task, check_log_loss
from jtrees.training import Batch, Best, TrainState, map_starts
from jtrees.tree import ObliqueTree

_WARM_UP = 10  # linear warm-up steps
_LAST_LEARNING_RATE = 1e-4  # of the peak: 1e-6 for the paper's 0.01
_WEIGHT_DECAY = 1e-2  # AdamW's default in PyTorch, which the paper keeps
# Unit of the features, in standard deviations: about the range of a uniform variable. The paper's learning rate,
# sharpnesses and random initialisation assume features in [0, 1].
DEVIATIONS = 3.0
# Slopes of linear leaves in the user's units for which products with fractions of a deviation stay in float32's range.
_FLATTEST, _STEEPEST = 1e-37, 1e36
_DECOMPOSITION = 2  # cost of decomposing a (p, p) matrix, in elements of a step per p**3
_NONE_EXPECTED = 1e30  # a criterion above it, for targets in [0, 1], means that no expected error is defined
# Strengths of the preconditioners of the starts, in turn; by default half of the random starts have none.
_STRENGTHS = (0.0, 0.9, 0.0, 0.99, 0.0, 0.999)
_BINS = 256  # of a feature, for CART within a compiled program
_EVALUATIONS = 20  # evaluations of an expensive score, per sharpness
# With halving, starts first have this part of the epochs, and this part of them goes on, but at least so many, which on
# one CPU take as long as one.
_SHORT, _KEPT, _FEWEST_KEPT = 10, 5, 2


# --- The method ------------------------------------------------------------------------------------------------------


def soft_method(
    depth: int,
    sharpness: training.Number,
    *,
    name: str,
    route: ops.Route,
    leaves: str,
    task: Task,
    l1: float | Array,
    implementation: str | None,
) -> training.Method:
    """A tree trained on the loss that a soft routing of sharpened scores expects.

    Arguments are those of :func:`jtrees.methods.get`, but for ``sharpness``, the factor of the scores; ``name``, what
    the method calls it; and ``route``, the soft routing as in :func:`jtrees.ops.expected_loss`.
    """
    depth, kind = checks.check_depth(depth), kinds.kind_of(leaves, task)
    check_log_loss(task)
    checks.check_positive(name, sharpness)
    checks.check_not_negative("l1", l1)
    for which, value in ((name, sharpness), ("l1", l1)):
        if not callable(value) and np.ndim(value):
            raise ValueError(f"{which} must be one number, got shape {np.shape(value)}")

    def init(batch: Batch, *, key: Array) -> ObliqueTree:
        """Weights and biases from U(-1, 1), leaves as their kind starts."""
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
        return loss + l1 * jnp.abs(params.weights).sum(), params.leaves.criterion(leaf, x, y, weight)

    return training.Method(init, loss, lambda params, batch: params.refit(*batch))


# --- The search ------------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """What ``prepare`` returns.

    Attributes:
      splits: splits of the first m starts, ``(m, nodes, p)``; or the edges of the bins that they are grown from, ``(p,
        bins)``; or None.
      spectrum: of the features, or None without preconditioning.
      held_out: rows that the short stages leave out, ``(n,)``, or None.
    """

    splits: Any
    spectrum: Spectrum | None = None
    held_out: Any = None


class Run(NamedTuple):
    """The state of a start, which trains in one stage for each sharpness. Splits are those of ``x @ matrix``.

    Attributes:
      number: number of the start.
      splits: the initial splits of the stage; after the last stage, its final ones (``leaves`` is None).
      training: the training state of the stage.
      best: the best splits of the stages so far.
      sharpness: sharpness of each stage, ``(stages,)``.
      scores: best score of each stage, infinite if not finite or not run, ``(stages,)``.
      steps: epoch of the best score, ``(stages,)``.
      matrix: the preconditioner, ``(p, p)``, or None.
    """

    number: Array
    splits: ObliqueTree
    training: TrainState
    best: Best
    sharpness: Array
    scores: Array
    steps: Array
    matrix: Array | None

    def on_x(self, splits: ObliqueTree) -> ObliqueTree:
        """Returns splits of preconditioned features as splits of the features."""
        return splits if self.matrix is None else splits.composed(self.matrix)


class Runs(NamedTuple):
    """The state of the search.

    Attributes:
      runs: those of all starts, stacked.
      held_out: rows that the short stages leave out, ``(n,)``, or None.
    """

    runs: Run
    held_out: Any

    def weight(self, batch: Batch, inside: Any, outside: Any) -> Array:
        """Returns the weights of the rows inside and outside the short stages, 0 where these flags are not set."""
        weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
        return jnp.where(jnp.where(self.held_out, outside, inside), weight, 0)


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
    as it is an expected error already.

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
      precondition: strength of the preconditioner of all starts; ``"auto"``: half of the random starts have one.
      shrink: whether constant leaves are finally drawn towards their ancestors'.
      halving: whether most starts train only shortly.
      between: ``(splits, batch) -> splits``, which may move their biases after each stage; or None.

    Raises:
      ValueError: for linear leaves in classification, and for more starts than 32-bit array sizes allow.
    """
    kind, (n, p), nodes, num_leaves = kinds.kind_of(leaves, task), shape, topology.num_nodes(depth), 2**depth
    checks.check_count("starts", starts, most=checks.MAX_NUMBERS // (nodes * (p + 1)))
    short, kept = max(1, epochs // _SHORT), max(_FEWEST_KEPT, starts // _KEPT)
    halving = halving and starts > kept
    lengths = ((short,) * stages if halving else ()) + (epochs,) * stages

    def optimizer_of(stage: Any) -> optax.GradientTransformation:
        """Returns the optimizer of a stage, whose learning rate falls over its epochs."""

        def rate(step: Any) -> Any:
            each = [_rate(steps)(step) for steps in (lengths[0], epochs)]
            return learning_rate * jnp.where(stage < len(lengths) - stages, *each)

        return optax.adamw(rate, weight_decay=_WEIGHT_DECAY)

    conditioned = precondition != 0 and not (precondition == "auto" and p > WIDEST)
    strengths = np.resize(_STRENGTHS if precondition == "auto" else (precondition,), starts).astype(np.float32)

    def method_for(run: Run, sharpness: Array) -> training.Method:
        """Returns the method on splits of preconditioned features."""
        plain = method(sharpness)
        return plain._replace(loss=lambda params, *data, **options: plain.loss(run.on_x(params), *data, **options))

    def stage_of(params: ObliqueTree, sharpness: Array, batch: Batch) -> TrainState:
        """Returns the initial training state of a stage."""
        # Any key: the batch is full, and the loss not random. The optimizers of all stages begin alike.
        arguments: Any = {"key": jax.random.key(0), "optimizer": optimizer_of(0), "params": params}
        state = training.start(method(sharpness), batch, **arguments)
        return state.replace(order=state.order[:1])  # unused, as there is one batch

    def init_run(number: Array, splits: ObliqueTree, sharpness: Array, matrix: Array | None, batch: Batch) -> Run:
        """Returns the initial state of a start."""
        infinite = jnp.full(sharpness.shape, jnp.inf, batch.x.dtype)
        best = Best(splits, infinite[0], jnp.zeros((), jnp.int32))
        # Only the shapes of this state matter: the first round replaces it.
        params = splits.replace(leaves=kind.empty(num_leaves, p, task.shape, batch.x.dtype).trainable())
        state = stage_of(params, sharpness[0], batch)
        return Run(number, splits, state, best, sharpness, infinite, jnp.zeros(sharpness.shape, jnp.int32), matrix)

    def init(start: Start, batch: Batch, *, key: Array) -> Runs:
        # One draw for all, as draws dominate the compile time of this function.
        drawn = jax.random.uniform(key, (starts, len(lengths) + nodes * (p + 1)), batch.x.dtype)
        splits = 2 * drawn[:, len(lengths) :].reshape(starts, nodes, p + 1) - 1
        weights, bias = splits[..., :-1], splits[..., -1]
        given, of, matrices = start.splits, start.spectrum, None
        if cart == "binned":
            w, b = grown_in_bins(batch, given, task, depth)
            given = ObliqueTree(w[None], b[None], None)
        if of is not None:
            matrices = jnp.stack([matrix(of, s) for s in strengths])
        if given is not None:
            m = len(given.bias)
            if of is not None:
                given = jax.vmap(ObliqueTree.composed)(given, jnp.stack([matrix(of, s, 0.5) for s in strengths[:m]]))
            weights, bias = weights.at[:m].set(given.weights), bias.at[:m].set(given.bias)
        one, splits = partial(init_run, batch=batch), ObliqueTree(weights, bias, None)
        sharpnesses = [sharpness(drawn[:, i : i + stages]) for i in range(0, len(lengths), stages)]
        runs = jax.vmap(one)(jnp.arange(starts), splits, jnp.concatenate(sharpnesses, axis=1), matrices)
        return Runs(runs, None if start.held_out is None else jnp.asarray(start.held_out))

    def advanced(at: Round, run: Run, batch: Batch, validation: Batch | None) -> tuple[Run, Array]:
        """Returns one start after a round, and the losses of its steps."""
        stage, first, last, steps = at.stage, at.before == 0, at.last, jnp.asarray(lengths)[at.stage]
        # The loss of the hard tree, refitted to the batch, on other samples.
        score = (
            None
            if validation is None
            else lambda params: prediction_loss(task, run.on_x(params).refit(*batch), validation)
        )
        # The criterion of constant leaves is a by-product of a step; other scores cost as much as a step or more.
        free = validation is None and kind.of in (kinds.Constant, kinds.Logit)
        every = 1 if free else jnp.maximum(1, steps // _EVALUATIONS)
        current = run.sharpness[stage]
        one_step = training.one_step(
            method_for(run, current), batch, optimizer_of(stage), score_every=every, score=score, last=steps
        )

        def init_stage() -> TrainState:
            empty = kind.empty(num_leaves, p, task.shape, batch.x.dtype)
            hard = run.on_x(run.splits).replace(leaves=empty).refit(*batch)
            params = run.splits.replace(leaves=hard.leaves.trainable())
            return stage_of(params, current, batch).replace(finite=run.training.finite)

        state = jax.lax.cond(first, init_stage, lambda: run.training)
        # One step more after the last of a stage, for its score: a separate evaluation would double the program.
        count = at.count + last.astype(jnp.int32)
        state, history = training.advance_up_to(one_step, state, count, at.most + 1, step=at.before)
        losses_of_steps = jnp.where(jnp.arange(at.most) < at.count, history.losses[:-1], jnp.nan)

        def next_stage() -> Run:
            stage_splits, value = state.best.params.replace(leaves=None), state.best.score
            splits = stage_splits
            if between is not None:
                splits = splits.replace(bias=between(run.on_x(splits), batch).bias)
            # `between` may change the routing of other samples than the training samples.
            if score is not None and between is not None:
                hard_tree = splits.replace(leaves=state.best.params.leaves)
                value = jnp.where(jnp.isfinite(value), score(hard_tree), jnp.inf)
            value = jnp.where(state.finite, value, jnp.inf)
            best = _better(run.best, Best(splits, value, state.best.step))
            finite = jnp.isfinite(value)
            # Its best is in `best` already; of the finished stage only `finite` is still needed.
            spent = state.replace(best=state.best.replace(score=jnp.full_like(value, jnp.inf)), finite=finite)
            scores, steps = run.scores.at[stage].set(value), run.steps.at[stage].set(state.best.step)
            return run._replace(splits=splits, training=spent, best=best, scores=scores, steps=steps)

        run = jax.lax.cond(last, next_stage, lambda: run._replace(training=state))
        return run, losses_of_steps

    def ranked(state: Runs, batch: Batch, validation: Batch | None) -> Run:
        """Returns the starts, the best first, at their best trees."""
        best = jax.vmap(_best_so_far)(state.runs)
        scores = best.score
        if holds_out(state, validation):
            inside, outside = state.weight(batch, True, False), state.weight(batch, False, True)

            def evaluated(run: Run, splits: ObliqueTree) -> Array:
                tree = run.on_x(splits).replace(leaves=kind.empty(num_leaves, p, task.shape, batch.x.dtype))
                outputs = tree.refit(*batch._replace(weight=inside)).apply(batch.x)
                # Not over the sum of weights, another sum over devices, which depends on none of those of the refit.
                return (outside * task.prediction_loss(outputs, batch.y)).sum()

            scores = map_starts(evaluated, state.runs, best.params)
            best = best.replace(score=jnp.full_like(scores, jnp.inf))  # it was of fewer rows
        order = jnp.argsort(jnp.where(state.runs.training.finite, scores, jnp.inf))
        return jax.tree.map(lambda a: a[order], state.runs._replace(splits=best.params, best=best))

    def holds_out(state: Runs, validation: Batch | None) -> bool:
        """Whether the short stages leave rows out."""
        return state.held_out is not None and validation is None

    def one_round(at: Round, state: Runs, batch: Batch, validation: Batch | None) -> tuple[Runs, Array]:
        if not halving:
            runs, losses = map_starts(lambda run: advanced(at, run, batch, validation), state.runs)
            return state._replace(runs=runs), losses
        begins, short = (at.stage == stages) & (at.before == 0), at.stage < stages
        weights = lambda short: state.weight(batch, True, ~short) if holds_out(state, validation) else batch.weight
        # The weights come out of the branch, too, for what follows to depend on it: of two sums over devices that are
        # independent, one device may begin with one and the next with the other, and wait for ever (XLA on a CPU).
        runs, weight = jax.lax.cond(
            begins,
            lambda: (ranked(state, batch, validation), weights(jnp.array(False))),
            lambda: (state.runs, weights(short)),
        )
        rows = batch._replace(weight=weight)
        none = jnp.full((starts, at.most), jnp.nan, batch.x.dtype)
        some: Any = {"count": jnp.where(short, starts, kept), "others": (runs, none)}
        runs, losses = map_starts(lambda run: advanced(at, run, rows, validation), runs, **some)
        return state._replace(runs=runs), none.at[runs.number].set(losses)

    def result(of: Runs, batch: Batch, validation: Batch | None) -> SearchResult:
        state = of.runs
        best = jax.vmap(_best_so_far)(state)
        scores = jnp.where(state.training.finite, best.score, jnp.inf)
        index = jnp.argmin(scores)
        chosen = jax.tree.map(lambda a: a[index], best)
        splits = jax.tree.map(lambda a: a[index], state).on_x(chosen.params)
        extra = {"sharpness": state.sharpness, "losses": state.scores, "steps": state.steps}
        extra = {name: jnp.zeros_like(a).at[state.number].set(a) for name, a in extra.items()}
        extra["start"] = state.number[index]
        extra["dropped"] = starts - state.training.finite.sum()
        return SearchResult(splits, scores[index], state.training.finite.any(), chosen.step, extra)

    def prepare(batch: Batch, *, key: Array) -> Start:
        splits = None
        if cart == "binned":
            splits = splitting.edges_of(np.asarray(without_padding(batch).x), _BINS)
        elif cart:
            tree = grown_cart(without_padding(batch), task, depth, leaves)
            splits = jax.tree.map(lambda a: np.asarray(a)[None], tree)
        held_out = drawn_rows(batch, key) if halving and leaves == "constant" else None
        return Start(splits, spectrum(batch) if conditioned else None, held_out)

    def scaling(table: Table) -> Scaling:
        fitted = Scaling.fit(table, DEVIATIONS)
        if leaves == "linear":
            _check_slopes(fitted)
        return fitted

    def finish(result: SearchResult, start: Start, data: Data, **_: Any) -> Finished:
        grown = None if cart == "binned" else start.splits
        if not result.finite and grown is None:
            raise FloatingPointError(f"all {starts} starts became non-finite: try a smaller learning_rate")
        empty, loss_unit = kind.empty(num_leaves, p, task.shape), data.loss_unit

        def finished(splits: ObliqueTree) -> tuple[ObliqueTree, float]:
            """Returns the tree refitted in the user's units, and the loss it is chosen by."""
            tree, criterion = data.refit(splits, empty)
            loss = data.loss(tree)
            if data.validation is not None or leaves == "constant":
                return tree, loss
            # At least the tree's training loss, which exceeds the criterion where outliers are clipped in scaled data;
            # the training loss alone where too few rows have weight for an expected error.
            return tree, max(criterion if criterion < _NONE_EXPECTED * loss_unit else 0.0, loss)

        # CART's tolerances are absolute and its thresholds exact on raw features only, so compare with the better of
        # two, grown on scaled features and (where float32 represents them) on raw ones.
        cart_splits = None if grown is None else jax.tree.map(lambda a: a[0], grown)
        carts = [] if cart_splits is None else [data.scaling.restore_splits(cart_splits)]
        if carts and data.scaling.origin is None:
            table = data.table
            carts.append(grown_cart(Batch(table.x, table.y, table.weight), task, depth, leaves))  # type: ignore[arg-type]
        candidates = [(*finished(splits), -1) for splits in carts]
        cart_loss = min((loss for _, loss, _ in candidates), default=float("nan"))
        if result.finite:
            candidates.append((*finished(data.scaling.restore_splits(result.model)), int(result.extra["start"])))
        tree, loss, chosen = min(candidates, key=lambda candidate: candidate[1])  # CART, if as good
        report = {name: np.asarray(result.extra[name]) for name in ("sharpness", "steps")}
        report["losses"] = np.asarray(result.extra["losses"], np.float64) * loss_unit
        if conditioned:
            report["precondition"] = strengths
        report |= {"cart_loss": cart_loss, "chosen": chosen, "dropped": int(result.extra["dropped"])}
        if shrink and leaves == "constant":
            tree = data.refit(tree, empty, shrink=True)[0]
            loss = data.loss(tree)
        tree = tree.merged()
        return Finished(tree, tree, loss, report)

    elements = nodes * n
    if leaves == "linear":  # an evaluation decomposes a (p, p) matrix for each node and leaf
        elements += (2 * nodes + 1) * _DECOMPOSITION * p**3 * min(1, _EVALUATIONS / epochs)
    return Search(
        task=task,
        rounds=Rounds(lengths, starts * int(elements)),
        init=init,
        round=one_round,
        result=result,
        finish=finish,
        prepare=prepare,
        scaling=scaling,
        tree_leaves=leaves,
    )


def _rate(epochs: int) -> optax.Schedule:
    """Returns the schedule of the learning rate of a stage, relative to its peak."""
    warm_up = min(_WARM_UP, epochs // 2)
    return optax.warmup_cosine_decay_schedule(1 / (warm_up + 1), 1.0, warm_up, epochs, _LAST_LEARNING_RATE)


def _best_so_far(run: Run) -> Best:
    """Returns the best splits of a start, including those of an interrupted stage."""
    current = run.training.best
    return _better(run.best, current.replace(params=current.params.replace(leaves=None)))


def _better(old: Best, new: Best) -> Best:
    return jax.tree.map(partial(jnp.where, new.score < old.score), new, old)


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


def grown_in_bins(batch: Batch, edges: Array, task: Task, depth: int) -> tuple[Array, Array]:
    """Returns weights and biases of the splits of CART over bins of the features, in a compiled program."""
    weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
    if isinstance(task, Classification):
        statistics, impurity = splitting.class_statistics(batch.y, weight, task.classes), splitting.entropy
    else:
        statistics, impurity = splitting.target_statistics(batch.y, weight), splitting.squared_deviation
    return splitting.binned_cart(batch.x, jnp.asarray(edges), statistics, depth, impurity)


def grown_cart(rows: Batch, task: Task, depth: int, leaves: str = "constant") -> ObliqueTree:
    """Returns the splits of CART of a depth; with linear leaves, CART of the residuals of a linear regression."""
    x, y, weight = rows
    if isinstance(task, Classification):
        return warmstart.cart_classifier(x, y, depth, sample_weight=weight).replace(leaves=None)
    if isinstance(task, Policy):  # what an action is worth beside the others
        y = y - y.mean(1, keepdims=True)
        y = y[:, np.ptp(y, axis=0) > 0]
    if leaves == "linear":
        root = np.sqrt(np.ones(len(x)) if weight is None else weight)[:, None]
        with_one = np.column_stack([x - x.mean(0, dtype=np.float64), np.ones(len(x))])
        unit = np.maximum(np.abs(with_one).max(0), np.finfo(np.float32).tiny)
        with_one /= unit
        wide = y.reshape(len(x), -1)
        residual = (wide - with_one @ np.linalg.lstsq(root * with_one, root * wide, rcond=None)[0]).reshape(y.shape)
        y = residual if np.ptp(residual, axis=0).min() > 0 else y
    return warmstart.cart_regressor(x, y, depth, sample_weight=weight).replace(leaves=None)
