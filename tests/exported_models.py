"""Models to export, and each kind of exported file as a function of a model and its rows."""

import ctypes
import functools
import itertools
import json
import re
import runpy
import sqlite3
import subprocess
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pandas as pd
import pytest

import jtrees
from jtrees import Forest, ObliqueTree, Origin, export, losses
from jtrees.export.program import fields_of, program_of
from jtrees.leaves import Linear, Values
from jtrees.tables import FrameModel, TableEncoder
from jtrees.tables.frame import level_codes
from tests import nasty, recipes
from tests.needs import COMPILER, NODE, needs_compiler, needs_node


def random_tree(kind, depth=3, p=5, seed=0, origin=False):
    """A tree with leaves of a kind, and samples, many of which lie on a split except for rounding."""
    rng = np.random.default_rng(seed)
    tree, x = nasty.near_ties(depth, p, seed, n=400)
    count = 2**depth
    f32 = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32))
    leaves = {
        "constant": lambda: Values(f32(count)),
        "outputs": lambda: Values(f32(count, 3)),
        "frequency": lambda: Values(np.float32(rng.dirichlet(np.ones(4), count)), losses.Frequencies()),
        "logit": lambda: Values(f32(count, 3), losses.LogLoss()),
        "linear": lambda: Linear(f32(count, p), f32(count)),
        "bounded": lambda: Linear(f32(count, p), f32(count), -jnp.ones(count), jnp.ones(count)),
        "linear outputs": lambda: Linear(f32(count, p, 2), f32(count, 2)),
        "counts": lambda: Values(2 * f32(count), losses.Poisson()),
        "quantiles": lambda: Values(f32(count, 3), losses.Quantile((0.1, 0.5, 0.9))),
        "actions": lambda: Values(1e4 * jax.nn.one_hot(f32(count, 3).argmax(1), 3), losses.Rewards()),
    }[kind]()
    if not origin:
        return tree.replace(leaves=leaves), x
    outputs = leaves.at(jnp.zeros(1, int), x[:1]).shape[1:]
    y = None if kind in ("frequency", "logit", "counts", "actions") else f32(*outputs)
    zero = np.float32(rng.integers(-5000, 5000, p))
    return tree.replace(leaves=leaves, origin=Origin(zero, y)), x + np.float64(zero)


def stacked(trees, *options):
    return Forest(jax.tree.map(lambda *a: jnp.stack(a), *trees), *options)


def random_forest(kind, *options):
    trees, x = zip(*(random_tree(kind, seed=seed) for seed in range(3)), strict=True)
    return stacked(trees, *options), np.concatenate(x)


def tree_of_whole_numbers():
    """Many scores are exactly 0, which is left."""
    rng = np.random.default_rng(0)
    ints = lambda *shape: rng.integers(-2, 3, shape).astype(np.float32)
    return ObliqueTree(ints(7, 4), ints(7), Values(np.arange(8, dtype=np.float32))), ints(400, 4)


MODELS = {
    "whole numbers": tree_of_whole_numbers,
    "constant": lambda: random_tree("constant"),
    "constant, far from zero": lambda: random_tree("constant", origin=True),
    "outputs": lambda: random_tree("outputs", origin=True),
    "frequency, depth 8": lambda: random_tree("frequency", depth=8),
    "logit, depth 1": lambda: random_tree("logit", depth=1, p=2),
    "linear": lambda: random_tree("linear", p=7, origin=True),
    "bounded": lambda: random_tree("bounded", p=1),
    "linear outputs": lambda: random_tree("linear outputs", depth=4, p=6),
    "forest": lambda: random_forest("linear"),
    "sum": lambda: random_forest("constant", "sum"),
    "votes": lambda: random_forest("frequency", "vote"),
    "softmax": lambda: random_forest("outputs", "sum", "softmax"),
    "exp": lambda: random_forest("constant", "sum", "exp"),
    "sorted": lambda: random_forest("outputs", "sum", "sorted"),
    "counts": lambda: random_tree("counts", origin=True),
    "quantiles": lambda: random_tree("quantiles", origin=True),
    "mean of actions": lambda: random_forest("actions"),
}
# Scores of 0, an origin, each kind of leaves, votes and links.
FEW = ("whole numbers", "linear", "bounded", "votes", "softmax", "sorted")
SLOW = ("outputs", "frequency, depth 8", "forest", "exp", "quantiles")  # in slow tests


def raw_table(n=400, seed=0, other=False):
    """Columns of all kinds under awkward names, with gaps; ``other``: also with unseen levels and gaps."""
    rng = np.random.default_rng(seed)
    gaps = lambda values, share=0.1: [None if rng.random() < share else value for value in values]
    days = np.datetime64("1969-06-01") + rng.integers(0, 1500, n)
    frame = pd.DataFrame(
        {
            "living area": np.array(gaps(rng.normal(70, 20, n)), float),
            "living-area": np.array(gaps(rng.normal(0, 1e4, n), 0.1 * other), float),
            "int": rng.integers(0, 9, n) + rng.random(n),
            'heating "$x"': gaps(rng.choice(["gas */", "oil\n2", "öl", "@MISSING@", *(["coal"] * other)], n)),
            "city": gaps([f"city {i}" for i in rng.integers(0, 14 + 4 * other, n)]),
            "sold": pd.to_datetime(pd.Series(gaps(days.tolist()))),
            "new": pd.Series(gaps((rng.random(n) < 0.3).tolist()), dtype="boolean"),
            "same": 1.0,
        }
    )
    month, weekday = (getattr(frame["sold"].dt, part).fillna(6).to_numpy() for part in ("month", "day_of_week"))
    return frame, (month > 6) + (weekday > 4) + 0.01 * frame["living area"].fillna(0).to_numpy()


def through_rows(tree, x, rng):
    """The tree with splits in units of the features, each through a row of x."""
    weights = np.float32(np.asarray(tree.weights) / np.where(x.std(0) > 0, x.std(0), 1))
    rows = x[rng.integers(0, len(x), len(weights))].astype(np.float64)
    bias = np.float32(-np.einsum("np,np->n", weights.astype(np.float64), rows))
    return tree.replace(weights=jnp.asarray(weights), bias=jnp.asarray(bias))


def raw_model(kind="linear", trees=None):
    """A random tree of the raw table, or a forest, and other rows."""
    encoder, features = TableEncoder.fit(*raw_table())
    assert set(encoder.encodings["sold"].lookups) == {"month", "weekday"}
    x = features.astype(np.float32)
    draw = lambda seed: through_rows(random_tree(kind, 4, x.shape[1], seed)[0], x, np.random.default_rng(seed))
    drawn = list(map(draw, range(trees or 1)))
    return FrameModel(drawn[0] if trees is None else stacked(drawn), encoder), raw_table(seed=1, other=True)[0]


def array_with_gaps():
    """A model of an array with missing values, and its rows."""
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(300), rng.normal(size=(300, 3))])
    x[rng.random(x.shape) < 0.2 * np.array([0, 1, 1, 0])] = np.nan
    encoder, features = TableEncoder.fit(x)
    return FrameModel(random_tree("bounded", p=features.shape[1])[0], encoder), x


RAW = {"tree": raw_model, "forest": lambda: raw_model(trees=2), "array with gaps": array_with_gaps}


def identity_model(frame, y=None, **options):
    """A model with the features of a table as predictions, rounded to single precision."""
    encoder, features = TableEncoder.fit(frame, y, **options)
    p = features.shape[1]
    leaves = Linear(jnp.stack([jnp.eye(p)] * 2), jnp.zeros((2, p)))
    return FrameModel(ObliqueTree(jnp.zeros((1, p)), -jnp.ones(1), leaves), encoder)


_TREE = recipes.GET.replace(depth=3)
_BOOSTED = jtrees.Boosted(recipes.GET, rounds=4, patience=None)
_loss = lambda loss: {"task": jtrees.Regression(loss_function=loss)}
_QUANTILES = _loss(losses.Quantile((0.1, 0.5, 0.9)))
_classes = lambda count: lambda y, noise: np.digitize(y, np.quantile(y, np.arange(1, count) / count))
_same = lambda y, noise: y
_far = lambda y, noise: 1e4 + y + noise.normal(size=len(y))
# The recipe, the options of fit, and the targets from a signal and a generator.
FITTED = {
    "linear leaves": (_TREE.replace(leaves="linear"), {}, _same),
    "two classes": (_TREE, {"task": "classification"}, _classes(2)),
    "three classes": (_BOOSTED, {"task": "classification"}, _classes(3)),
    "quantiles": (_BOOSTED, _QUANTILES, _far),
    "counts": (_BOOSTED, _loss("poisson"), lambda y, noise: noise.poisson(np.exp(y))),
    "policy": (_TREE, {"task": jtrees.Policy(3)}, lambda y, _: np.stack([y, -y, 0.5 - y * y], axis=1)),
    "array": (_TREE, _QUANTILES, _far),
}


@functools.cache
def fitted_model(name):
    """A model far from the origin, and a thousand rows with gaps and levels that it does not know."""
    recipe, options, targets = FITTED[name]
    frame, y = raw_table()
    rows, _ = raw_table(1000, seed=1, other=True)
    if name == "array":
        numbers = ["living area", "int"]
        x, rows = frame[numbers].fillna(50).to_numpy(), rows[numbers].fillna(50).to_numpy()
    else:
        x, rows = (table.drop(columns=["sold", "same"]) for table in (frame, rows))
    y = targets(np.asarray(y, float), np.random.default_rng(0))
    return jtrees.fit(recipe, x, y, key=jax.random.key(0), **options).model, rows


def expected_of(model, rows):
    """The leaf of each row in each tree, ``(n, trees)``, and predictions, ``(n, k)``, which the library has, too."""
    program = program_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jtrees.tables.ColumnsWarning)
        features = model.encoder.transform(rows) if isinstance(model, FrameModel) else rows
        predicted = model.predict(rows)
        inner = getattr(model, "model", model)
        leaves = np.stack([tree.leaf_index(features) for tree in ([inner] if program.single else inner)], axis=1)
    predictions = program.predict(features)
    np.testing.assert_array_equal(program.leaf(features), leaves)
    # The last bit of an exponential in float32 depends on the processor and the shape of the array.
    rtol = 2e-7 if np.array_equal(predicted, np.float32(predicted)) else 1e-9
    np.testing.assert_allclose(predictions.reshape(predicted.shape), predicted, rtol=rtol, atol=1e-9)
    return leaves, predictions


STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-pedantic", "-O2"]
_numbers = itertools.count()


def compiled(header, body="", flags=()):
    """A header, and functions beside it, as a library. Its file has a new name, since a process loads a name once."""
    source, library = header.with_suffix(".c"), header.with_name(f"{next(_numbers)}.so")
    source.write_text(f'#include "{header.name}"\n{body}')
    subprocess.run([COMPILER, *STRICT, *flags, "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def rows_in_c(model, frame, header):
    """A table as an array of the structs that a header declares."""
    fields, table = fields_of(model.encoder), jtrees.tables.read_frame(frame)
    members = re.findall(r"^  (?:int|double) (\w+);", header.read_text(), re.MULTILINE)
    kinds = [np.int32 if field.kind == "text" else np.float64 for field in fields]
    rows = np.zeros(len(frame), np.dtype(list(zip(members, kinds, strict=True)), align=True))
    for field, member in zip(fields, members, strict=True):
        raw = table.columns[field.name]
        rows[member] = level_codes(field.column.levels, raw) if field.kind == "text" else raw.values
    return rows


def in_c(model, rows, folder, precision="double", flags=(), prefix="jtrees"):
    """The header tests itself. It predicts single rows, whole blocks and parts of a block alike."""
    header, program = folder / "model.h", program_of(model)
    export.to_c(model, header, precision=precision, prefix=prefix)
    raw = isinstance(model, FrameModel)
    if isinstance(rows, pd.DataFrame):
        row, step, x = f"{prefix}_row", 1, rows_in_c(model, rows, header)
    else:
        row, step = "double" if raw else precision, f"{prefix.upper()}_COLUMNS"
        x = np.ascontiguousarray(rows, np.float32 if row == "float" else np.float64)
    tree = "" if f"int {prefix}_leaf(const" in header.read_text() else "t, "
    body = f"""int rows(const {row} *x, long n, int *leaf, {precision} *out) {{
      for (long i = 0; i < n; i++) {{
        for (int t = 0; t < {len(program.bias)}; t++) *leaf++ = {prefix}_leaf({tree}x + i * {step});
        {prefix}_predict(x + i * {step}, out + i * {len(program.offset)});
      }}
      return {prefix}_selftest();
    }}
    void together(const {row} *x, long n, {precision} *out) {{ {prefix}_predict_rows(x, n, out); }}"""
    library = compiled(header, body, flags)
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
    leaf = np.empty((len(x), len(program.bias)), np.int32)
    out = np.empty((len(x), len(program.offset)), np.float32 if precision == "float" else np.float64)
    assert library.rows(pointer(x), ctypes.c_long(len(x)), pointer(leaf), pointer(out)) == 0
    for count in (len(x), 37, 1, 0):
        together = np.full_like(out, 7)
        library.together(pointer(x), ctypes.c_long(count), pointer(together))
        np.testing.assert_array_equal(together[:count], out[:count], strict=True)
        assert np.all(together[count:] == 7)
    return leaf, out


def numpy_file(model, folder):
    """The names of a file for NumPy, which has tested itself."""
    export.to_numpy(model, folder / "model.py")
    return runpy.run_path(str(folder / "model.py"), run_name="__main__")


def in_numpy(model, rows, folder):
    names = numpy_file(model, folder)
    return names["leaf"](rows), names["predict"](rows)


def onnx_session(model, folder):
    export.to_onnx(model, folder / "model.onnx")
    return onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


def in_onnx(model, rows, folder):
    session, inputs = onnx_session(model, folder), {}
    if not isinstance(rows, pd.DataFrame):
        inputs["x"] = np.float64(rows)
    else:
        table = jtrees.tables.read_frame(rows)
        for field in fields_of(model.encoder):
            raw = table.columns[field.name]
            text = field.kind == "text"
            inputs[field.name] = np.where(raw.missing, "", raw.values).astype(object) if text else raw.values
    assert {entry.name for entry in session.get_inputs()} == set(inputs)
    predicted, leaf = session.run(["prediction", "leaf"], inputs)
    return leaf, predicted


def in_stablehlo(model, rows, folder):
    export.to_stablehlo(model, folder / "model.stablehlo")
    with jax.enable_x64(True):
        program = jax.export.deserialize(bytearray((folder / "model.stablehlo").read_bytes()))
        predicted, leaf = jax.device_get(program.call(np.float64(rows)))
    return leaf, predicted


def frame_of(rows):
    """Rows as a DataFrame, under the names that exports give the columns of an array."""
    return rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows).rename(columns="x{}".format)


def sqlite_result(model, rows, folder, table="rows", **options):
    """The result of a statement over a table with the column ``id``, as a DataFrame."""
    export.to_sql(model, folder / "model.sql", table=table, **options)
    database = sqlite3.connect(":memory:")
    frame_of(rows).to_sql(table, database, index_label="id")
    return pd.read_sql((folder / "model.sql").read_text(), database)


def in_sqlite(model, rows, folder):
    result = sqlite_result(model, rows, folder, keys="id").sort_values("id")
    assert list(result["id"]) == list(range(len(rows)))
    return result.get("leaf"), result.filter(like="prediction").to_numpy()


def node_result(model, rows, folder, result="[rows.map(leaf), rows.map(predict)]"):
    """The value of an expression of ``rows``, ``leaf`` and ``predict``. ``rows`` are a list, or JavaScript."""
    export.to_javascript(model, folder / "model.mjs")
    rows = rows if isinstance(rows, str) else json.dumps(rows)
    (folder / "main.mjs").write_text(f"""import {{ leaf, predict }} from "./model.mjs";
    const rows = {rows};
    console.log(JSON.stringify({result}));""")
    done = subprocess.run([NODE, folder / "main.mjs"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def as_json(rows):
    """Rows as lists or dicts, with null for missing values, and dates as text."""
    if not isinstance(rows, pd.DataFrame):
        return [[None if np.isnan(value) else value for value in row] for row in rows.tolist()]
    cell = lambda value: None if pd.isna(value) else value.isoformat() if hasattr(value, "isoformat") else value
    return [{name: cell(value) for name, value in row.items()} for row in rows.to_dict("records")]


def in_node(model, rows, folder):
    leaf, predicted = node_result(model, as_json(rows), folder)
    return leaf, np.asarray(predicted, float)


# A function of a model, rows and a folder, which returns leaves, if the file has them, and predictions.
FORMS = {"C": in_c, "NumPy": in_numpy, "ONNX": in_onnx, "SQL": in_sqlite, "JavaScript": in_node}
FORMS["StableHLO"] = in_stablehlo
NEEDS = {"C": needs_compiler, "JavaScript": needs_node, "StableHLO": pytest.mark.slow}


def forms(*without):
    """The parameters of a test of all kinds of files."""
    return [pytest.param(form, marks=NEEDS.get(form, ())) for form in FORMS if form not in without]


def check(form, model, rows, folder, rtol=1e-12):
    """The file has the leaves of the model, and its predictions in double precision."""
    leaves, expected = expected_of(model, rows)
    leaf, predicted = FORMS[form](model, rows, folder)
    if leaf is not None:
        np.testing.assert_array_equal(np.reshape(leaf, leaves.shape), leaves)
    assert predicted.dtype == np.float64
    np.testing.assert_allclose(predicted.reshape(expected.shape), expected, rtol=rtol, atol=1e-12)
