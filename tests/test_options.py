"""Kinds of options: what each accepts and refuses, in words that name the option. All recipes: test_battery."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import pytree
from jtrees.search import Recipe, options
from pallas_kernels import Config

NAN, INF = float("nan"), float("inf")
FAST, SLOW = "fast", "slow"


def huber(outputs, y):
    return jnp.abs(outputs - y)


TPU = Config("mosaic_tpu", tile=128, block=8, features=512)
KINDS = {
    "depth": options.depth(4, 10),
    "count": options.count(10, minimum=2, most=50),
    "unbounded count": options.count(10),
    "optional_count": options.optional_count(None),
    "counts": options.counts(240, 240),
    "flag": options.flag(True),
    "choice": options.choice(FAST, (FAST, SLOW)),
    "implementation": options.implementation(),
    "rows": options.rows(),
    "optional choice": options.choice(None, (FAST, SLOW), optional=True),
    "function": options.static(huber, options.check_function),
    "share": options.share(1.0),
    "positive": options.positive(0.01),
    "optional_positive": options.optional_positive(),
    "optional_not_negative": options.optional_not_negative(),
    "not_negative": options.not_negative(0.0),
    "part": options.part(0.9),
    "ranges": options.ranges((5.0, 25.0)),
    "precondition": options.precondition(),
    "base": pytree.field(metadata={"check": options.checked_base}),
}


def check(kind, value):
    return KINDS[kind].metadata["check"]("option", value)


def test_the_table_of_kinds_is_complete():
    made = {name for name, fn in vars(options).items() if getattr(fn, "__annotations__", {}).get("return") is not None}
    public = {name for name in made if not name.startswith(("check", "_"))} - {"as_scalar", "static", "traced"}
    assert public <= set(KINDS)


# A kind, and pairs of a value and what it is then.
@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("depth", [(3, 3), (np.int64(10), 10), (jnp.asarray(1), 1)]),
        ("count", [(2, 2), (np.uint8(50), 50)]),
        ("optional_count", [(None, None), (7, 7)]),
        ("counts", [((), ()), ([8, np.int32(4)], (8, 4))]),
        ("flag", [(False, False), (np.True_, True)]),
        ("choice", [(SLOW, SLOW)]),
        ("implementation", [(None, None), ("xla", "xla"), (["triton", "xla"], ("triton", "xla")), (TPU, TPU)]),
        ("rows", [(None, None), ("auto", "auto"), (np.int64(64), 64)]),
        ("optional choice", [(None, None), (SLOW, SLOW)]),
        ("function", [(huber, huber)]),
        ("share", [(0.5, 0.5), (1, 1.0), (np.float32(0.25), 0.25)]),
        ("optional_positive", [(None, None)]),
        ("optional_not_negative", [(None, None)]),
        ("base", [(jtrees.CO2(nu=2), jtrees.CO2(nu=np.float32(2)))]),
    ],
)
def test_static_options(kind, pairs):
    for value, expected in pairs:
        checked = check(kind, value)
        assert checked == expected and type(checked) is type(expected)


def test_numbers_become_float32_arrays():
    numbers = {"positive": [0.1, 1, np.float64(3), jnp.asarray(2), jnp.bfloat16(0.5)], "not_negative": [0, 0.5]}
    numbers |= {
        "optional_positive": [0.1],
        "optional_not_negative": [0.0, 2],
        "part": [0, 0.99],
        "ranges": [((1, 2), (3, 3)), jnp.ones((1, 2))],
    }
    for kind, values in numbers.items():
        for value in values:
            number = check(kind, value)
            assert isinstance(number, jax.Array) and number.dtype == jnp.float32
            np.testing.assert_array_equal(number, np.asarray(value, np.float32))


# A kind, the message after the name of the option, and values.
@pytest.mark.parametrize(
    ("kind", "message", "values"),
    [
        ("depth", "must be from 1 to 10, got ", (0, 11)),
        ("depth", "must be a whole number from 1 to 10, got ", (2.5, "3", None)),
        ("count", "must be at least 2, got 1", (1,)),
        ("count", "must be at most 50, the limit of 32-bit sizes and counters, got 51", (51,)),
        ("unbounded count", "must be at most 2147483646, the limit of 32-bit sizes and counters, got ", (2**40,)),
        ("optional_count", "must be at least 1, got 0", (0,)),
        ("counts", "must be whole numbers, such as (240, 240), got ", (240, None)),
        ("counts", "must be at least 1, got 0", ((8, 0),)),
        ("flag", "must be True or False, got ", ("False", None, 1)),
        ("choice", "must be one of 'fast', 'slow', got ", ("medium", None, 3)),
        ("implementation", "must be one of 'xla', 'mosaic_tpu', 'triton', 'interpret', a Config, a tuple", ("cuda", 3)),
        ("function", "must be a function, got ", (None, 3, "huber")),
        ("share", "must be a number above 0 and at most 1, got ", (0, 1.5, NAN, "half", None, [0.5], 1j)),
        ("share", "must be a number, got ", (True,)),
        ("rows", "must be a whole number, got 'all'; it may be 'auto' or None", ("all",)),
        ("precondition", "must be a number from 0 up to but not including 1, got ", (1, -0.1, NAN, "half")),
        ("positive", "must be finite and above 0, got ", (0, -1.0, NAN, INF)),
        ("positive", "must be a number, got ", ("0.1", 1j, {}, [0.1, [0.2]], huber, None, np.datetime64("2020"))),
        ("positive", "must be one number, got shape (2,): sweep or tune over several", ([0.1, 0.2],)),
        ("optional_positive", "must be finite and above 0, got ", (0.0,)),
        ("optional_not_negative", "must be finite and not negative, got ", (-1.0,)),
        ("not_negative", "must be finite and not negative, got ", (-0.1, NAN)),
        ("not_negative", "must be one number, got shape ", ([0.0, 0.1], [])),
        ("part", "must be a number from 0 up to but not including 1, got ", (1, -0.1, NAN)),
        ("ranges", "must be pairs (low, high), at least one, got ", ((5, 25), ((5, 25), (50,)), (), None, "steep")),
        ("ranges", "must be finite and above 0, got ", (((0.0, 5.0),),)),
        ("ranges", "must be pairs (low, high) with low <= high, got ((25, 5),)", (((25, 5),),)),
        ("base", "must be a recipe, such as jtrees.DGT(), got ", (3, jtrees.DGT)),
    ],
)
def test_other_values_are_refused_by_name(kind, message, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^option ?{re.escape(message)}"):
            check(kind, value)


@pytree.dataclass(kw_only=True)
class Ten(Recipe):
    """A recipe with an option of every sort, one of them unchecked."""

    depth: int = options.depth(2)
    rate: float = options.positive(0.5)
    penalty: float = options.not_negative(0)


def test_checked_holds_numbers_as_float32_arrays_and_static_options_as_they_are():
    recipe = options.checked(Ten(depth=np.int64(3), rate=2))
    assert (recipe.depth, type(recipe.depth), recipe.rate.dtype, float(recipe.rate)) == (3, int, jnp.float32, 2)
    assert jax.tree.structure(recipe) == jax.tree.structure(options.checked(Ten(depth=3, rate=0.25, penalty=1.0)))
    assert jax.tree.leaves(options.checked(recipe)) == jax.tree.leaves(recipe)  # checked twice is checked once


def test_the_first_bad_option_of_a_recipe_is_named():
    with pytest.raises(ValueError, match=r"^rate must be finite and above 0, got"):
        options.checked(Ten(rate=0, penalty=-1))
    with pytest.raises(TypeError, match="speed"):
        Ten(speed=3)
    with pytest.raises(TypeError, match="positional"):
        Ten(3)
