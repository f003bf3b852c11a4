"""Exported files against the model: the same leaf for every row, and the same predictions."""

import ctypes
import functools
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import nasty
import numpy as np
import onnxruntime
import pandas as pd
import pytest
import sweeps

import jtrees
from jtrees import Forest, ObliqueTree, Origin, export, losses
from jtrees.export import c_header, encoding
from jtrees.export.program import program_of
from jtrees.leaves import Linear, Values

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
REALS = {"double": np.float64, "float": np.float32}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def drawn(kind, depth=3, p=5, seed=0, origin=False):
    """A tree with leaves of a kind, and samples, some of them on a split."""
    rng = np.random.default_rng(seed)
    tree, x = nasty.near_ties(depth, p, seed, n=400)
    count = 2**depth
    f32 = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32))
    leaves = {
        "constant": lambda: Values(f32(count)),
        "outputs": lambda: Values(f32(count, 3)),
        "frequency": lambda: Values(jnp.asarray(rng.dirichlet(np.ones(4), count), jnp.float32), losses.Frequencies()),
        "logit": lambda: Values(f32(count, 3), losses.LogLoss()),
        "linear": lambda: Linear(f32(count, p), f32(count)),
        "bounded": lambda: Linear(f32(count, p), f32(count), -jnp.ones(count), jnp.ones(count)),
        "linear outputs": lambda: Linear(f32(count, p, 2), f32(count, 2)),
        "counts": lambda: Values(2 * f32(count), losses.Poisson()),
        "quantiles": lambda: Values(f32(count, 3), losses.Quantile((0.1, 0.5, 0.9))),
        "actions": lambda: Values(1e4 * jax.nn.one_hot(f32(count, 3).argmax(1), 3), losses.Rewards()),
    }[kind]()
    y = (
        None
        if kind in ("frequency", "logit", "counts", "actions")
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
    "exp": lambda: forest_of("constant", "sum", "exp"),
    "sorted": lambda: forest_of("outputs", "sum", "sorted"),
    "counts": lambda: drawn("counts", origin=True),
    "quantiles": lambda: drawn("quantiles", origin=True),
    "mean of actions": lambda: forest_of("actions"),
}
# A kind of leaves, or of forests, each once.
FEW = ("outputs", "logit, depth 1", "linear", "bounded", "sum", "votes", "softmax", "quantiles")
# In C their leaves are those of constants.
IN_C = [pytest.param(name, marks=pytest.mark.slow) if name in list(MODELS)[-3:] else name for name in MODELS]


def leaves_of(model, x):
    """The leaf of each row by the library, ``(n, trees)``."""
    trees = [model] if isinstance(model, ObliqueTree) else list(model)
    return np.stack([tree.leaf_index(x) for tree in trees], axis=1)


def compiled(path, prefix, precision="double", flags=()):
    """A header as a library: functions of an array of rows."""
    source = path.with_suffix(".c")
    body = f"""#include "{path.name}"
    int rows_leaf(int tree, const {precision} *x, int n, int *out) {{
      for (int i = 0; i < n; i++) out[i] = {prefix}_leaf(tree, x + i * {prefix.upper()}_COLUMNS);
      return {prefix}_selftest();
    }}
    void rows_predict(const {precision} *x, int n, {precision} *out) {{
      for (; n--; x += {prefix.upper()}_COLUMNS, out += {prefix.upper()}_OUTPUTS) {prefix}_predict(x, out);
    }}
    void all_rows(const {precision} *x, long n, {precision} *out) {{ {prefix}_predict_rows(x, n, out); }}"""
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
    for rows in (len(x), 37, 1, 0):  # whole blocks and parts of one
        together = np.full((len(x), out.shape[1]), 7, out.dtype)
        library.all_rows(pointer(x), ctypes.c_long(rows), pointer(together))
        np.testing.assert_array_equal(together[:rows], out[:rows], strict=True)
        assert np.all(together[rows:] == 7)
    return np.stack(leaves, axis=1), out, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", sweeps.quick(MODELS, FEW))
def test_the_arrays_of_a_model_are_the_model(name):
    model, x = MODELS[name]()
    program = program_of(model)
    np.testing.assert_array_equal(program.leaf(x), leaves_of(model, x))
    predicted = model.predict(x)
    assert program.scalar == (predicted.ndim == 1)
    # The library adds in single precision, linear leaves terms of about 1000.
    np.testing.assert_allclose(program.predict(x).reshape(predicted.shape), predicted, rtol=2e-4, atol=2e-4)


@needs_compiler
@pytest.mark.parametrize("name", IN_C)
def test_c(name, tmp_path):
    model, x = MODELS[name]()
    export.to_c(model, tmp_path / "model.h", prefix="my_tree")
    leaf, out, wrong = called(compiled(tmp_path / "model.h", "my_tree"), model, x)
    assert wrong == 0
    np.testing.assert_array_equal(leaf, leaves_of(model, x))
    np.testing.assert_allclose(out, program_of(model).predict(x), rtol=1e-12, atol=1e-12)


@needs_compiler
def test_exponentials_in_c(tmp_path):
    """Of all numbers in double precision that have one within its range, and beyond it."""
    x = np.concatenate([np.linspace(-708, 709, 20_001), np.random.default_rng(0).normal(size=20_000), [0.0, -0.0]])
    tree = ObliqueTree(jnp.zeros((1, 1)), jnp.zeros(1), Values(jnp.zeros(2)))
    export.to_c(Forest(jax.tree.map(lambda a: a[None], tree), "sum", "exp"), tmp_path / "model.h")
    source = """#include "model.h"
    double exponential(double v) { return jtrees_exp(v); }"""
    (tmp_path / "exp.c").write_text(source)
    subprocess.run([COMPILER, "-std=c99", "-O2", "-shared", "-fPIC", tmp_path / "exp.c", "-o", tmp_path / "exp.so"])
    exponential = ctypes.CDLL(str(tmp_path / "exp.so")).exponential
    exponential.argtypes, exponential.restype = [ctypes.c_double], ctypes.c_double
    found = np.array([exponential(v) for v in x])
    exactly = np.exp(x.astype(np.longdouble))
    assert np.abs(found / exactly - 1).max() < 1e-15
    assert [exponential(v) for v in (-800, -np.inf, 800, np.inf)] == [0, 0, np.inf, np.inf]
    assert np.isnan(exponential(np.nan))


def compiled_rows(path, row="double", real="double"):
    """A header as a library: ``one``, predictions row by row, ``many``, those of all rows, and ``wrong``."""
    source, library = path.with_suffix(".c"), path.with_suffix(".so")
    step = "JTREES_COLUMNS" if row != "jtrees_row" else "1"
    source.write_text(f"""#include "{path.name}"
    void one(const {row} *x, long n, {real} *out) {{
      for (; n--; x += {step}, out += JTREES_OUTPUTS) jtrees_predict(x, out);
    }}
    void many(const {row} *x, long n, {real} *out) {{ jtrees_predict_rows(x, n, out); }}
    int wrong(void) {{ return jtrees_selftest(); }}""")
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-pedantic", "-O2"]
    subprocess.run([COMPILER, *strict, "-shared", "-fPIC", source, "-o", library], check=True)
    functions = ctypes.CDLL(str(library))

    def predictions(x, outputs, dtype=np.float64):
        both = []
        for function in (functions.one, functions.many):
            out = np.empty((len(x), outputs), dtype)
            function(x.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(len(x)), out.ctypes.data_as(ctypes.c_void_p))
            both.append(out)
        np.testing.assert_array_equal(*both)
        assert functions.wrong() == 0
        return both[0]

    return predictions


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


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("power", "flags"),
    [*((power, ()) for power in (-110, -61, 0, 62, 110)), (0, ("-O3", "-march=native")), (0, ("-O1", "-U__GNUC__"))],
)
def test_single_precision_decides_in_c_only_what_it_can(power, flags, tmp_path):
    """Splits and features of many sizes, whose squares underflow or overflow, and rows close to splits, or without
    numbers.
    """
    tree, x = drawn("constant", depth=4, p=6)
    size = np.float32(2.0) ** power
    for name, scaled, rows in (
        ("splits", tree.replace(weights=tree.weights * size, bias=tree.bias * size), x),
        ("features", tree.replace(weights=tree.weights / size), x * np.float64(size)),
    ):
        rows = rows.astype(np.float32).astype(np.float64)
        rows[:4, 0] = np.nan, np.inf, -np.inf, 3e38
        export.to_c(scaled, tmp_path / f"{name}.h")
        leaf, _, wrong = called(compiled(tmp_path / f"{name}.h", "jtrees", flags=flags), scaled, rows)
        assert wrong == 0
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(leaf, program_of(scaled).leaf(rows))


def test_few_rows_near_a_split_are_computed_twice_in_c():
    tree, x = drawn("constant", depth=4, p=21)
    reach, bounded = c_header._reach(program_of(tree), 24)
    assert bounded
    x = np.random.default_rng(0).normal(size=(2000, 21)).astype(np.float32)
    exactly = np.float64(tree.weights) @ x.T.astype(np.float64) + np.float64(tree.bias)[:, None]
    score = np.asarray(tree.weights) @ x.T + np.asarray(tree.bias)[:, None]  # single precision, added in another order
    bound = np.sqrt(reach[0][:, None] * (1 + np.square(x).sum(1)))
    assert np.all(np.abs(score - exactly) < bound) and np.mean(np.abs(score) < bound) < 1e-4


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "constant, far from zero",
        "frequency, depth 8",
        "linear outputs",
        "bounded",
        "softmax",
        "exp",
        "sorted",
        "counts",
    ],
)
def test_stablehlo(name, tmp_path):
    model, x = MODELS[name]()
    path = tmp_path / "model.stablehlo"
    export.to_stablehlo(model, path)
    with jax.enable_x64(True):
        program = jax.export.deserialize(bytearray(path.read_bytes()))
        for rows in (x, x[:7])[: 2 if name == "bounded" else 1]:  # any number of rows, each a compilation
            predicted, leaf = jax.device_get(program.call(np.float64(rows)))
            expected = leaves_of(model, rows)
            np.testing.assert_array_equal(leaf, expected[:, 0] if isinstance(model, ObliqueTree) else expected)
            assert predicted.shape == model.predict(rows).shape and leaf.dtype == np.int32
            np.testing.assert_allclose(
                predicted, program_of(model).predict(rows).reshape(predicted.shape), rtol=1e-12, atol=1e-12
            )


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("recipe", "trees"),
    [
        (jtrees.TEL(trees=2, depth=3, epochs=2), 2),
        pytest.param(jtrees.LatentTree(depth=2, epochs=2), None, marks=pytest.mark.wide),
        pytest.param(jtrees.TEL(trees=2, depth=3, epochs=2), None, marks=pytest.mark.wide),
        (jtrees.LatentTree(depth=2, epochs=2), 2),
    ],
)
def test_stablehlo_of_soft_models(recipe, trees, tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 4)) + 100
    y = np.arange(60) % 3 if trees else x[:, 0] * 1e3
    recipe = recipe if trees is None else jtrees.Bagged(recipe, trees=trees, combine="mean")
    options = {"task": "classification"} if trees else {}
    model = jtrees.fit(recipe, x, y, key=jax.random.key(0), **options).model
    export.to_stablehlo(model, tmp_path / "model.stablehlo")
    with jax.enable_x64(True):
        program = jax.export.deserialize(bytearray((tmp_path / "model.stablehlo").read_bytes()))
        for rows in (x, x[:7]):
            predicted, expected = np.asarray(program.call(rows)), model.predict(rows)
            assert predicted.shape == expected.shape and predicted.dtype == np.float64
            np.testing.assert_allclose(predicted, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="model must be a fitted model, got int"):
        export.to_stablehlo(3, tmp_path / "model.stablehlo")


@pytest.mark.parametrize("name", sweeps.quick(MODELS, FEW))
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


# Recipes, tasks and targets; of the signal and noise of each row.
FITTED = {
    "boosted counts": ("boosted", "poisson", lambda z, noise: noise.poisson(np.exp(z))),
    "boosted quantiles": (
        "boosted",
        losses.Quantile((0.1, 0.5, 0.9)),
        lambda z, noise: 1e4 + z + noise.normal(size=300),
    ),
    "boosted classes": ("boosted", jtrees.Classification(3), lambda z, _: np.digitize(z, [-0.5, 0.5])),
    "counts": ("tree", "poisson", lambda z, noise: noise.poisson(np.exp(z))),
    "quantiles": ("tree", losses.Quantile((0.1, 0.5, 0.9)), lambda z, noise: 1e4 + z + noise.normal(size=300)),
    "policy": ("tree", jtrees.Policy(3), lambda z, _: np.stack([z, -z, 0.5 - z * z], axis=1)),
}


@functools.cache
def fitted(name):
    """A model of a loss with a link, fitted far from the origin, and other rows."""
    kind, loss, targets = FITTED[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3)) * [1, 50, 1e-3] + [0, 1e4, 2]
    task = loss if isinstance(loss, jtrees.Policy | jtrees.Classification) else jtrees.Regression(loss_function=loss)
    tree = jtrees.GET(depth=3, starts=2, epochs=10)
    recipe = jtrees.Boosted(tree, rounds=4, patience=None) if kind == "boosted" else tree
    y = targets(x[:300, 0] + (x[:300, 1] - 1e4) / 50, rng)
    return jtrees.fit(recipe, x[:300], y, task=task, key=jax.random.key(0)).model, x


@needs_compiler
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("form", sweeps.slow(["C", "NumPy", "ONNX", "StableHLO"], ["C"]))
@pytest.mark.parametrize("name", sweeps.slow(FITTED, ["quantiles"]))
def test_fitted_models_of_losses_with_links(name, form, tmp_path):
    model, x = fitted(name)
    predicted, expected = model.predict(x), leaves_of(model, x)
    path = tmp_path / {"C": "model.h", "NumPy": "model.py", "ONNX": "model.onnx", "StableHLO": "model.hlo"}[form]
    if form == "C":
        export.to_c(model, path)
        leaf, out, wrong = called(compiled(path, "jtrees"), model, x)
        assert wrong == 0
    elif form == "NumPy":
        export.to_numpy(model, path)
        written = runpy.run_path(str(path), run_name="__main__")
        leaf, out = written["leaf"](x), written["predict"](x)
    elif form == "ONNX":
        export.to_onnx(model, path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        out, leaf = session.run(["prediction", "leaf"], {"x": x})
    else:
        export.to_stablehlo(model, path)
        with jax.enable_x64(True):
            out, leaf = jax.device_get(jax.export.deserialize(bytearray(path.read_bytes())).call(x))
    np.testing.assert_array_equal(leaf.reshape(expected.shape), expected)
    np.testing.assert_allclose(out, program_of(model).predict(x).reshape(out.shape), rtol=1e-12, atol=1e-12)
    # The library adds up in single precision.
    np.testing.assert_allclose(out.reshape(predicted.shape), predicted, rtol=1e-5, atol=1e-6)
    assert len(np.unique(predicted)) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_what_cannot_be_exported(tmp_path):
    tree, x = drawn("linear")
    path = tmp_path / "model"
    path.write_text("before")
    made = lambda recipe: jtrees.fit(recipe, x, x[:, 0], key=jax.random.key(0)).model
    soft, latent = made(jtrees.TEL(trees=2, depth=2, epochs=1)), made(jtrees.LatentTree(depth=2, epochs=1))
    many = jax.tree.map(lambda a: jnp.stack([a, a]), tree)
    raw = jtrees.tables.FrameModel(tree, jtrees.tables.TableEncoder.fit(x)[0])
    trees_alone = r"model must be an ObliqueTree or a Forest of them \(to_stablehlo takes all others\), got"
    others = {export.to_stablehlo: []}
    trees_only = (export.to_c, export.to_numpy, export.to_onnx, export.to_sql, export.to_javascript)
    for write in (*trees_only, export.to_stablehlo):
        for model, message in (
            *((other, f"{trees_alone} {type(other).__name__}") for other in others.get(write, [soft, latent])),
            (many, rf"{trees_alone} ObliqueTree of shape \(2, 7, 5\)"),
            (tree.replace(weights=np.float64(tree.weights)), "model must have float32 weights, got float64"),
            (Forest(many, "vote"), "trees with linear leaves cannot vote"),
        ):
            with pytest.raises(ValueError, match=message):
                write(model, path)
        with pytest.raises(OSError):
            write(tree, tmp_path / "missing" / "model")
    with pytest.raises(
        ValueError, match="StableHLO has no text, got a model of a raw table: use to_c, to_numpy or to_onnx"
    ):
        export.to_stablehlo(raw, path)
    column = jtrees.tables.TableEncoder.fit(pd.DataFrame({"leaf": x[:, 0]}))[0]
    with pytest.raises(
        ValueError, match="columns must not be called 'prediction' or 'leaf', the names of the outputs, got 'leaf'"
    ):
        export.to_onnx(jtrees.tables.FrameModel(drawn("linear", p=1)[0], column), path)
    with pytest.raises(ValueError, match="prefix must be a name in C, got '2nd'"):
        export.to_c(tree, path, prefix="2nd")
    with pytest.raises(ValueError, match="precision must be"):
        export.to_c(tree, path, precision="half")
    assert path.read_text() == "before" and [file.name for file in tmp_path.iterdir()] == ["model"]


SETS = ("abalone", "ailerons", "breast-cancer-wisconsin", "connect-4", "cpu-act", "dna", "spambase")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("name", "gaps"), [(name, False) for name in SETS] + [(name, True) for name in SETS[::3]])
def test_every_row_of_real_data_reaches_the_same_leaf_everywhere(name, gaps, data_dir, tmp_path):
    """Every split passes through a row of the table, and single precision sends some rows elsewhere."""
    rng = np.random.default_rng(0)
    with np.load(data_dir / f"{name}.npz") as arrays:
        x = given = arrays["X"].astype(np.float32)[:10_000]
    if gaps:
        given = np.where(rng.random(x.shape) < 0.1, np.nan, x.astype(np.float64))
        columns, x = jtrees.tables.TableEncoder.fit(given)
        x = x.astype(np.float32)
    depth, p = 6, x.shape[1]
    nodes = 2**depth - 1
    spread = x.std(0)
    weights = (rng.normal(size=(nodes, p)) / np.where(spread > 0, spread, 1)).astype(np.float32)
    axis_aligned = rng.random(nodes) < 0.3
    weights[axis_aligned] *= np.arange(p) == rng.integers(0, p, (axis_aligned.sum(), 1))
    through = x[rng.integers(0, len(x), nodes)]
    bias = -np.einsum("np,np->n", weights.astype(np.float64), through).astype(np.float32)
    tree = ObliqueTree(jnp.asarray(weights), jnp.asarray(bias), Values(jnp.arange(nodes + 1, dtype=jnp.float32)))
    if gaps:
        tree, x = jtrees.tables.FrameModel(tree, columns), given
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


# --- Models of raw tables --------------------------------------------------------------------------------------------


def raw_table(n=400, seed=0, other=False):
    """Columns of all kinds under awkward names, with gaps; ``other``: with levels and gaps that others do not have."""
    rng = np.random.default_rng(seed)
    gaps = lambda values, share=0.1: [None if rng.random() < share else value for value in values]
    days = np.datetime64("1969-06-01") + rng.integers(0, 1500, n)
    frame = pd.DataFrame(
        {
            "living area": np.array(gaps(rng.normal(70, 20, n)), float),
            "living-area": np.array(gaps(rng.normal(0, 1e4, n), 0.1 * other), float),
            "int": rng.integers(0, 9, n) + rng.random(n),
            'heating "$x"': gaps(rng.choice(["gas */", "oil\n", "öl", "@LEAF@", *(["coal"] * other)], n)),
            "city": gaps([f"city {i}" for i in rng.integers(0, 14 + 4 * other, n)]),
            "sold": pd.to_datetime(pd.Series(gaps(days.tolist()))),
            "new": pd.Series(gaps((rng.random(n) < 0.3).tolist()), dtype="boolean"),
            "same": 1.0,
        }
    )
    month = frame["sold"].dt.month.fillna(6).to_numpy()
    weekday = frame["sold"].dt.day_of_week.fillna(6).to_numpy()
    y = (month > 6) + (weekday > 4) + 0.01 * frame["living area"].fillna(0).to_numpy()
    return frame, y


def raw_model(kind="linear", trees=None):
    """A random tree of the raw table, or a forest, with splits through rows of the table, and other rows."""
    frame, y = raw_table()
    columns, features = jtrees.tables.TableEncoder.fit(frame, y)
    assert set(columns.encodings["sold"].lookups) == {"month", "weekday"}
    x = features.astype(np.float32)
    made = []
    for seed in range(trees or 1):
        rng = np.random.default_rng(seed)
        tree, _ = drawn(kind, p=x.shape[1], depth=4, seed=seed)
        weights = np.float32(np.asarray(tree.weights) / np.where(x.std(0) > 0, x.std(0), 1))
        through = x[rng.integers(0, len(x), 15)].astype(np.float64)
        bias = np.float32(-np.einsum("np,np->n", weights.astype(np.float64), through))
        made.append(tree.replace(weights=jnp.asarray(weights), bias=jnp.asarray(bias)))
    model = made[0] if trees is None else Forest(jax.tree.map(lambda *a: jnp.stack(a), *made))
    return jtrees.tables.FrameModel(model, columns), raw_table(seed=1, other=True)[0]


def expected_of(model, frame):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jtrees.tables.ColumnsWarning)
        features = model.encoder.transform(frame)
    program = program_of(model)
    return program.leaf(features), program.predict(features)


def rows_in_c(model, frame, path):
    """A table as an array of the structs that a header declares."""
    fields, table = encoding.fields_of(model.encoder), jtrees.tables.read_frame(frame)
    members = re.findall(r"^  (?:int|double) (\w+);", path.read_text(), re.MULTILINE)
    kinds = [np.int32 if field.kind == "text" else np.float64 for field in fields]
    rows = np.zeros(len(frame), np.dtype(list(zip(members, kinds, strict=True)), align=True))
    for field, member in zip(fields, members, strict=True):
        raw = table.columns[field.name]
        rows[member] = encoding.codes_of(field, raw) if field.kind == "text" else raw.values
    return rows


@needs_compiler
@pytest.mark.parametrize("trees", [None, 2])
def test_c_of_a_raw_table(trees, tmp_path):
    model, frame = raw_model(trees=trees)
    path = tmp_path / "model.h"
    export.to_c(model, path)
    fields = encoding.fields_of(model.encoder)
    assert "same" not in [field.name for field in fields]
    rows = rows_in_c(model, frame, path)
    assert rows.dtype.names[:4] == ("living_area", "living_area_2", "int_2", "heating___x_")
    source = tmp_path / "rows.c"
    tree = "" if trees is None else "tree, "
    source.write_text(f"""#include "model.h"
    int rows(int tree, const jtrees_row *x, int n, int *leaf, double *out) {{
      for (int i = 0; i < n; i++) {{
        leaf[i] = jtrees_leaf({tree}x + i);
        jtrees_predict(x + i, out + i);
      }}
      return jtrees_selftest();
    }}
    void all_rows(const jtrees_row *x, long n, double *out) {{ jtrees_predict_rows(x, n, out); }}
    int level(const char *text) {{ return jtrees_heating___x__of(text); }}""")
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-pedantic", "-O2"]
    subprocess.run([COMPILER, *strict, "-shared", "-fPIC", source, "-o", tmp_path / "rows.so"], check=True)
    library = ctypes.CDLL(str(tmp_path / "rows.so"))
    leaves, predictions = expected_of(model, frame)
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
    for tree in range(leaves.shape[1]):
        leaf, out = np.empty(len(rows), np.int32), np.empty(len(rows))
        assert library.rows(tree, pointer(rows), len(rows), pointer(leaf), pointer(out)) == 0
        np.testing.assert_array_equal(leaf, leaves[:, tree])
    np.testing.assert_allclose(out, predictions[:, 0], rtol=1e-12, atol=1e-12)
    together = np.empty_like(out)
    library.all_rows(pointer(rows), ctypes.c_long(len(rows)), pointer(together))
    np.testing.assert_array_equal(together, out)
    heating = fields[3]
    texts = [*heating.levels, "coal", "", None]
    found = [library.level(None if text is None else text.encode()) for text in texts]
    assert found == [0, 1, 2, 3, 4, 4, 5]


def test_numpy_of_a_raw_table(tmp_path):
    model, frame = raw_model()
    path = tmp_path / "model.py"
    export.to_numpy(model, path)
    written = runpy.run_path(str(path), run_name="__main__")  # tests itself
    leaves, predictions = expected_of(model, frame)
    for table in (frame, frame.astype(object), {name: column.tolist() for name, column in frame.items()}):
        np.testing.assert_array_equal(written["leaf"](table), leaves[:, 0])
        np.testing.assert_allclose(written["predict"](table), predictions[:, 0], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="x must have a column 'city'"):
        written["predict"](frame.drop(columns="city"))


def test_onnx_of_a_raw_table(tmp_path):
    model, frame = raw_model(trees=2)
    path = tmp_path / "model.onnx"
    export.to_onnx(model, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    table = jtrees.tables.read_frame(frame)
    inputs = {}
    for field in encoding.fields_of(model.encoder):
        raw = table.columns[field.name]
        text = field.kind == "text"
        inputs[field.name] = np.where(raw.missing, "", raw.values).astype(object) if text else raw.values
    assert {one.name for one in session.get_inputs()} == set(inputs)
    predicted, leaf = session.run(["prediction", "leaf"], inputs)
    leaves, predictions = expected_of(model, frame)
    np.testing.assert_array_equal(leaf, leaves)
    np.testing.assert_allclose(predicted, predictions[:, 0], rtol=1e-12, atol=1e-12)


@needs_compiler
def test_arrays_with_missing_values(tmp_path):
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(300), rng.normal(size=(300, 3))])
    x[rng.random(x.shape) < 0.2 * np.array([0, 1, 1, 0])] = np.nan
    columns, features = jtrees.tables.TableEncoder.fit(x)
    model = jtrees.tables.FrameModel(drawn("bounded", p=features.shape[1])[0], columns)
    leaves, predictions = expected_of(model, x)
    export.to_c(model, tmp_path / "model.h", precision="float")
    body = """#include "model.h"
    int rows(const double *x, int n, int *leaf, float *out) {
      for (int i = 0; i < n; i++) {
        leaf[i] = jtrees_leaf(x + 4 * i);
        jtrees_predict(x + 4 * i, out + i);
      }
      return jtrees_selftest();
    }"""
    (tmp_path / "rows.c").write_text(body)
    subprocess.run(
        [COMPILER, "-std=c99", "-shared", "-fPIC", tmp_path / "rows.c", "-o", tmp_path / "rows.so"], check=True
    )
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
    leaf, out = np.empty(len(x), np.int32), np.empty(len(x), np.float32)
    assert ctypes.CDLL(str(tmp_path / "rows.so")).rows(pointer(x), len(x), pointer(leaf), pointer(out)) == 0
    np.testing.assert_array_equal(leaf, leaves[:, 0])
    np.testing.assert_allclose(out, predictions[:, 0], rtol=1e-6, atol=1e-6)
    export.to_numpy(model, tmp_path / "model.py")
    written = runpy.run_path(str(tmp_path / "model.py"), run_name="__main__")
    np.testing.assert_array_equal(written["leaf"](x), leaves[:, 0])
    with pytest.raises(ValueError, match=r"x must have shape \(n, 4\)"):
        written["leaf"](x[:, :3])
    export.to_onnx(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(["leaf"], {"x": x})[0], leaves[:, 0])


@needs_compiler
def test_a_compiler_that_ignores_nan_refuses_a_header_that_reads_it(tmp_path):
    """The header of a model that never reads NaN compiles with the same option."""
    columns, features = jtrees.tables.TableEncoder.fit(np.array([[1.0, np.nan], [2.0, 3.0], [4.0, 5.0]]))
    tree = drawn("constant", p=features.shape[1])[0]
    export.to_c(jtrees.tables.FrameModel(tree, columns), tmp_path / "gaps.h")
    export.to_c(tree, tmp_path / "numbers.h")
    for name, option, refused in (
        ("gaps.h", "-ffast-math", True),
        ("gaps.h", "-ffinite-math-only", True),
        ("gaps.h", "-O2", False),
        ("numbers.h", "-ffast-math", False),
    ):
        command = [COMPILER, "-std=c99", option, "-x", "c", "-fsyntax-only", tmp_path / name]
        made = subprocess.run(command, capture_output=True, text=True)
        assert (made.returncode != 0) == refused and ("NaN is a missing value here" in made.stderr) == refused


def test_onnx_says_which_text_it_takes(tmp_path):
    model, _ = raw_model()
    export.to_onnx(model, tmp_path / "text.onnx")
    export.to_onnx(drawn("constant", p=3)[0], tmp_path / "numbers.onnx")
    texts = []
    for name in ("text.onnx", "numbers.onnx"):
        session = onnxruntime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"])
        texts.append(session.get_modelmeta().custom_metadata_map)
    assert "canonical text of a level" in texts[0]["text"] and "1, not 1.0" in texts[0]["text"] and not texts[1]


def test_months_and_weekdays_of_three_thousand_years(tmp_path):
    """The calendar of the C header and of the ONNX model is that of NumPy."""
    days = np.concatenate([np.arange(-600_000, 500_000, 17), np.arange(-1500, 1500)])
    frame = pd.DataFrame({"day": days.astype("datetime64[D]").astype("datetime64[ms]")})
    months = days.astype("datetime64[D]").astype("datetime64[M]").astype(int) % 12
    check_dates(frame, 3.0 * months + 50.0 * ((days + 3) % 7 == 2), {"month", "weekday"}, np.float64(days), tmp_path)


def test_hours_and_minutes(tmp_path):
    """The times of day of all files are those of NumPy, also just before and after midnight and before 1970."""
    rng = np.random.default_rng(0)
    milliseconds = rng.integers(-(10**12), 10**12, 4000)
    milliseconds[:1000] += -milliseconds[:1000] % 86_400_000 - rng.integers(0, 2, 1000)
    milliseconds[1000:2000] -= milliseconds[1000:2000] % 60_000
    frame = pd.DataFrame({"day": milliseconds.astype("datetime64[ms]")})
    hours, minutes = frame["day"].dt.hour.to_numpy(), frame["day"].dt.minute.to_numpy()
    parts = {"month", "weekday", "hour", "minute"}
    encoder = check_dates(frame, 3.0 * hours + 50.0 * (minutes >= 30), parts, milliseconds / 86_400_000, tmp_path)
    means = dict(zip(encoder.feature_names, encoder.transform(frame).T, strict=True))
    assert np.corrcoef(means["[mean y by day hour]"], hours)[0, 1] > 0.9
    assert np.corrcoef(means["[mean y by day minute]"], minutes >= 30)[0, 1] > 0.9
    assert {"hour", "minute"}.isdisjoint(
        jtrees.tables.TableEncoder.fit(frame.assign(day=frame["day"].dt.floor("D")), hours)[0].encodings["day"].lookups
    )


@pytest.mark.parametrize("zone", [None, "Europe/Berlin", "America/Sao_Paulo", "offsets"])
def test_a_file_of_numpy_with_times_tests_itself(zone, tmp_path):
    rng = np.random.default_rng(0)
    times = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 288_000, 300), unit="min")
    y = (times.hour >= 12) * 2.0 + (times.minute >= 30)
    if zone == "offsets":
        times = [f"{time.isoformat()}+0{hour}:00" for time, hour in zip(times, rng.integers(0, 9, 300), strict=True)]
    elif zone is not None:
        times = times.tz_localize("UTC").tz_convert(zone)
    frame = pd.DataFrame({"when": times, "z": rng.normal(size=300)})
    encoder, features = jtrees.tables.TableEncoder.fit(frame, np.asarray(y))
    assert "hour" in encoder.encodings["when"].lookups
    weights = rng.normal(size=(1, features.shape[1])) / np.where(features.std(0) > 0, features.std(0), 1)
    bias = -(features @ weights[0]).mean(keepdims=True)
    tree = ObliqueTree(np.float32(weights), np.float32(bias), jtrees.leaves.Values(np.array([0.0, 1.0])))
    model = jtrees.tables.FrameModel(tree, encoder)
    export.to_numpy(model, tmp_path / "model.py")
    subprocess.run([sys.executable, tmp_path / "model.py"], check=True)
    exported = runpy.run_path(str(tmp_path / "model.py"))["predict"]
    np.testing.assert_array_equal(exported(frame), model.predict(frame))


def check_dates(frame, y, parts, days, tmp_path):
    """The files predict as Python for a column of dates; returns its encoder. ``days`` are the days since 1970."""
    columns, features = jtrees.tables.TableEncoder.fit(frame, y)
    assert parts == set(columns.encodings["day"].lookups)
    leaves = Linear(jnp.ones((2, features.shape[1])), jnp.zeros(2))
    tree = ObliqueTree(jnp.zeros((1, features.shape[1])), -jnp.ones(1), leaves)
    model = jtrees.tables.FrameModel(tree, columns)
    expected = program_of(model).predict(columns.transform(frame))[:, 0]
    export.to_onnx(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["prediction"], {"day": days})[0], expected, rtol=1e-12)
    export.to_numpy(model, tmp_path / "model.py")
    exported = runpy.run_path(str(tmp_path / "model.py"))["predict"]
    np.testing.assert_allclose(exported(frame), expected, rtol=1e-12)
    if COMPILER is None:
        return columns
    export.to_c(model, tmp_path / "model.h")
    body = """#include "model.h"
    void rows(const jtrees_row *x, int n, double *out) {
      for (int i = 0; i < n; i++) jtrees_predict(x + i, out + i);
    }"""
    (tmp_path / "rows.c").write_text(body)
    subprocess.run(
        [COMPILER, "-std=c99", "-shared", "-fPIC", tmp_path / "rows.c", "-o", tmp_path / "rows.so"], check=True
    )
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
    out = np.empty(len(days))
    ctypes.CDLL(str(tmp_path / "rows.so")).rows(pointer(days), len(days), pointer(out))
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    return columns
