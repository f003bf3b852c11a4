"""Names of columns that formats, languages and compilers read otherwise."""

import runpy
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees import export
from jtrees.tables import FrameModel, TableEncoder
from tests.exported_models import as_json, node_result, onnx_session
from tests.needs import COMPILER, CPP_COMPILER, check, needs_compiler, needs_node

WORDS = """
x X x_2 a-b a_b a.b a?b _1 _ __ _A __linux unix linux i386 int and xor nullptr typeof NULL errno near features
FEATURES row predict leaf_of out i k n None class lambda def prediction_ add_1 jtrees H MAIN z x0 weights
a*/b a/*b a%sb {a} $a $$ Größe größe 価格 🌲 é e\u0301 1 1st -1 + <b>
"""
SPACED = ("", " ", "  ", "a b", "a  b", "a\tb", "a\nb", 'a "b"', "a 'b'", "a\\b", "import os")
ODD = [*WORDS.split(), "w" * 300, "w" * 301, *SPACED]


def model_of(names):
    """A model of a split of all columns of a table, and the table, which has numbers or text for each name, in turn."""
    rng = np.random.default_rng(0)
    draw = lambda i: rng.normal(size=120) if i % 3 else np.where(rng.random(120) < 0.5, "u", "v")
    frame = pd.DataFrame({name: draw(i) for i, name in enumerate(names)})
    columns, features = TableEncoder.fit(frame)
    weights = rng.normal(size=(3, features.shape[1])).astype(np.float32)
    tree = jtrees.ObliqueTree(weights, np.zeros(3, np.float32), jtrees.leaves.Values(np.arange(4, dtype=np.float32)))
    return FrameModel(jax.tree.map(jnp.asarray, tree), columns), frame


@pytest.fixture(scope="module")
def odd():
    return model_of(ODD)


def test_rules_numpy_files_and_saved_models_take_any_names(odd, tmp_path):
    model, frame = odd
    text = model.to_text()
    assert all(repr(name)[1:-1] in text or name in text for name in frame)
    export.to_numpy(model, tmp_path / "model.py")
    predict = runpy.run_path(str(tmp_path / "model.py"))["predict"]
    np.testing.assert_allclose(predict(frame), model.predict(frame), rtol=1e-6)
    jtrees.save(model, tmp_path / "model.jtrees")
    np.testing.assert_array_equal(jtrees.load(tmp_path / "model.jtrees").predict(frame), model.predict(frame))


@needs_node
def test_javascript_modules_take_any_names(odd, tmp_path):
    model, frame = odd
    predictions = node_result(model, as_json(frame), tmp_path, "rows.map(predict)")
    np.testing.assert_allclose(predictions, model.predict(frame), rtol=1e-5)


@pytest.mark.slow
def test_onnx_takes_any_names_or_says_that_it_cannot(tmp_path):
    model, frame = model_of([name for name in ODD if name])
    session = onnx_session(model, tmp_path)
    rows = {str(name): values.to_numpy() for name, values in frame.items()}
    dtypes = {entry.name: object if "string" in entry.type else float for entry in session.get_inputs()}
    cells = {name: rows[name].astype(dtype) for name, dtype in dtypes.items()}
    np.testing.assert_allclose(session.run(["prediction"], cells)[0], model.predict(frame), rtol=1e-5)
    for name in ["", "jtrees.add_1", "prediction", "leaf", "a\0b"]:
        with pytest.raises(ValueError, match=r"columns must .*, got '"):
            export.to_onnx(model_of([name, "b"])[0], tmp_path / "refused.onnx")
    assert not (tmp_path / "refused.onnx").exists()


@needs_compiler
@pytest.mark.parametrize(("language", "standard"), [("c", "gnu99"), ("c", "gnu17"), ("c++", "gnu++17")])
def test_a_header_of_any_names_compiles_and_predicts(odd, language, standard, tmp_path):
    compiler = COMPILER if language == "c" else CPP_COMPILER
    check(compiler, "a C++ compiler")
    export.to_c(odd[0], tmp_path / "model.h")
    command = [compiler, "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-DJTREES_MAIN"]
    subprocess.run([*command, tmp_path / "model.h", "-o", tmp_path / "main"], check=True)
    assert subprocess.run([tmp_path / "main"], check=False).returncode == 0
