"""Messages: values are quoted in at most 80 characters, lists in at most five items."""

import ast
from pathlib import Path
import re

import jax
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees.search import options
from jtrees.tables import TableEncoder
from jtrees.validation import quoted, quoted_list
import pallas_kernels

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(40, 2))
LONG = "w" * 200_000
PACKAGES = [Path(module.__file__).parent for module in (jtrees, pallas_kernels)]
FILES = {str(file.relative_to(folder.parent)): file for folder in PACKAGES for file in sorted(folder.rglob("*.py"))}
WRITERS = {"jtrees/export/numpy_file.py"}  # it writes programs, in which values stand whole


# --- The source ------------------------------------------------------------------------------------------------------


def whole_values(tree):
    """Lines of f-strings that have a ``repr`` of any length, except in methods that are representations themselves."""
    shown = {"__repr__", "__str__"}
    inside = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in shown
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        whole = isinstance(node, ast.FormattedValue) and node.conversion == ord("r") and node not in inside
        if whole and (node.format_spec is None or ast.unparse(node.format_spec) != "f'.80'"):
            yield node.lineno


def whole_lists(tree):
    """Lines of errors and warnings that join a list of any length, unless it is a constant of the module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) and not (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
        ):
            continue
        for part in ast.walk(node):
            joins = isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "join"
            if joins and not re.fullmatch(r"(map\(repr, )?[A-Z_]+\)?", ast.unparse(part.args[0])):
                yield part.lineno


def test_a_scan_finds_values_and_lists_that_are_not_cut():
    said = ast.parse("raise ValueError(f'{a!r} {b!r:.80} {quoted(c)}')\nraise ValueError(', '.join(map(repr, names)))")
    assert list(whole_values(said)) == [1] and list(whole_lists(said)) == [2]


@pytest.mark.parametrize("name", FILES)
def test_messages_have_no_values_or_lists_of_any_length(name):
    tree = ast.parse(FILES[name].read_text())
    assert name in WRITERS or not list(whole_values(tree))
    assert not list(whole_lists(tree))


# --- What is quoted --------------------------------------------------------------------------------------------------


def test_quotes_are_short_and_show_spaces():
    assert quoted(" a ") == "' a '" and quoted(LONG) == "'" + "w" * 75 + "...'"
    assert len(quoted(np.arange(1000).reshape(10, 100))) == 80
    assert quoted(10**5000) == "a value of type int"
    assert quoted_list(range(7)) == "0, 1, 2, 3, 4 and 2 more" and len(quoted_list([LONG] * 9)) < 420


RECIPES = [
    jtrees.GET(),
    jtrees.RADDT(),
    jtrees.DGT(),
    jtrees.TEL(),
    jtrees.LatentTree(),
    jtrees.CO2(),
    jtrees.NonGreedy(),
    jtrees.LatentClustering(target_features=(0,)),
    jtrees.FromMethod(make=jtrees.methods.get),
    jtrees.Bagged(jtrees.GET()),
    jtrees.BestOf(jtrees.GET()),
    jtrees.Boosted(),
    jtrees.Refined(),
    jtrees.Polished(jtrees.GET()),
    jtrees.Sparse(jtrees.GET()),
]
OPTIONS = [(recipe, name) for recipe in RECIPES for name in vars(recipe)]


@pytest.mark.parametrize(
    ("recipe", "name"), OPTIONS, ids=lambda one: one if isinstance(one, str) else type(one).__name__
)
@pytest.mark.parametrize(
    "value", [LONG, [LONG] * 3, 10**5000, np.full(200_000, -1.0)], ids=["text", "list", "int", "array"]
)
def test_every_option_refuses_a_long_value_in_a_short_message(recipe, name, value):
    with pytest.raises(ValueError, match=name) as error:
        changed = options.checked(recipe.replace(**{name: value}))
        changed.check(jtrees.Regression(), (40, 2))
        jtrees.fit(changed, X, X[:, 0], key=KEY)
    assert len(str(error.value)) < 500


def test_long_arguments_are_cut():
    calls = [
        lambda: jtrees.fit(LONG, X, X[:, 0], key=KEY),
        lambda: jtrees.fit(jtrees.GET(), X, X[:, 0], key=LONG),
        lambda: jtrees.fit(jtrees.GET(), X, X[:, 0], key=KEY, task=LONG),
        lambda: jtrees.fit(jtrees.GET(), X, X[:, 0], key=KEY, max_seconds=LONG),
        lambda: jtrees.fit(jtrees.GET(), X, [LONG] * 40, key=KEY),
        lambda: jtrees.fit(jtrees.GET(), X, [LONG] * 40, key=KEY, task="classification"),
        lambda: jtrees.fit(jtrees.GET(), [[LONG, 1.0]] * 40, X[:, 0], key=KEY),
        lambda: jtrees.tune(jtrees.GET(), X, X[:, 0], key=KEY, grid={LONG: (1, 2)}),
        lambda: jtrees.tune(jtrees.GET(), X, X[:, 0], key=KEY, grid=[LONG]),
        lambda: jtrees.sweep(jtrees.GET(), X, X[:, 0], key=KEY, samples=[{LONG: 1}]),
        lambda: jtrees.sweep(jtrees.GET(), X, X[:, 0], key=KEY, seeds=LONG),
        lambda: jtrees.sweep(jtrees.GET(), X, X[:, 0], key=KEY, grid={"depth": (1,)}, validation=LONG),
        lambda: jtrees.Classification(LONG),
        lambda: jtrees.Regression(loss_function=LONG),
        lambda: jtrees.save(LONG, "x.jtrees"),
        lambda: jtrees.sharding.mesh(10**5000),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"must|options of GET are") as error:
            call()
        assert len(str(error.value)) < 500, str(error.value)[:200]


def test_long_names_of_columns_and_classes_are_cut():
    frame = pd.DataFrame({LONG: X[:, 0], LONG + "b": np.where(X[:, 1] > 0, "u", "v"), " c": 1.0})
    recipe = jtrees.DGT(depth=1, epochs=1, widths=(), precondition=0)
    with pytest.warns(UserWarning) as said:
        model = jtrees.fit(recipe, frame, X[:, 0], key=KEY).model
    assert all(len(str(one.message)) < 500 for one in said) and any("' c'" in str(one.message) for one in said)
    for call in (
        lambda: model.predict(frame[[LONG]]),
        lambda: model.predict(frame.assign(**{LONG: "text"})),
        lambda: model.predict(pd.DataFrame({f"{LONG}{i}": [1.0] for i in range(9)})),
        lambda: jtrees.fit(recipe, frame, np.where(X[:, 0] > 0, LONG, LONG + "x"), key=KEY, task="classification"),
        lambda: TableEncoder.fit(frame, np.where(X[:, 0] > 0, LONG, "1")),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert len(str(error.value)) < 800, str(error.value)[:300]
