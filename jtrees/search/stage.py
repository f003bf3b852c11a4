"""Training that is evaluated after parts of its updates, until early stopping ends it."""

from collections.abc import Callable, Sequence
import itertools
from typing import Any, NamedTuple

import numpy as np

from jtrees.search.problem import DeviceValue, Problem

_ENDLESS = np.iinfo(np.int32).max  # a patience that ends no training


class Stage(NamedTuple):
    """A training after its last update."""

    state: DeviceValue  # the state, on the device
    losses: np.ndarray  # the loss of each update, (updates,)
    # The loss at each evaluation, (evaluations,). Only parts with an update are evaluated. If there is no such part,
    # the loss is infinite.
    evaluations: np.ndarray


async def train_stage(
    problem: Problem,
    advance: Callable[..., Any],
    evaluate: Callable[..., Any],
    state: Any,
    stops: Sequence[int],
    *args: Any,
    patience: int | None = None,
    name: str,
    often: bool = True,
) -> Stage:
    """Returns the training after its last update. A deadline, early stopping or a rehearsal ends it early."""
    # `advance` is a function of `Problem.train`. `evaluate` is `(run, state, patience) -> (state, loss, whether early
    # stopping ends the training)`. `stops` are the numbers of updates after which the state is evaluated, ascending
    # from 0; the last is that of all updates. `patience` is the number of evaluations without a lower loss that early
    # stopping waits for; None: it does not stop.
    losses, evaluations = [np.zeros(0, np.float32)], []
    limit = np.int32(_ENDLESS if patience is None else patience)
    for number, (begin, end) in enumerate(itertools.pairwise(stops)):
        progress: Any = {"name": name, "begins": begin, "total": stops[-1]}
        state, updates = await problem.train(advance, state, end - begin, *args, **progress)
        losses.append(updates)
        if not len(updates):
            break
        evaluated = await problem.map(evaluate, state, limit, often=often)
        state = evaluated.element(0)
        evaluations.append(float(evaluated.element(1).host))
        is_over = len(updates) < end - begin or problem.monitor.is_rehearsed(number + 1)
        if is_over or evaluated.element(2).host:
            break
    return Stage(state, np.concatenate(losses), np.array(evaluations or [np.inf]))
