"""Kinds of options: what each accepts and refuses, in words that name the option. All recipes: test_battery."""

import re

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees.search import Recipe, options

NAN, INF = float("nan"), float("inf")
FAST, SLOW = "fast", "slow"


def huber(outputs, y):
    return jnp.abs(outputs - y)


# A kind of option, values that are accepted, with what they are then, and values that are refused, with the message.
KINDS = {
    "depth": (
        options.depth(4, 10),
        [(3, 3), (np.int64(10), 10), (jnp.asarray(1), 1)],
        [
            *((value, "must be from 1 to 10, got ") for value in (0, 11)),
            *((value, "must be a whole number from 1 to 10, got ") for value in (2.5, "3", "auto", None)),
        ],
    ),
    "count": (
        options.count(10, minimum=2, most=50),
        [(2, 2), (np.uint8(50), 50)],
        [
            (1, "must be at least 2, got 1"),
            (51, "must be at most 50, "),
            (1.5, "must be a whole number, got 1.5"),
            (None, "must be a whole number, got None"),
        ],
    ),
    "count without a bound": (
        options.count(10),
        [(2**20, 2**20)],
        [(2**40, "must be at most 2147483646, the limit of 32-bit sizes and counters, got 1099511627776")],
    ),
    "optional_count": (options.optional_count(None), [(None, None), (7, 7)], [(0, "must be at least 1, got 0")]),
    "counts": (
        options.counts(240, 240),
        [((), ()), ([8, np.int32(4)], (8, 4))],
        [
            (240, "must be whole numbers, one a hidden layer, such as (240, 240), got 240"),
            ((8, 0), "must be at least 1, got 0"),
            ((8, 2.5), "must be a whole number, got 2.5"),
            ("ab", "must be a whole number, got 'a'"),
        ],
    ),
    "flag": (
        options.flag(True),
        [(False, False), (np.True_, True)],
        [(value, f"must be True or False, got {value!r}") for value in ("False", None, 1, "yes")],
    ),
    "choice": (
        options.choice(FAST, (FAST, SLOW)),
        [(SLOW, SLOW)],
        [(value, f"must be one of 'fast', 'slow', got {value!r}") for value in ("medium", None, 3)],
    ),
    "optional choice": (
        options.choice(None, (FAST, SLOW), optional=True),
        [(None, None), (SLOW, SLOW)],
        [("medium", "must be one of 'fast', 'slow', got 'medium'")],
    ),
    "loss": (
        options.loss(),
        [(None, None), (huber, huber)],
        [("huber", "must be a function (outputs, y) -> (n,), got 'huber'")],
    ),
    "function": (
        options.static(huber, options.check_function),
        [(huber, huber)],
        [(value, f"must be a function, got {value}") for value in (None, 3)],
    ),
    "share": (
        options.share(1.0),
        [(0.5, 0.5), (1, 1.0), (np.float32(0.25), 0.25)],
        [
            *((value, "must be above 0 and at most 1, got ") for value in (0, 1.5, -1, NAN)),
            *((value, "must be a number, got ") for value in ("half", None, [0.5], 1j)),
        ],
    ),
    "positive": (
        options.positive(0.01),
        [(0.1, 0.1), (1, 1.0), (jnp.asarray(2), 2.0), (np.float64(3), 3.0), (jnp.bfloat16(0.5), 0.5)],
        [
            *((value, "must be finite and above 0, got ") for value in (0, -1.0, NAN, INF)),
            *((value, "must be a number, got ") for value in ("0.1", 1j, {}, [0.1, [0.2]], huber)),
            (None, "must be a number above 0, got None"),
            ([0.1, 0.2], "must be one number, got shape (2,): vmap search, or tune, over several"),
        ],
    ),
    "optional_positive": (
        options.optional_positive(),
        [(None, None), (0.1, 0.1)],
        [(0.0, "must be finite and above 0, got ")],
    ),
    "not_negative": (
        options.not_negative(0.0),
        [(0, 0.0), (0.5, 0.5)],
        [
            *((value, "must be finite and not negative, got ") for value in (-0.1, NAN, [0.0, -1.0])),
            *((value, "must be one number, got shape ") for value in ([0.0, 0.1], [])),
            ("much", "must be a number, got 'much'"),
        ],
    ),
    "part": (
        options.part(0.9),
        [(0, 0.0), (0.99, 0.99)],
        [(value, "must be a number from 0 up to but not including 1, got ") for value in (1, -0.1, NAN)],
    ),
    "numbers": (
        options.numbers(),
        [({}, {}), ({"alpha": -3, "l1": 0.1}, {"alpha": -3.0, "l1": 0.1})],
        [
            (0.1, "must be numbers by name, got 0.1"),
            ({"l1": "a"}, "__l1 must be a number, got 'a'"),
            ({"l1": NAN}, "__l1 must be finite, got "),
            ({"l1": [1.0, 2.0]}, "__l1 must be one number, got shape (2,)"),
        ],
    ),
    "ranges": (
        options.ranges((5.0, 25.0)),
        [(((1, 2), (3, 3)), [[1.0, 2.0], [3.0, 3.0]]), (jnp.ones((1, 2)), [[1.0, 1.0]])],
        [
            *(
                (value, "must be pairs (low, high), at least one, got ")
                for value in ((5, 25), ((5, 25), (50,)), (), None, {}, "steep", huber, ((1j, 2),), np.array([[1j, 2]]))
            ),
            (((0.0, 5.0),), "must be finite and above 0, got "),
            (((25, 5),), "must be pairs (low, high) with low <= high, got ((25, 5),)"),
        ],
    ),
    "base": (
        struct.field(metadata={"check": options.checked_base}),
        [(jtrees.CO2(nu=2), jtrees.CO2(nu=np.float32(2)))],
        [
            (3, "must be a recipe, such as jtrees.DGT(), got 3"),
            (jtrees.DGT, "must be a recipe, such as jtrees.DGT(), got <class"),
        ],
    ),
}
ACCEPTED = [(kind, value, held) for kind, (_, accepted, _) in KINDS.items() for value, held in accepted]
REFUSED = [(kind, value, message) for kind, (_, _, refused) in KINDS.items() for value, message in refused]


def check(kind, value):
    return KINDS[kind][0].metadata["check"]("depth", value)


def test_the_table_of_kinds_is_complete():
    made = {name for name, fn in vars(options).items() if getattr(fn, "__annotations__", {}).get("return") is not None}
    public = {name for name in made if not name.startswith(("check", "_"))} - {"as_scalar", "static", "traced"}
    assert public <= set(KINDS)


@pytest.mark.parametrize(("kind", "value", "held"), ACCEPTED)
def test_values_of_its_kind_are_accepted(kind, value, held):
    found = check(kind, value)
    if isinstance(found, jax.Array):
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, np.asarray(held, np.float32))
    elif kind == "numbers":
        assert {name: float(number) for name, number in found.items()} == jax.tree.map(np.float32, held)
        assert all(number.dtype == jnp.float32 for number in found.values())
    else:
        assert found == held
        assert type(found) is type(held)


@pytest.mark.parametrize(("kind", "value", "message"), REFUSED)
def test_other_values_are_refused_by_name(kind, value, message):
    with pytest.raises(ValueError, match=f"^depth ?{re.escape(message)}"):
        check(kind, value)


# --- Recipes ---------------------------------------------------------------------------------------------------------


@struct.dataclass(kw_only=True)
class Ten(Recipe):
    """A recipe with an option of every sort, one of them unchecked."""

    depth: int = options.depth(2)
    rate: float = options.positive(0.5)
    penalty: float = options.not_negative(0)
    name: str = options.static("ten")


def test_checked_holds_numbers_as_float32_arrays_and_static_options_as_they_are():
    recipe = options.checked(Ten(depth=np.int64(3), rate=2))
    assert (recipe.depth, type(recipe.depth), recipe.name) == (3, int, "ten")
    for number, value in ((recipe.rate, 2), (recipe.penalty, 0)):
        assert isinstance(number, jax.Array) and (number.dtype, number.shape) == (jnp.float32, ())
        assert float(number) == value
    assert jax.tree.structure(recipe) == jax.tree.structure(options.checked(Ten(depth=3, rate=0.25, penalty=1.0)))
    assert jax.tree.leaves(options.checked(recipe)) == jax.tree.leaves(recipe)  # checked twice is checked once


def test_the_first_bad_option_of_a_recipe_is_named():
    with pytest.raises(ValueError, match=r"^rate must be finite and above 0, got"):
        options.checked(Ten(rate=0, penalty=-1))
    with pytest.raises(TypeError, match="speed"):
        Ten(speed=3)
    with pytest.raises(TypeError, match="positional"):
        Ten(3)


def test_numbers_may_be_traced_and_another_one_compiles_nothing(count_compilations):
    product = jax.jit(lambda recipe: recipe.depth * recipe.rate + options.checked(recipe).penalty)
    of = lambda **given: product(options.checked(Ten(**given)))
    assert float(of(rate=0.25, penalty=1)) == 1.5
    assert count_compilations(lambda: [of(rate=3), of(rate=np.float64(0.1), penalty=0.5), of(rate=jnp.asarray(7))]) <= 1
    assert count_compilations(lambda: of(rate=3, depth=np.int32(2))) == 0
    assert count_compilations(lambda: of(depth=3)) >= 1  # a static option is part of the program
    rates = jnp.asarray([0.5, 2.0])
    of_rates = jax.vmap(lambda rate: product(options.checked(Ten(penalty=0.0)).replace(rate=rate)))(rates)
    np.testing.assert_allclose(of_rates, [1.0, 4.0])
