"""A recipe that compiles in no time: a polynomial of the first feature, fitted by gradient descent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtrees
from jtrees import pytree
from jtrees.data import Scaling
from jtrees.search import Fitted, Problem, Recipe, Run, option, options as kinds
from jtrees.search.engine import MOST
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
    before, term, total = x, 1 + 0 * x, 0 * x
    for coefficient in coefficients:
        total = total + coefficient * term
        before, term = term, 2 * x * term - before
    return total


def mse(coefficients: Any, batch: jtrees.Batch) -> jax.Array:
    """Mean squared error on scaled data."""
    return (batch.weight * jnp.square(values(coefficients, batch.x) - batch.y)).sum() / batch.weight.sum()


def _checked_momentum(name: str, value: Any) -> Any:
    """None for 0: without momentum there is one program."""
    return None if value is None or not np.any(value) else kinds.as_scalar(name, value, least=0, below=1)


@pytree.dataclass(kw_only=True)
class Polynomials(Recipe):
    """``depth`` is the degree, fitted by so many updates of gradient descent."""

    version = "0.1"  # by which folders of sweeps know the recipe, also where a test replaces its search
    depth: int = option(2, most=16)
    steps: int = option(103)
    learning_rate: float = option(0.5, above=0)
    momentum: Any = option(None, check=_checked_momentum, traced=True)

    async def search(self, problem: Problem) -> Fitted:
        state = await problem.map(initial)
        state, losses = await problem.train(updated, state, self.steps, name=type(self).__name__)
        coefficients, score, steps = (await problem.map(result, state)).host
        if not np.isfinite(score):
            raise FloatingPointError("training became non-finite: try a smaller learning_rate")
        fitted = Fitted(coefficients, float(score), int(steps), losses)
        if (data := problem.data) is None:
            return fitted
        with problem.restoring():
            model = Polynomial(coefficients, data.scaling)
            return fitted._replace(model=model, loss=data.loss(model))


def initial(run: Run):
    """Coefficients, their speed, and the number of updates."""
    coefficients = jax.random.uniform(run.key, (run.recipe.depth + 1,))
    return coefficients, jnp.zeros_like(coefficients), jnp.int32(0)


def updated(run: Run, state: Any, before: jax.Array, count: jax.Array):
    """The state after ``count`` updates, their losses, and whether it is not finite."""
    momentum, rate = run.recipe.momentum, run.recipe.learning_rate

    def update(i: jax.Array, carry: Any) -> Any:
        (coefficients, speed, steps), losses = carry
        loss, slope = jax.value_and_grad(mse)(coefficients, run.batch)
        speed = (0 if momentum is None else momentum * speed) - rate * slope
        return (coefficients + speed, speed, steps + 1), losses.at[i].set(loss)

    state, losses = jax.lax.fori_loop(0, count, update, (state, jnp.full(MOST, NOT_TAKEN)))
    return state, losses, ~jnp.isfinite(state[0]).all()


def result(run: Run, state: Any):
    """The coefficients, their score, and the number of updates."""
    return state[0], mse(state[0], run.evaluation), state[2]
