"""Optimisers that optax lacks, and the schedule of the learning rate in cycles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jtrees.training import cosine_cycles, lazy_adam, lazy_momentum
from jtrees.training.optimizers import reduce_until_vanished, rmsprop


@pytest.mark.parametrize(("steps", "cycles"), [(7, 1), (7, 3), (7, 7), (120, 3), (3_000_000, 1000)])
def test_the_rate_falls_in_every_cycle(steps, cycles):
    """From the peak to almost zero, exactly so often: also where steps x cycles are more than 32 bits hold."""
    first = [-(-steps * cycle // cycles) for cycle in range(cycles + 1)]
    steps_compared = first if cycles < 100 else first[:2] + first[-40:]
    steps_compared = sorted({min(max(step + d, 0), steps - 1) for step in steps_compared for d in (-1, 0, 1)})
    share = np.asarray(jax.jit(jax.vmap(cosine_cycles(steps, cycles)))(np.int32(steps_compared)))
    for step, got in zip(steps_compared, share, strict=True):
        cycle = np.searchsorted(first, step, side="right") - 1
        phase = (step - first[cycle]) / (first[cycle + 1] - first[cycle])
        assert got == pytest.approx((1 + np.cos(np.pi * phase)) / 2, abs=1e-5)
    assert share[0] == 1
    if steps > 7 * cycles:
        assert share[-1] < 0.01


def test_a_rate_that_vanishes_is_0_once_it_is_below_the_least(standard_promotion):
    optimizer = reduce_until_vanished(factor=0.5, patience=1, accumulation_size=1, least=0.25)
    state, update, moved = optimizer.init(jnp.ones(())), jax.jit(optimizer.update), []
    for _ in range(5):  # the loss of the first is lower than any before it
        step, state = update(jnp.ones(()), state, value=jnp.float32(1))
        moved.append(float(step))
    assert moved == [1, 0.5, 0.25, 0, 0]
    assert state.vanished


@pytest.mark.parametrize("offset", [0, -2, 3])
def test_a_plateau_is_where_the_loss_does_not_fall(offset, standard_promotion):
    """Also below 0; for losses above 0 it is optax's plateau."""
    losses = offset + jnp.asarray([1.0, 0.8, 0.9, 0.5, 0.5, 0.51, 0.5, 0.5, 0.5, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4])
    scales = []
    options = {"factor": 0.5, "patience": 2, "accumulation_size": 2}
    for optimizer in (reduce_until_vanished(**options, least=0.0), optax.contrib.reduce_on_plateau(**options)):
        step = lambda state, value, optimizer=optimizer: optimizer.update(jnp.ones(()), state, value=value)[::-1]
        scales.append(jax.lax.scan(step, optimizer.init(jnp.ones(())), losses)[1])
    plateau, of_optax = np.asarray(scales)
    assert plateau.tolist() == [1] * 15 + [0.5]
    assert (plateau == of_optax).all() == (offset >= 0)


def test_rmsprop_has_the_decay_of_the_authors_code_and_clips_before_it(standard_promotion):
    """As PyTorch's RMSprop with alpha 0.99, except that momentum follows the learning rate."""
    optimizer = rmsprop(0.1, momentum=0.5, clip=5.0)
    state, square, velocity = optimizer.init(jnp.zeros(2)), np.zeros(2), np.zeros(2)
    for gradient in ([3.0, 4.0], [6.0, -8.0], [0.3, 0.1]):
        step, state = optimizer.update(jnp.array(gradient), state)
        clipped = np.array(gradient) * min(1.0, 5.0 / np.hypot(*gradient))
        square = 0.99 * square + 0.01 * clipped**2
        velocity = 0.5 * velocity - 0.1 * clipped / (np.sqrt(square) + 1e-8)
        np.testing.assert_allclose(step, velocity, rtol=1e-5)


LAZY = {
    "adam": (lazy_adam(optax.constant_schedule(0.1)), optax.adam(0.1)),
    "momentum": (lazy_momentum(0.1, 0.8), optax.sgd(0.1, momentum=0.8)),
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_optimisers_are_optimisers_but_for_zero_gradients(name, standard_promotion):
    """What has no gradient rests, and so do its moments."""
    params, (lazy, dense) = {"a": jnp.array([1.0, -2.0, 3.0]), "b": jnp.ones(2)}, LAZY[name]
    states = lazy.init(params), dense.init(params)
    gradient = {"a": jnp.array([1.0, 2.0, -1.0]), "b": jnp.array([0.5, 0.1])}
    for _ in range(3):
        ours, lazy_state = lazy.update(gradient, states[0], params)
        theirs, dense_state = dense.update(gradient, states[1], params)
        states = lazy_state, dense_state
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), ours, theirs)
    moved, after = lazy.update(gradient | {"b": jnp.array([0.0, 1.0])}, states[0], params)
    assert moved["b"][0] == 0 != moved["b"][1]
    for old, new in zip(states[0][1:], after[1:], strict=True):  # after the number of steps
        assert new["b"][0] == old["b"][0]
