"""Forked workers: trees and forests predict there, everything else raises at once; nothing hangs."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees.estimators import TreeClassifier
from tests import ROOT, needs
from tests.exported_models import random_tree, stacked

pytestmark = [
    pytest.mark.slow,  # processes of their own
    pytest.mark.usefixtures("standard_promotion"),
    needs.mark(hasattr(os, "fork"), "os.fork"),
]

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2))
TABLE = pd.DataFrame({"a": X[:, 0], "text": np.where(X[:, 1] > 0, "yes", "no")})


@pytest.fixture(scope="module")
def models():
    """Models by name: kinds of leaves, forests, a raw table, an estimator, and one that needs XLA."""
    draw = lambda kind, seed=0: random_tree(kind, depth=2, p=2, seed=seed)[0]
    origin = jtrees.Origin(np.ones(2, np.float32), np.float32(5))
    combined = lambda kind, *options, **changes: stacked([draw(kind, i).replace(**changes) for i in range(3)], *options)
    named_models = {kind: draw(kind) for kind in ("linear outputs", "frequency", "logit", "counts")}
    named_models |= {
        "tree": draw("constant"),
        "bounded": draw("bounded").replace(origin=origin),
        "mean": combined("constant"),
        "sum": combined("constant", "sum", origin=origin),
        "exponential": combined("constant", "sum", "exp"),
        "votes": combined("frequency", "vote"),
    }
    recipe = jtrees.DGT(depth=2, epochs=2, batch_size=20, widths=())
    named_models["estimator"] = TreeClassifier(recipe, random_state=0).fit(X, (X[:, 0] > 0).astype(int))
    named_models["table"] = jtrees.fit(recipe, TABLE, X[:, 0], key=KEY).model
    fit = jtrees.fit(recipe, X, X[:, 0], key=KEY)
    soft = jtrees.fit(jtrees.TEL(depth=2, trees=2, epochs=1, batch_size=20), X, X[:, 0], key=KEY)
    return named_models | {"a fit": fit, "needs XLA": soft.model}


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    answers = {name: np.asarray(model.predict(TABLE if name == "table" else X)) for name, model in models.items()}
    np.savez(folder / "rows.npz", x=X, leaf=models["tree"].leaf_index(X), **answers)
    TABLE.to_pickle(folder / "table.pickle")
    for name, model in models.items():
        jtrees.save(model, folder / f"{name}.jtrees")
    command = [sys.executable, "-m", "tests.forked", folder]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    return {name: result for line in process.stdout.splitlines() for name, result in json.loads(line).items()}


def test_trees_and_forests_predict_in_a_forked_child(models, results):
    for name in models.keys() - {"needs XLA"}:
        assert results[name] == pytest.approx(0, abs=1e-5), name
    for name in ("tree", "table", "estimator", "votes", "leaf", "decision path"):
        assert results[name] == 0, name
    assert results["child of the child"] == results["loaded in the child"] == results["parent"] == 0


def test_rules_and_explanations_need_no_xla(results):
    assert results["rules"] > 10 and "leaf" in results["path"]
    assert "x must be finite" in results["not finite"]


def test_what_needs_xla_raises_in_a_forked_child(results):
    for name in ("needs XLA", "fit", "sweep", "tune", "estimator fit", "shapley"):
        assert results[name].startswith("RuntimeError: "), results[name]
        assert 'multiprocessing.get_context("spawn")' in results[name] and "forked after its parent" in results[name]
    assert "a prediction of this model" in results["needs XLA"] and "jtrees.fit must" in results["fit"]


def test_a_child_of_a_process_that_did_not_use_jax_has_xla(results):
    assert results["own backend"] == [40]
