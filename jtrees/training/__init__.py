"""The training loop: methods, resumable runs, many runs at once, and optimisers that optax lacks."""

from jtrees.training.loop import (
    advance as advance,
    advance_up_to as advance_up_to,
    best as best,
    init_state as init_state,
    start as start,
    train as train,
)
from jtrees.training.optimizers import (
    LazyAdamState as LazyAdamState,
    LazyMomentumState as LazyMomentumState,
    adam_step as adam_step,
    cosine_cycles as cosine_cycles,
    lazy_adam as lazy_adam,
    lazy_momentum as lazy_momentum,
    momentum_step as momentum_step,
    reduce_until_vanished as reduce_until_vanished,
    rmsprop as rmsprop,
)
from jtrees.training.parallel import MultiStart as MultiStart, map_starts as map_starts, multi_start as multi_start
from jtrees.training.state import (
    NOT_TAKEN as NOT_TAKEN,
    Batch as Batch,
    Best as Best,
    History as History,
    Method as Method,
    Number as Number,
    Params as Params,
    TrainState as TrainState,
    at_step as at_step,
    is_over as is_over,
    normalised as normalised,
)
from jtrees.training.step import apply_in_place_if as apply_in_place_if, one_step as one_step
