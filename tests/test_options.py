"""Options: what each annotation accepts and refuses, in words that name the option. All recipes: test_battery."""

from collections.abc import Callable
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import pytree
from jtrees.search import Ranges, Recipe, option, options
from pallas_kernels import Config, Implementation
from tests import postponed

NAN, INF = float("nan"), float("inf")
FAST, SLOW = "fast", "slow"


def huber(outputs, y):
    return jnp.abs(outputs - y)


TPU = Config("mosaic_tpu", tile=128, block=8, features=512)


@pytree.dataclass(kw_only=True)
class Kinds(Recipe):
    """A recipe with an option of every kind."""

    depth: int = option(4, most=10)
    count: int = option(10, least=2)
    number: int = option(2, least=2, most=8)
    optional_count: int | None = option(None)
    rows: int | Literal["auto"] | None = option("auto")
    counts: tuple[int, ...] = option((240, 240))
    flag: bool = option(True)
    optional_flag: bool | Literal["binned"] | None = option(None)
    choice: Literal["fast", "slow"] = option(FAST)
    optional_choice: Literal["fast", "slow"] | None = option(None)
    implementation: Implementation = option(None)
    function: Callable[..., Any] = option(huber)
    rate: float = option(0.01, above=0)
    optional_rate: float | None = option(None, above=0)
    penalty: float | None = option(0.0, least=0)
    momentum: float = option(0.9, least=0, below=1)
    share: float = option(1.0, above=0, most=1, traced=False)
    precondition: float | Literal["auto"] = option("auto", least=0, below=1)
    ranges: Ranges = option(((5.0, 25.0),))
    even: int = option(2, check=lambda name, value: 2 * (value // 2))
    base: Recipe = pytree.field(default=jtrees.DGT(), metadata=options.BASE)


def check(kind, value):
    return options.checked_values(Kinds, **{kind: value})[kind]


# A kind, and pairs of a value and what it is then.
@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("depth", [(3, 3), (np.int64(10), 10), (jnp.asarray(1), 1)]),
        ("count", [(2, 2), (np.uint8(50), 50)]),
        ("number", [(2, 2), (8, 8)]),
        ("optional_count", [(None, None), (7, 7)]),
        ("rows", [(None, None), ("auto", "auto"), (np.int64(64), 64)]),
        ("counts", [((), ()), ([8, np.int32(4)], (8, 4))]),
        ("flag", [(False, False), (np.True_, True)]),
        ("optional_flag", [(None, None), ("binned", "binned"), (False, False)]),
        ("choice", [(SLOW, SLOW)]),
        ("optional_choice", [(None, None), (SLOW, SLOW)]),
        ("implementation", [(None, None), ("xla", "xla"), (["triton", "xla"], ("triton", "xla")), (TPU, TPU)]),
        ("function", [(huber, huber)]),
        ("share", [(0.5, 0.5), (1, 1.0), (np.float32(0.25), 0.25)]),
        ("precondition", [("auto", "auto"), (0, 0.0)]),
        ("optional_rate", [(None, None)]),
        ("even", [(5, 4)]),
        ("base", [(jtrees.CO2(nu=2), jtrees.CO2(nu=np.float32(2)))]),
    ],
)
def test_static_options(kind, pairs):
    for value, expected in pairs:
        checked = check(kind, value)
        assert checked == expected and type(checked) is type(expected)


def test_numbers_become_float32_arrays():
    numbers = {"rate": [0.1, 1, np.float64(3), jnp.asarray(2), jnp.bfloat16(0.5)], "penalty": [0, 0.5]}
    numbers |= {"optional_rate": [0.1], "momentum": [0, 0.99], "ranges": [((1, 2), (3, 3)), jnp.ones((1, 2))]}
    for kind, values in numbers.items():
        for value in values:
            number = getattr(options.checked(Kinds(**{kind: value})), kind)
            assert isinstance(number, jax.Array) and number.dtype == jnp.float32
            np.testing.assert_array_equal(number, np.asarray(value, np.float32))


def test_a_check_puts_no_number_on_a_device():
    """A method can be made before the processes of a pod meet."""
    assert isinstance(check("rate", 2), np.ndarray) and isinstance(check("ranges", ((1, 2),)), np.ndarray)


def test_numbers_are_arguments_of_a_program_and_other_options_are_constants():
    traced = dict.fromkeys(("rate", "optional_rate", "penalty", "momentum", "ranges"), 1.0)
    recipe = Kinds(base=jtrees.FromMethod(make=huber), **traced)
    assert len(jax.tree.leaves(recipe.replace(base=None))) == len(traced)


# A kind, the message after the name of the option, and values.
@pytest.mark.parametrize(
    ("kind", "message", "values"),
    [
        ("depth", "must be from 1 to 10, got ", (0, 11)),
        ("depth", "must be a whole number from 1 to 10, got ", (2.5, "3", None)),
        ("count", "must be at least 2, got 1", (1,)),
        ("number", "must be from 2 to 8, got ", (1, 9)),
        ("count", "must be at most 2147483646, the limit of 32-bit sizes and counters, got ", (2**40,)),
        ("optional_count", "must be at least 1, got 0; it may be None", (0,)),
        ("rows", "must be a whole number, got 'all'; it may be 'auto' or None", ("all",)),
        ("counts", "must be whole numbers, such as (240, 240), got ", (240, None, "240", b"ab", np.array(3))),
        ("counts", "must be at least 1, got 0", ((8, 0),)),
        ("flag", "must be True or False, got ", ("False", None, 1)),
        ("optional_flag", "must be True or False, got 'bins'; it may be 'binned' or None", ("bins",)),
        ("choice", "must be one of 'fast', 'slow', got ", ("medium", None, 3)),
        ("optional_choice", "must be one of 'fast', 'slow', or None, got ", ("medium", 3)),
        ("implementation", "must be one of 'xla', 'mosaic_tpu', 'triton', 'interpret', a Config, a tuple", ("cuda", 3)),
        ("function", "must be a function, got ", (None, 3, "huber")),
        ("share", "must be a finite number above 0 and at most 1, got ", (0, 1.5, NAN, "half", None, 1j)),
        ("share", "must be a number, got ", (True, [0.5], [[1], [1, 2]])),
        ("precondition", "must be a finite number of at least 0 and below 1, got ", (1, -0.1, NAN, "half")),
        ("rate", "must be a finite number above 0, got ", (0, -1.0, NAN, INF)),
        ("rate", "must be a number, got ", ("0.1", 1j, {}, [0.1, [0.2]], huber, None, np.datetime64("2020"))),
        ("rate", "must be one number, got shape (2,)", ([0.1, 0.2],)),
        ("optional_rate", "must be a finite number above 0, got ", (0.0,)),
        ("penalty", "must be a finite number of at least 0, got ", (-0.1, NAN)),
        ("penalty", "must be one number, got shape ", ([0.0, 0.1], [])),
        ("momentum", "must be a finite number of at least 0 and below 1, got ", (1, -0.1, NAN)),
        ("ranges", "must be pairs (low, high), at least one, got ", ((5, 25), ((5, 25), (50,)), (), None, "steep")),
        ("ranges", "must be a finite number above 0, got ", (((0.0, 5.0),),)),
        ("ranges", "must be pairs (low, high) with low <= high, got ((25, 5),)", (((25, 5),),)),
        ("base", "must be a recipe, such as jtrees.DGT(), got ", (3, jtrees.DGT)),
    ],
)
def test_other_values_are_refused_by_name(kind, message, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{kind} {re.escape(message)}"):
            check(kind, value)


def test_checked_recipes_have_equal_structures_and_are_not_changed_by_a_second_check():
    recipe = options.checked(Kinds(depth=np.int64(3), rate=2))
    assert jax.tree.structure(recipe) == jax.tree.structure(options.checked(Kinds(depth=3, rate=0.25, penalty=1.0)))
    jax.tree.map(np.testing.assert_array_equal, options.checked(recipe), recipe)


def test_the_first_bad_option_of_a_recipe_is_named():
    with pytest.raises(ValueError, match=r"^rate must be a finite number above 0, got"):
        options.checked(Kinds(rate=0, penalty=-1))
    with pytest.raises(TypeError, match="speed"):
        Kinds(speed=3)


@pytest.mark.parametrize(
    ("annotation", "bounds", "message"),
    [
        (Any, {}, "an option must be annotated by values that it can check, got typing.Any"),
        (float | int, {}, "an option must be annotated by values"),
        (list | None, {}, "an option must be annotated by values"),
        (Literal[1, 2], {}, "an option must be annotated by values"),
        (int, {"below": 3}, "an option of <class 'int'> must have no bound 'below'"),
        (bool, {"least": 0}, "an option of <class 'bool'> must have no bound 'least'"),
    ],
)
def test_a_declaration_that_cannot_be_checked_is_an_error_of_the_author(annotation, bounds, message):
    with pytest.raises(TypeError, match=re.escape(message)):

        @pytree.dataclass(kw_only=True)
        class Undecided(Recipe):
            value: annotation = option(2, **bounds)

    with pytest.raises(TypeError, match="bounds must be least, above, below, most, got 'maximum'"):
        option(2, maximum=3)


def test_annotations_may_be_postponed():
    recipe = options.checked(postponed.Postponed(rate=2, depth=np.int64(3)))
    assert (recipe.rate.dtype, recipe.depth, recipe.mode) == (jnp.float32, 3, "fast")
    assert len(jax.tree.leaves(recipe)) == 1
    with pytest.raises(ValueError, match=r"^rate must be a finite number above 0"):
        options.checked(recipe.replace(rate=-1))
