"""Times XLA and kernels on made data, outside of the trace that asks."""

from collections.abc import Callable, Sequence
from functools import partial
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.config import Config, Sizes

Candidate = Config | None  # None: XLA
SecondsOf = Callable[[Sizes, Candidate], float]
_CALLS = 3  # timed calls of a program, of which the fastest counts


class Program(NamedTuple):
    """What a timing runs.

    Attributes:
      kernel: name of the kernel.
      variant: what else the time depends on, such as the routing; "": nothing.
      call: ``call(implementation, x, y, weights, bias, leaves)`` for made arrays, with y ``(n, k)``. It returns an
        array, or for ``"expected_loss"`` a loss and an array.
    """

    kernel: str
    variant: str
    call: Callable[..., Any]

    @property
    def name(self) -> str:
        """The kernel and the variant."""
        return f"{self.kernel}, {self.variant}" if self.variant else self.kernel


def timed(
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
                value = seconds_of(sizes, candidate)
            except Exception as error:  # such as sizes that do not fit the device
                notes.append(f"{name} failed: {type(error).__name__}: {str(error)[:80]}.")
                continue
            if clock() <= end:
                times[candidate] = value

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(max(0.0, end - clock()) + 0.05)
    return dict(times), " ".join(notes)


def seconds_of(program: Program, sizes: Sizes, candidate: Candidate) -> float:
    """Returns the seconds of a program with its gradient on made data."""
    step, arrays = made(program, sizes, "xla" if candidate is None else candidate)
    call = jax.jit(step)
    jax.block_until_ready(call(*arrays))
    seconds = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def made(program: Program, sizes: Sizes, how: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a program with its gradient as a function of arrays, and made arrays."""
    n, p, depth, k = sizes
    rng, nodes = np.random.default_rng(0), 2**depth - 1
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    arrays = draw(n, p), draw(n, k), draw(nodes, p), draw(nodes), draw(nodes + 1, k)
    call = partial(program.call, how)
    if program.kernel == "hard_routing":
        return call, arrays
    loss = call if program.kernel == "expected_loss" else lambda x, y, *tree: ((call(x, y, *tree) * y).sum(), ())
    return jax.value_and_grad(loss, (2, 3, 4), has_aux=True), arrays
