"""A recipe that compiles in no time: a polynomial of the first feature, fitted by gradient descent."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import pytree, validation as checks
from jtrees.data import Data, Scaling
from jtrees.search import Finished, Recipe, Round, Rounds, Search, SearchResult, check_finite, options
from jtrees.tasks import Task
from jtrees.training import Batch


@pytree.dataclass
class Polynomial:
    """The model."""

    coefficients: Any
    scaling: Scaling

    def predict(self, x: Any) -> np.ndarray:
        """Predictions, ``(n,)``."""
        return self.scaling.inverse(
            np.asarray(values(np.asarray(self.coefficients), self.scaling.transform(np.asarray(x))))
        )

    @property
    def num_parameters(self) -> int:
        """Coefficients."""
        return len(self.coefficients)


def values(coefficients: Any, x: Any) -> Any:
    """A sum of Chebyshev's polynomials of the first feature, which gradient descent fits in some ten steps."""
    x = x[:, 0] / 2
    before, now, out = x, 1 + 0 * x, 0 * x
    for coefficient in coefficients:
        out = out + coefficient * now
        before, now = now, 2 * x * now - before
    return out


def mse(coefficients: Any, batch: Batch) -> Array:
    """Mean squared error on scaled data."""
    return (batch.weight * jnp.square(values(coefficients, batch.x) - batch.y)).sum() / batch.weight.sum()


def _checked_momentum(name: str, value: Any) -> Any:
    """None for 0: without momentum there is one program."""
    return None if value is None or not np.any(value) else options.as_scalar(name, value, checks.check_part)


@pytree.dataclass(kw_only=True)
class Polynomials(Recipe):
    """``depth`` is the degree; so many updates, in rounds of at most so many."""

    depth: int = options.depth(2)
    steps: int = options.count(103)
    per_round: int = options.count(32)
    learning_rate: float = options.positive(0.5)
    momentum: Any = options.traced(None, _checked_momentum)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        def init(start: None, batch: Batch, *, key: Array) -> Any:
            first = jax.random.uniform(key, (self.depth + 1,))
            return first, jnp.zeros_like(first), jnp.int32(0)

        def one_round(at: Round, state: Any, batch: Batch, validation: Batch | None) -> Any:
            def step(i: Array, carry: Any) -> Any:
                (now, speed, count), losses = carry
                loss, slope = jax.value_and_grad(mse)(now, batch)
                speed = (0 if self.momentum is None else self.momentum * speed) - self.learning_rate * slope
                return (now + speed, speed, count + 1), losses.at[i].set(loss)

            return jax.lax.fori_loop(0, at.count, step, (state, jnp.full(at.most, jnp.nan)))

        def result(state: Any, batch: Batch, validation: Batch | None) -> SearchResult:
            score = mse(state[0], batch if validation is None else validation)
            return SearchResult(state[0], score, jnp.isfinite(score), state[2])

        def finish(result: SearchResult, start: None, data: Data, **_: Any) -> Finished:
            check_finite(result)
            model = Polynomial(result.model, data.scaling)
            return Finished(model, None, data.loss(model), {})

        return Search(task, Rounds((self.steps,), 2**25 // self.per_round), init, one_round, result, finish)
