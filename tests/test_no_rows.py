"""Predictions for no rows are no rows, of the shape and type of any others."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees.cli import main
from jtrees.estimators import TreeClassifier, TreeRegressor
from jtrees.tables import FrameModel

KEY, RNG = jax.random.key(0), np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
TARGETS = {
    "numbers": (X[:, 0], "regression"),
    "two numbers": (X[:, :2], "regression"),
    "classes": ((X[:, 0] > 0).astype(int), "classification"),
}
DGT = jtrees.DGT(depth=2, epochs=2, widths=(), precondition=0)
RECIPES = {
    "tree": DGT,
    "linear leaves": jtrees.GET(depth=1, starts=1, epochs=3, leaves="linear"),
    "forest": jtrees.Bagged(DGT, trees=2),
    "TEL": jtrees.TEL(depth=1, trees=2, epochs=2, precondition=0),
    "LatentTree": jtrees.LatentTree(depth=1, epochs=2),
}
METHODS = ("predict", "leaf_index", "decision_path")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("standard_promotion")
def test_predict_of_no_rows_returns_no_rows(name):
    for y, task in TARGETS.values():
        if name == "linear leaves" and task == "classification":
            continue
        fit = jtrees.fit(RECIPES[name], X, y, key=KEY, task=task)
        for rows in (X[:2], jnp.asarray(X[:2], jnp.float32), X[:2].astype(np.float32)):
            for method in [getattr(fit.model, which) for which in METHODS if hasattr(fit.model, which)]:
                two, none = method(rows), method(rows[:0])
                axis = -1 if method.__name__ == "decision_path" else two.shape.index(2) if two.ndim == 1 else None
                assert type(none) is type(two) and none.dtype == two.dtype and none.size == 0
                assert none.ndim == two.ndim and (axis is None or none.shape[axis] == 0)
        assert fit.predict(X[:0]).shape == (0, *fit.predict(X[:2]).shape[1:])
        with pytest.raises(ValueError, match="x must have 3 columns, got 4"):
            fit.predict(np.zeros((0, 4)))


def test_a_program_predicts_no_rows():
    model = jtrees.fit(DGT, X, X[:, 0], key=KEY).model
    assert jax.jit(model.predict)(jnp.zeros((0, 3))).shape == (0,)


@pytest.mark.slow
def test_models_of_raw_tables_and_estimators_predict_no_rows():
    frame = pd.DataFrame({"a": X[:, 0], "b": np.where(X[:, 1] > 0, "u", "v"), "c": pd.date_range("2020", periods=60)})
    gaps = np.where(X > 2, np.nan, X)
    for rows in (frame, gaps):
        model = jtrees.fit(DGT, rows, X[:, 0], key=KEY).model
        assert isinstance(model, FrameModel) and model.predict(rows[:0]).shape == model.leaf_index(rows[:0]).shape == (
            0,
        )
    for rows in (frame, gaps, X):
        regressor = TreeRegressor(DGT, random_state=0).fit(rows, X[:, :2])
        assert regressor.predict(rows[:0]).shape == (0, 2)
        classifier = TreeClassifier(DGT, random_state=0).fit(rows, X[:, 0] > 0)
        assert classifier.predict_proba(rows[:0]).shape == (0, 2) and classifier.predict(rows[:0]).dtype == bool


def test_training_rows_are_needed():
    with pytest.raises(ValueError, match=r"x must have at least one row and one column, got shape \(0, 3\)"):
        jtrees.fit(DGT, X[:0], X[:0, 0], key=KEY)
    with pytest.raises(ValueError, match=r"x must have at least one column, got shape \(0, 0\)"):
        jtrees.fit(DGT, X, X[:, 0], key=KEY).predict(np.zeros((0, 0)))


def test_the_command_line_predicts_an_empty_table_by_a_header(tmp_path, capsys):
    model = TreeClassifier(DGT, random_state=0).fit(
        pd.DataFrame(X, columns=["a", "b", "c"]), np.where(X[:, 0] > 0, "u", "v")
    )
    jtrees.save(model, tmp_path / "model.jtrees")
    (tmp_path / "rows.csv").write_text("a,b,c\n")
    assert main(["predict", str(tmp_path / "model.jtrees"), str(tmp_path / "rows.csv"), "--probabilities"]) == 0
    assert capsys.readouterr().out == "prediction,probability of u,probability of v\n"
