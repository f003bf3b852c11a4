"""Times XLA and kernels on made data, outside of the trace that asks."""

from collections.abc import Callable, Sequence
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.config import Config, Sizes

Candidate = Config | None  # None: XLA
SecondsOf = Callable[[str, Sizes, Candidate], float]
_CALLS = 3  # timed calls of a program, of which the fastest counts


def timed(
    kernel: str,
    sizes: Sizes,
    candidates: Sequence[Candidate],
    seconds_of: SecondsOf,
    limit: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[dict[Candidate, float], str]:
    """Returns the seconds of the candidates that were timed in time, and a note on those that failed.

    A thread times the candidates, because a thread has no trace of its own. No candidate begins after the limit. A
    compilation cannot be stopped: the caller goes on without it at the limit.
    """
    times: dict[Candidate, float] = {}
    notes: list[str] = []
    end = clock() + limit

    def work() -> None:
        for candidate in candidates:
            if clock() >= end:
                return
            name = "XLA" if candidate is None else candidate.backend
            try:
                value = seconds_of(kernel, sizes, candidate)
            except Exception as error:  # such as sizes that do not fit the device
                notes.append(f"{name} failed: {type(error).__name__}: {str(error)[:80]}.")
                continue
            if clock() <= end:
                times[candidate] = value

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(max(0.0, end - clock()) + 0.05)
    return dict(times), " ".join(notes)


def seconds_of(kernel: str, sizes: Sizes, candidate: Candidate) -> float:
    """Returns the seconds of a kernel with its gradient on made data."""
    program, arrays = made(kernel, sizes, "xla" if candidate is None else candidate)
    call = jax.jit(program)
    jax.block_until_ready(call(*arrays))
    seconds = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def made(kernel: str, sizes: Sizes, how: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a kernel with its gradient as a function of arrays, and made arrays."""
    import pallas_kernels as kernels  # local: the package imports this module

    n, p, depth, k = sizes
    rng, nodes = np.random.default_rng(0), 2**depth - 1
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    x, y, tree = draw(n, p), draw(n, k), (draw(nodes, p), draw(nodes), draw(nodes + 1, k))
    if kernel == "hard_routing":
        return lambda x, y, w, b, v: kernels.hard_routing(x, w, b, implementation=how), (x, y, *tree)
    if kernel == "expected_loss":
        loss = lambda x, y, *tree: kernels.expected_loss(x, y, *tree, implementation=how)
        return jax.value_and_grad(loss, (2, 3, 4), has_aux=True), (x, y, *tree)
    forward = {"soft_routing": kernels.soft_routing, "path_sum": kernels.path_sum}[kernel]
    total = lambda x, y, *tree: (forward(x, *tree, implementation=how) * y).sum()
    return jax.value_and_grad(total, (2, 3, 4)), (x, y, *tree)
