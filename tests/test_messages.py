"""Messages quote values in at most 80 characters and lists in at most five items; warnings name the user's line."""

import ast
import itertools
from pathlib import Path
import re

import jax
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees.estimators import TreeRegressor
from jtrees.search import options
from jtrees.tables import ColumnsWarning, FrameModel, TableEncoder
from jtrees.tables.dataset import checked_dataset
import pallas_kernels
from tests import tables
from tests.recipes import DGT, RECIPES

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(40, 2))
LONG = "w" * 200_000
PACKAGES = [Path(module.__file__).parent for module in (jtrees, pallas_kernels)]
FILES = {str(file.relative_to(folder.parent)): file for folder in PACKAGES for file in sorted(folder.rglob("*.py"))}
WRITERS = {"jtrees/export/numpy_file.py"}  # it writes programs, in which values stand whole


def whole_values(tree):
    """Lines of f-strings that have a ``repr`` of any length, except in methods that are representations themselves."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {part for fn in functions if fn.name in ("__repr__", "__str__") for part in ast.walk(fn)}
    for node in ast.walk(tree):
        unlimited = isinstance(node, ast.FormattedValue) and node.conversion == ord("r") and node not in inside
        if unlimited and (node.format_spec is None or ast.unparse(node.format_spec) != "f'.80'"):
            yield node.lineno


def whole_lists(tree):
    """Lines of errors and warnings that join a list of any length, unless it is a constant of the module."""
    warns = lambda node: isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn")
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) or warns(node)]
    for part in itertools.chain(*map(ast.walk, nodes)):
        joins = isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "join"
        if joins and not re.fullmatch(r"(map\(repr, )?[A-Z_]+\)?", ast.unparse(part.args[0])):
            yield part.lineno


def test_messages_have_no_values_or_lists_of_any_length():
    bad = ast.parse("raise ValueError(f'{a!r} {b!r:.80} {quoted(c)}')\nraise ValueError(', '.join(map(repr, names)))")
    assert list(whole_values(bad)) == [1] and list(whole_lists(bad)) == [2]
    for name, file in FILES.items():
        tree = ast.parse(file.read_text())
        assert name in WRITERS or not list(whole_values(tree)), name
        assert not list(whole_lists(tree)), name


RECIPES = [*RECIPES.values(), jtrees.LatentClustering(target_features=(0,))]
LONG_VALUES = (LONG, [LONG] * 3, 10**5000, np.full(200_000, -1.0))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_every_option_refuses_a_long_value_in_a_short_message(recipe):
    for name, value in itertools.product(vars(recipe), LONG_VALUES):
        with pytest.raises(ValueError, match=rf"\b{name}\b") as error:
            changed = options.checked(recipe.replace(**{name: value}))
            changed.check(jtrees.Regression(), (40, 2))
            jtrees.fit(changed, X, X[:, 0], key=KEY)
        assert len(str(error.value)) < 500


def test_long_names_of_columns_and_classes_are_cut():
    frame = pd.DataFrame({LONG: X[:, 0], LONG + "b": np.where(X[:, 1] > 0, "u", "v"), " c": 1.0})
    dataset = checked_dataset(frame, X[:, 0], None, "regression")
    with pytest.warns(UserWarning) as warned:
        dataset.schema.warn()
    tree = jtrees.ObliqueTree(np.ones((1, 2)), np.zeros(1), jtrees.leaves.Values(np.arange(2.0)))
    model = FrameModel(tree, dataset.table().encoder)
    texts = [str(warning.message) for warning in warned]
    assert all(len(text) < 500 for text in texts) and "' c'" in "".join(texts)
    with pytest.warns(UserWarning) as warned:
        model.encoder.transform(frame.assign(**{LONG: LONG}))
    assert all(len(str(warning.message)) < 500 for warning in warned)
    for call in (
        lambda: model.predict(frame[[LONG]]),
        lambda: model.predict(pd.DataFrame({f"{LONG}{i}": [1.0] for i in range(9)})),
        lambda: jtrees.fit(DGT, frame, np.where(X[:, 0] > 0, LONG, LONG + "x"), key=KEY, task="classification"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert len(str(error.value)) < 800, str(error.value)[:300]


def test_a_warning_names_the_line_that_called_the_library(fitted):
    frame = tables.frame().assign(rooms=["many", *range(399)])
    odd = frame.assign(town="Paris", size=np.where(np.arange(len(frame)) == 3, np.nan, frame["size"]))
    encoder = TableEncoder.fit(frame, tables.Y)[0]
    tree, estimator = fitted(DGT).tree, TreeRegressor(DGT).fit(tables.X, tables.Y)
    for call in (
        lambda: encoder.transform(odd),
        lambda: jtrees.fit(DGT, frame, tables.Y, key=KEY),
        lambda: jtrees.fit(DGT, frame, tables.Y, key=KEY, validation=(odd, tables.Y)),
        lambda: tree.predict(tables.GAPS),
        lambda: estimator.predict(tables.GAPS),
    ):
        with pytest.warns(ColumnsWarning) as warned:
            call()
        assert {warning.filename for warning in warned} == {__file__}
