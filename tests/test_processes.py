"""Forked workers: trees and forests predict there, everything else raises at once; nothing hangs."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees import leaves as kinds, losses
from jtrees.estimators import TreeClassifier
from tests import ROOT, needs

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    needs.mark(hasattr(os, "fork"), "os.fork"),
]

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2))
TABLE = pd.DataFrame({"a": X[:, 0], "text": np.where(X[:, 1] > 0, "yes", "no")})
SECONDS = 240
MODELS = [
    "tree",
    "linear",
    "several outputs",
    "frequencies",
    "logits",
    "counts",
    "forest",
    "sum",
    "exponential",
    "votes",
]
MODELS += ["table", "estimator", "a fit"]


def tree(leaves):
    return jax.tree.map(jnp.asarray, jtrees.ObliqueTree(drawn(3, 2), np.zeros(3, np.float32), leaves))


def drawn(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def models():
    """Models by name: kinds of leaves, forests, a raw table, an estimator, and one that needs XLA."""
    shares = np.abs(drawn(4, 3)) + 0.1
    shares /= shares.sum(1, keepdims=True)
    poisson = kinds.Values(drawn(4), jtrees.losses.Poisson())
    bounded = kinds.Linear(drawn(4, 2), drawn(4), np.full(4, -1, np.float32), np.ones(4, np.float32))
    origin = jtrees.Origin(np.ones(2, np.float32), np.float32(5))
    frequencies = kinds.Values(shares.astype(np.float32), losses.Frequencies())
    stacked = lambda trees: jax.tree.map(lambda *a: np.stack(a), *trees)
    constants = [tree(kinds.Values(drawn(4))) for _ in range(3)]
    made = {
        "tree": tree(kinds.Values(drawn(4))),
        "linear": tree(bounded).replace(origin=origin),
        "several outputs": tree(kinds.Linear(drawn(4, 2, 2), drawn(4, 2))),
        "frequencies": tree(frequencies),
        "logits": tree(kinds.Values(drawn(4, 3), losses.LogLoss())),
        "counts": tree(poisson),
        "forest": jtrees.Forest(stacked(constants), "mean"),
        "sum": jtrees.Forest(stacked([one.replace(origin=origin) for one in constants]), "sum"),
        "exponential": jtrees.Forest(stacked(constants), "sum", "exp"),
        "votes": jtrees.Forest(stacked([tree(frequencies) for _ in range(3)]), "vote"),
    }
    recipe = jtrees.DGT(depth=2, epochs=2, batch_size=20, widths=())
    made["estimator"] = TreeClassifier(recipe, random_state=0).fit(X, (X[:, 0] > 0).astype(int))
    made["table"] = jtrees.fit(recipe, TABLE, X[:, 0], key=KEY).model
    fit = jtrees.fit(recipe, X, X[:, 0], key=KEY)
    soft = jtrees.fit(jtrees.TEL(depth=2, trees=2, epochs=1, batch_size=20), X, X[:, 0], key=KEY)
    return made | {"a fit": fit, "needs XLA": soft.model}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each case returned in a child."""
    folder, made = tmp_path_factory.mktemp("models"), models()
    answers = {name: np.asarray(one.predict(TABLE if name == "table" else X)) for name, one in made.items()}
    np.savez(folder / "rows.npz", x=X, leaf=made["tree"].leaf_index(X), **answers)
    TABLE.to_pickle(folder / "table.pickle")
    for name, one in made.items():
        jtrees.save(one, folder / f"{name}.jtrees")
    command = [sys.executable, "-m", "tests.forked", folder]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    return {name: result for line in ended.stdout.splitlines() for name, result in json.loads(line).items()}


def test_trees_and_forests_predict_in_a_forked_child(found):
    for name in MODELS:
        assert found[name] == pytest.approx(0, abs=1e-5), name
    for name in ("tree", "table", "estimator", "votes", "leaf", "decision path"):
        assert found[name] == 0, name
    assert found["child of the child"] == found["loaded in the child"] == found["parent"] == 0


def test_rules_and_explanations_need_no_xla(found):
    assert found["rules"] > 10 and "leaf" in found["path"]
    assert "x must be finite" in found["not finite"]


def test_what_needs_xla_raises_in_a_forked_child(found):
    for name in ("needs XLA", "fit", "sweep", "tune", "estimator fit", "shapley"):
        assert found[name].startswith("RuntimeError: "), found[name]
        assert 'multiprocessing.get_context("spawn")' in found[name] and "forked after its parent" in found[name]
    assert "a prediction of this model" in found["needs XLA"] and "jtrees.fit must" in found["fit"]


def test_a_child_of_a_process_that_did_not_use_jax_has_xla(found):
    assert found["own backend"] == [40]
