"""Names of columns that formats, languages and compilers read otherwise."""

import json
import os
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pandas as pd
import pytest

import jtrees
from jtrees import export
from jtrees.tables import FrameModel, TableEncoder

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
PLUS = shutil.which("g++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")

WORDS = """
x X x_2 a-b a_b a.b a?b _1 _ __ _A __linux unix linux i386 int and xor nullptr typeof NULL errno near features
FEATURES row predict leaf_of out i k n None class lambda def prediction_ add_1 jtrees H MAIN z x0 weights
a*/b a/*b a%sb {a} $a $$ Größe größe 価格 🌲 é e\u0301 1 1st -1 + <b>
"""
SPACED = ("", " ", "  ", "a b", "a  b", "a\tb", "a\nb", 'a "b"', "a 'b'", "a\\b", "import os")
ODD = [*WORDS.split(), "w" * 300, "w" * 301, *SPACED]
REFUSED_BY_ONNX = ["", "jtrees.add_1", "prediction", "leaf", "a\0b"]


def table(names):
    """A column of numbers or of text for each name, in turn, of which the target is a sum."""
    rng = np.random.default_rng(0)
    columns = {
        name: rng.normal(size=120) if i % 3 else np.where(rng.random(120) < 0.5, "u", "v")
        for i, name in enumerate(names)
    }
    y = sum(np.asarray(values == "u" if values.dtype.kind == "U" else values, float) for values in columns.values())
    return pd.DataFrame(columns), y


def model_of(names):
    """A model of a split of all columns of a table, and the table."""
    frame, y = table(names)
    columns = TableEncoder.fit(frame, y)[0]
    features = len(columns.feature_names)
    weights = np.random.default_rng(1).normal(size=(3, features)).astype(np.float32)
    tree = jtrees.ObliqueTree(weights, np.zeros(3, np.float32), jtrees.leaves.Values(np.arange(4, dtype=np.float32)))
    return FrameModel(jax.tree.map(jnp.asarray, tree), columns), frame


@pytest.fixture(scope="module")
def odd():
    return model_of(ODD)


def test_rules_and_numpy_files_take_any_names(odd, tmp_path):
    model, frame = odd
    assert model.to_text()
    export.to_numpy(model, tmp_path / "model.py")
    scope = {"__name__": "model"}
    exec(compile((tmp_path / "model.py").read_text(), "model.py", "exec"), scope)
    np.testing.assert_allclose(scope["predict"](frame), model.predict(frame), rtol=1e-6)


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")
def test_javascript_modules_take_any_names(odd, tmp_path):
    model, frame = odd
    export.to_javascript(model, tmp_path / "model.mjs")
    (tmp_path / "rows.json").write_text(frame.to_json(orient="records", double_precision=15))
    (tmp_path / "main.mjs").write_text("""import { readFileSync } from "node:fs";
    import { predict } from "./model.mjs";
    console.log(JSON.stringify(JSON.parse(readFileSync(new URL("rows.json", import.meta.url))).map(predict)));""")
    done = subprocess.run(["node", tmp_path / "main.mjs"], capture_output=True, text=True, check=True)
    np.testing.assert_allclose(json.loads(done.stdout), model.predict(frame), rtol=1e-5)


def test_saved_models_take_any_names(odd, tmp_path):
    model, frame = odd
    jtrees.save(model, tmp_path / "model.jtrees")
    np.testing.assert_array_equal(jtrees.load(tmp_path / "model.jtrees").predict(frame), model.predict(frame))


@pytest.mark.slow
def test_onnx_takes_any_names_or_says_that_it_cannot(tmp_path):
    model, frame = model_of([name for name in ODD if name])
    export.to_onnx(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    rows = {str(name): values.to_numpy() for name, values in frame.items()}
    given = {one.name: rows[one.name].astype(object if "string" in one.type else float) for one in session.get_inputs()}
    np.testing.assert_allclose(session.run(["prediction"], given)[0], model.predict(frame), rtol=1e-5)
    for name in REFUSED_BY_ONNX:
        with pytest.raises(ValueError, match=r"columns must .*, got '"):
            export.to_onnx(model_of([name, "b"])[0], tmp_path / "refused.onnx")
    assert not (tmp_path / "refused.onnx").exists()


@needs_compiler
@pytest.mark.parametrize(("language", "standard"), [("c", "gnu99"), ("c", "c99"), ("c", "gnu17"), ("c++", "gnu++17")])
def test_a_header_of_any_names_compiles_and_predicts(odd, language, standard, tmp_path):
    export.to_c(odd[0], tmp_path / "model.h")
    (tmp_path / "main.c").write_text('#include "model.h"\n')
    compiler = COMPILER if language == "c" else PLUS
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-DJTREES_MAIN"]
    subprocess.run([*command, tmp_path / "main.c", "-o", tmp_path / "main"], check=True)
    assert subprocess.run([tmp_path / "main"], check=False).returncode == 0


@needs_compiler
@pytest.mark.parametrize("standard", ["gnu99", "gnu17"])
def test_no_macro_of_the_compiler_is_a_member(standard, tmp_path):
    command = [COMPILER, "-x", "c", f"-std={standard}", "-dM", "-E", os.devnull]
    defined = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    macros = [line.split()[1].split("(")[0] for line in defined.splitlines()]
    assert "linux" in macros or os.uname().sysname != "Linux"
    export.to_c(model_of(macros)[0], tmp_path / "model.h")
    (tmp_path / "main.c").write_text('#include "model.h"\n')
    flags = [f"-std={standard}", "-Werror", "-fsyntax-only"]
    subprocess.run([COMPILER, *flags, tmp_path / "main.c"], check=True)
