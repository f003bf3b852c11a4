"""A recipe that compiles in no time: a polynomial of the first feature, fitted by gradient descent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtrees
from jtrees import pytree, validation as checks
from jtrees.data import Scaling
from jtrees.search import Finished, Recipe, Run, SearchResult, check_finite, options as kinds
from jtrees.search.runs import MOST
from jtrees.training.state import NOT_TAKEN


@pytree.dataclass
class Polynomial:
    """A polynomial of the first feature."""

    coefficients: Any
    scaling: Scaling

    def predict(self, x: Any) -> np.ndarray:
        """Predictions, ``(n,)``."""
        return self.scaling.inverse(np.asarray(values(self.coefficients, self.scaling.transform(np.asarray(x)))))

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


def mse(coefficients: Any, batch: jtrees.Batch) -> jax.Array:
    """Mean squared error on scaled data."""
    return (batch.weight * jnp.square(values(coefficients, batch.x) - batch.y)).sum() / batch.weight.sum()


def _checked_momentum(name: str, value: Any) -> Any:
    """None for 0: without momentum there is one program."""
    return None if value is None or not np.any(value) else kinds.as_scalar(name, value, checks.check_part)


@pytree.dataclass(kw_only=True)
class Polynomials(Recipe):
    """``depth`` is the degree, fitted by so many updates of gradient descent."""

    depth: int = kinds.depth(2)
    steps: int = kinds.count(103)
    learning_rate: float = kinds.positive(0.5)
    momentum: Any = kinds.traced(None, _checked_momentum)

    def search(self, runs):
        found = runs.train(moved, runs.map(begun), self.steps, name=type(self).__name__)
        ends = zip(runs.fetch(runs.map(ended, found.states)), found.losses, strict=True)
        return [SearchResult(*end, history=lost) for end, lost in ends]

    def finish(self, result, data, **of_run):
        check_finite(result)
        model = Polynomial(np.asarray(result.model), data.scaling)
        return Finished(model, None, data.loss(model))


def begun(run: Run):
    """Coefficients, their speed, and the number of updates."""
    first = jax.random.uniform(run.key, (run.recipe.depth + 1,))
    return first, jnp.zeros_like(first), jnp.int32(0)


def moved(run: Run, state: Any, before: jax.Array, count: jax.Array, evaluates: jax.Array):
    """The state after ``count`` updates, their losses, and whether it is not finite."""
    momentum, rate = run.recipe.momentum, run.recipe.learning_rate

    def step(i: jax.Array, carry: Any) -> Any:
        (now, speed, steps), losses = carry
        loss, slope = jax.value_and_grad(mse)(now, run.batch)
        speed = (0 if momentum is None else momentum * speed) - rate * slope
        return (now + speed, speed, steps + 1), losses.at[i].set(loss)

    state, losses = jax.lax.fori_loop(0, count, step, (state, jnp.full(MOST, NOT_TAKEN)))
    return state, losses, ~jnp.isfinite(state[0]).all()


def ended(run: Run, state: Any):
    """The coefficients, their score, whether it is finite, and the number of updates."""
    score = mse(state[0], run.by)
    return state[0], score, jnp.isfinite(score), state[2]
