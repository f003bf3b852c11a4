"""A recipe that compiles in no time: a polynomial of the first feature, learnt by gradient descent."""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import validation as checks
from jtrees.recipes import Fit, Found, Recipe, Rounds, Watch, number, static
from jtrees.data import Scaling, Table, mean_loss


@struct.dataclass
class Polynomial:
    """What is found."""

    coefficients: Any
    scale: Scaling

    def predict(self, x: Any) -> np.ndarray:
        """Answers, ``(n,)``."""
        return self.scale.inverse(np.asarray(values(np.asarray(self.coefficients), self.scale.transform(np.asarray(x)))))

    @property
    def num_parameters(self) -> int:
        """Coefficients."""
        return len(self.coefficients)


def values(coefficients: Any, x: Any) -> Any:
    """A sum of Chebyshev's polynomials of the first feature, which gradient descent learns in some ten steps."""
    x = x[:, 0] / 2
    before, now, out = x, 1 + 0 * x, 0 * x
    for coefficient in coefficients:
        out = out + coefficient * now
        before, now = now, 2 * x * now - before
    return out


@struct.dataclass(kw_only=True)
class Polynomials(Recipe):
    """``depth`` is the degree; so many updates, in rounds of at most so many."""

    depth: int = static(default=2)
    steps: int = static(default=103)
    a_round: int = static(default=32)
    learning_rate: float = 0.5
    momentum: Any = None

    def checked(self, table: Table) -> "Polynomials":
        rate = number("learning_rate", self.learning_rate, checks.check_number)
        none = self.momentum is None or not np.any(self.momentum)
        momentum = None if none else number("momentum", self.momentum, checks.check_part)
        return self.replace(depth=checks.check_depth(self.depth), learning_rate=rate, momentum=momentum)

    def rounds(self, shape: tuple[int, int], many: int = 1) -> Rounds:
        return Rounds.of(self.steps, 2**25 // self.a_round)

    def begin(self, start: Any, table: Table, *, key: Array) -> Any:
        first = jax.random.uniform(key, (self.depth + 1,))
        return first, jnp.zeros_like(first), jnp.int32(0)

    def mse(self, coefficients: Array, table: Table) -> Array:
        """Mean squared error."""
        return (table.weight * jnp.square(values(coefficients, table.x) - table.y)).sum() / table.weight.sum()

    def round(self, i: Array, state: Any, table: Table, judge: Table | None, rounds: Rounds) -> tuple[Any, Array]:
        def step(at: Array, carry: Any) -> Any:
            (now, speed, count), losses = carry
            loss, slope = jax.value_and_grad(self.mse)(now, table)
            speed = (0 if self.momentum is None else self.momentum * speed) - self.learning_rate * slope
            return (now + speed, speed, count + 1), losses.at[at].set(loss)

        return jax.lax.fori_loop(0, rounds.within(i), step, (state, jnp.full(rounds.size, jnp.nan)))

    def end(self, state: Any, table: Table, judge: Table | None) -> Found:
        score = self.mse(state[0], judge or table)
        return Found(state[0], score, jnp.isfinite(score), state[2])

    def finish(
        self, found: Found, start: Any, table: Table, judge: Table | None, *, scale: Scaling, key: Array, watch: Watch
    ) -> Fit:
        if not found.finite:
            raise FloatingPointError("the polynomial became non-finite")
        model = Polynomial(found.model, scale)
        return Fit(model, None, mean_loss(model, judge or table, scale), int(found.step), np.zeros(0), {})
