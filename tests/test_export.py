"""Exported files against the model: the same leaf for every row, and the same predictions."""

import ctypes
import os
import runpy
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import nasty
import numpy as np
import onnxruntime
import pytest

import jtrees
from jtrees import Forest, ObliqueTree, Origin, export
from jtrees.export.program import program_of
from jtrees.leaves import Constant, Frequency, Linear, Logit

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
REALS = {"double": np.float64, "float": np.float32}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def drawn(kind, depth=3, p=5, seed=0, origin=False):
    """A tree with leaves of a kind, and samples, some of them on a split."""
    rng = np.random.default_rng(seed)
    tree, x = nasty.near_ties(depth, p, seed, n=400)
    count = 2**depth
    f32 = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    leaves = {
        "constant": lambda: Constant(f32(count)),
        "outputs": lambda: Constant(f32(count, 3)),
        "frequency": lambda: Frequency(jnp.asarray(rng.dirichlet(np.ones(4), count), jnp.float32)),
        "logit": lambda: Logit(f32(count, 3)),
        "linear": lambda: Linear(f32(count, p), f32(count)),
        "bounded": lambda: Linear(f32(count, p), f32(count), -jnp.ones(count), jnp.ones(count)),
        "linear outputs": lambda: Linear(f32(count, p, 2), f32(count, 2)),
    }[kind]()
    y = (
        None
        if kind in ("frequency", "logit")
        else jnp.asarray(rng.normal(size=leaves.at(jnp.zeros(1, int), x[:1]).shape[1:]), jnp.float32)
    )
    zero = jnp.asarray(rng.integers(-5000, 5000, p), jnp.float32)
    return tree.replace(leaves=leaves, origin=Origin(zero, y) if origin else None), x + (
        np.float64(zero) if origin else 0
    )


def forest_of(kind, combine="mean", link="identity", trees=3):
    drawn_trees, x = zip(*(drawn(kind, seed=seed) for seed in range(trees)), strict=True)
    return Forest(jax.tree.map(lambda *a: jnp.stack(a), *drawn_trees), combine, link), np.concatenate(x)


MODELS = {
    "constant": lambda: drawn("constant"),
    "constant, far from zero": lambda: drawn("constant", origin=True),
    "outputs": lambda: drawn("outputs", origin=True),
    "frequency, depth 8": lambda: drawn("frequency", depth=8),
    "logit, depth 1": lambda: drawn("logit", depth=1, p=2),
    "linear": lambda: drawn("linear", p=7, origin=True),
    "bounded": lambda: drawn("bounded", p=1),
    "linear outputs": lambda: drawn("linear outputs", depth=4, p=6),
    "forest": lambda: forest_of("linear"),
    "sum": lambda: forest_of("constant", "sum"),
    "votes": lambda: forest_of("frequency", "vote"),
    "softmax": lambda: forest_of("outputs", "sum", "softmax"),
}


def leaves_of(model, x):
    """The leaf of each row by the library, ``(n, trees)``."""
    trees = [model] if isinstance(model, ObliqueTree) else list(model)
    return np.stack([tree.leaf_index(x) for tree in trees], axis=1)


def compiled(path, prefix, precision="double", flags=()):
    """A header as a library: functions of an array of rows."""
    source = path.with_suffix(".c")
    body = f"""#include "{path.name}"
    int rows_leaf(int tree, const {precision} *x, int n, int *out) {{
      for (int i = 0; i < n; i++) out[i] = {prefix}_leaf(tree, x + i * {prefix.upper()}_FEATURES);
      return {prefix}_selftest();
    }}
    void rows_predict(const {precision} *x, int n, {precision} *out) {{
      for (; n--; x += {prefix.upper()}_FEATURES, out += {prefix.upper()}_OUTPUTS) {prefix}_predict(x, out);
    }}"""
    if f"int {prefix}_leaf(const" in path.read_text():  # of one tree
        body = body.replace("_leaf(tree, ", "_leaf(")
    source.write_text(body)
    library = path.with_suffix(".so")
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-pedantic", "-O2"]
    subprocess.run([COMPILER, *strict, *flags, "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def called(library, model, x, precision="double"):
    """Leaves, predictions and the result of the self-test of a compiled header."""
    program = program_of(model)
    x = np.ascontiguousarray(x, REALS[precision])
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
    leaves, wrong = [], 0
    for tree in range(len(program.bias)):
        out = np.empty(len(x), np.int32)
        wrong = library.rows_leaf(tree, pointer(x), len(x), pointer(out))
        leaves.append(out)
    out = np.empty((len(x), len(program.offset)), REALS[precision])
    library.rows_predict(pointer(x), len(x), pointer(out))
    return np.stack(leaves, axis=1), out, wrong


@pytest.mark.parametrize("name", MODELS)
def test_the_arrays_of_a_model_are_the_model(name):
    model, x = MODELS[name]()
    program = program_of(model)
    np.testing.assert_array_equal(program.leaf(x), leaves_of(model, x))
    predicted = model.predict(x)
    assert program.scalar == (predicted.ndim == 1)
    # The library adds in single precision, linear leaves terms of about 1000.
    np.testing.assert_allclose(program.predict(x).reshape(predicted.shape), predicted, rtol=2e-4, atol=2e-4)


@needs_compiler
@pytest.mark.parametrize("name", MODELS)
def test_c(name, tmp_path):
    model, x = MODELS[name]()
    export.to_c(model, tmp_path / "model.h", prefix="my_tree")
    leaf, out, wrong = called(compiled(tmp_path / "model.h", "my_tree"), model, x)
    assert wrong == 0
    np.testing.assert_array_equal(leaf, leaves_of(model, x))
    np.testing.assert_allclose(out, program_of(model).predict(x), rtol=1e-12, atol=1e-12)


@needs_compiler
@pytest.mark.parametrize("flags", [(), ("-O3", "-march=native")])
def test_c_in_single_precision(flags, tmp_path):
    model, x = drawn("linear", p=6)
    x = x.astype(np.float32)
    export.to_c(model, tmp_path / "model.h", precision="float")
    leaf, out, wrong = called(compiled(tmp_path / "model.h", "jtrees", "float", flags), model, x, "float")
    assert wrong == 0
    np.testing.assert_array_equal(leaf, leaves_of(model, x))
    expected = program_of(model).predict(x)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


@needs_compiler
def test_a_header_is_a_program_that_tests_itself(tmp_path):
    path, program = tmp_path / "model.h", tmp_path / "program"
    export.to_c(drawn("frequency")[0], path)
    run = lambda: subprocess.run([COMPILER, "-std=c99", "-DJTREES_MAIN", "-x", "c", path, "-o", program], check=True)
    run()
    assert subprocess.run([program]).returncode == 0
    text = path.read_text()
    assert "frequenc" not in text and "a tree of depth 3 with 5 features" in text
    assert "#include" not in text and "malloc" not in text
    before, _, after = text.partition("jtrees_bias[1][7] = {{")
    path.write_text(f"{before}jtrees_bias[1][7] = {{{{-1e9f, {after.partition(', ')[2]}")
    run()
    assert subprocess.run([program]).returncode > 0


@pytest.mark.parametrize("name", MODELS)
def test_numpy(name, tmp_path):
    model, x = MODELS[name]()
    path = tmp_path / "model.py"
    export.to_numpy(model, path)
    written = runpy.run_path(str(path))
    predicted = written["predict"](x)
    assert predicted.shape == model.predict(x).shape and predicted.dtype == np.float64
    np.testing.assert_allclose(predicted, program_of(model).predict(x).reshape(predicted.shape), rtol=1e-12, atol=1e-12)
    leaf = written["leaf"](x)
    np.testing.assert_array_equal(
        leaf, leaves_of(model, x)[:, 0] if isinstance(model, ObliqueTree) else leaves_of(model, x)
    )
    assert len(written["predict"](x[:0])) == 0
    with pytest.raises(ValueError, match="x must have shape"):
        written["predict"](x[:, :-1])


def test_a_numpy_file_needs_numpy_alone_and_tests_itself(tmp_path):
    path = tmp_path / "model.py"
    export.to_numpy(drawn("linear")[0], path)
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    path.write_text(path.read_text().replace("    return leaf[:, 0]", "    return 7 - leaf[:, 0]"))
    assert subprocess.run([sys.executable, path], capture_output=True).returncode == 1


@pytest.mark.parametrize(
    "name", ["constant, far from zero", "frequency, depth 8", "linear outputs", "bounded", "softmax"]
)
def test_stablehlo(name, tmp_path):
    model, x = MODELS[name]()
    path = tmp_path / "model.stablehlo"
    export.to_stablehlo(model, path)
    with jax.enable_x64(True):
        program = jax.export.deserialize(bytearray(path.read_bytes()))
        for rows in (x, x[:7]):
            predicted, leaf = jax.device_get(program.call(np.float64(rows)))
            expected = leaves_of(model, rows)
            np.testing.assert_array_equal(leaf, expected[:, 0] if isinstance(model, ObliqueTree) else expected)
            assert predicted.shape == model.predict(rows).shape and leaf.dtype == np.int32
            np.testing.assert_allclose(
                predicted, program_of(model).predict(rows).reshape(predicted.shape), rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("name", MODELS)
def test_onnx(name, tmp_path):
    model, x = MODELS[name]()
    path = tmp_path / "model.onnx"
    export.to_onnx(model, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for rows in (x, x[:7], x[:0]):
        predicted, leaf = session.run(["prediction", "leaf"], {"x": np.float64(rows)})
        assert leaf.shape[1:] == (() if isinstance(model, ObliqueTree) else (len(model),))
        assert predicted.dtype == np.float64 and len(predicted) == len(leaf) == len(rows)
        if not len(rows):
            continue
        expected = leaves_of(model, rows)
        np.testing.assert_array_equal(leaf.reshape(expected.shape), expected)
        expected = program_of(model).predict(rows).reshape(model.predict(rows).shape)
        np.testing.assert_allclose(predicted, expected, rtol=1e-12, atol=1e-12)
        assert predicted.shape == expected.shape


@pytest.mark.usefixtures("standard_promotion")
def test_what_cannot_be_exported(tmp_path):
    tree, x = drawn("linear")
    path = tmp_path / "model"
    path.write_text("before")
    soft = jtrees.fit(jtrees.TEL(trees=2, depth=2, epochs=1), x, x[:, 0], key=jax.random.key(0)).model
    many = jax.tree.map(lambda a: jnp.stack([a, a]), tree)
    raw = jtrees.data.FrameModel(tree, jtrees.data.Columns.fit(x)[0])
    for write in (export.to_c, export.to_numpy, export.to_onnx, export.to_stablehlo):
        for model, message in (
            (soft, f"model must be an ObliqueTree or a Forest of them, got {type(soft).__name__}"),
            (many, r"model must be an ObliqueTree or a Forest of them, got ObliqueTree of shape \(2, 7, 5\)"),
            (raw, "got FrameModel: export its .model, and encode rows by its .columns"),
            (tree.replace(weights=np.float64(tree.weights)), "model must have float32 weights, got float64"),
            (Forest(many, "vote"), "trees with linear leaves cannot vote"),
        ):
            with pytest.raises(ValueError, match=message):
                write(model, path)
        with pytest.raises(OSError):
            write(tree, tmp_path / "missing" / "model")
    with pytest.raises(ValueError, match="prefix must be a name in C, got '2nd'"):
        export.to_c(tree, path, prefix="2nd")
    with pytest.raises(ValueError, match="precision must be"):
        export.to_c(tree, path, precision="half")
    assert path.read_text() == "before" and [file.name for file in tmp_path.iterdir()] == ["model"]


SETS = (
    "abalone",
    "ailerons",
    "airfoil-self-noise",
    "breast-cancer-wisconsin",
    "churn",
    "combined-cycle-power-plant",
    "connect-4",
    "cpu-act",
    "diabetes",
    "dna",
    "elevators",
    "kin8nm",
    "letter",
    "pendigits",
    "satimage",
    "spambase",
)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_every_row_of_real_data_reaches_the_same_leaf_everywhere(name, data_dir, tmp_path):
    """Every split passes through a row of the table, and single precision sends some rows elsewhere."""
    rng = np.random.default_rng(0)
    with np.load(data_dir / f"{name}.npz") as arrays:
        x = arrays["X"].astype(np.float32)
    depth, p = 6, x.shape[1]
    nodes = 2**depth - 1
    spread = x.std(0)
    weights = (rng.normal(size=(nodes, p)) / np.where(spread > 0, spread, 1)).astype(np.float32)
    axis_aligned = rng.random(nodes) < 0.3
    weights[axis_aligned] *= np.arange(p) == rng.integers(0, p, (axis_aligned.sum(), 1))
    through = x[rng.integers(0, len(x), nodes)]
    bias = -np.einsum("np,np->n", weights.astype(np.float64), through).astype(np.float32)
    tree = ObliqueTree(jnp.asarray(weights), jnp.asarray(bias), Constant(jnp.arange(nodes + 1, dtype=jnp.float32)))
    expected = tree.leaf_index(x)
    assert len(np.unique(expected)) > nodes // 4
    np.testing.assert_array_equal(tree.predict(x), expected)
    for write, file in ((export.to_c, "tree.h"), (export.to_numpy, "tree.py"), (export.to_onnx, "tree.onnx")):
        write(tree, tmp_path / file)
    leaves, _, wrong = called(compiled(tmp_path / "tree.h", "jtrees"), tree, x)
    session = onnxruntime.InferenceSession(tmp_path / "tree.onnx", providers=["CPUExecutionProvider"])
    found = {
        "C": leaves[:, 0],
        "NumPy": runpy.run_path(str(tmp_path / "tree.py"))["leaf"](x),
        "ONNX": session.run(["leaf"], {"x": np.float64(x)})[0],
    }
    assert {where: int((leaf != expected).sum()) for where, leaf in found.items()} == dict.fromkeys(found, 0)
    assert wrong == 0
