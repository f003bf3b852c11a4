"""The training loop: methods, resumable runs, and optimisers that optax does not have."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.training.loop import advance as advance, best as best, start as start, train as train
from jtrees.training.optimizers import (
    LazyAdamState as LazyAdamState,
    LazyMomentumState as LazyMomentumState,
    cosine_cycles as cosine_cycles,
    lazy_adam as lazy_adam,
    lazy_momentum as lazy_momentum,
    reduce_until_vanished as reduce_until_vanished,
    rmsprop as rmsprop,
)
from jtrees.training.state import (
    Batch as Batch,
    Best as Best,
    History as History,
    Method as Method,
    Number as Number,
    TrainState as TrainState,
    at_step as at_step,
)

_list_public_names(__name__)
