"""SELECT statements against the model, in SQLite and PostgreSQL: the same leaves, and the same predictions."""

import os
from pathlib import Path
import runpy
import shutil
import sqlite3
import subprocess
import tempfile
import warnings

from exported_models import FITTED, fitted, frame_of, of_frame, predictions
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import sweeps
from test_export import FEW, MODELS

import jtrees
from jtrees import ObliqueTree, export
from jtrees.export.program import program_of
from jtrees.leaves import Linear, Values

SERVER = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path(shutil.which("initdb") or "").parent)


def in_sqlite(path, frame, table="rows"):
    """The result of a statement over a table with the column ``id``, as a DataFrame."""
    database = sqlite3.connect(":memory:")
    frame.to_sql(table, database, index_label="id")
    return pd.read_sql(path.read_text(), database)


def check(result, model, rows):
    """A result has a row for each row, in order of the key, with the leaf and the predictions of the model."""
    leaves, expected = predictions(model, rows)
    result = result.sort_values("id")
    assert len(np.unique(expected)) > 3
    assert list(result["id"]) == list(range(len(rows)))
    np.testing.assert_allclose(result.filter(like="prediction"), expected, rtol=1e-9, atol=1e-12)
    if leaves.shape[1] == 1:
        np.testing.assert_array_equal(result["leaf"], leaves[:, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jtrees.tables.ColumnsWarning)
        np.testing.assert_allclose(expected.squeeze(), model.predict(rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sweeps.quick(MODELS, FEW))
def test_leaves_and_predictions_in_sqlite(name, tmp_path):
    model, x = MODELS[name]()
    export.to_sql(model, tmp_path / "model.sql", keys="id")
    result = in_sqlite(tmp_path / "model.sql", frame_of(x))
    program = program_of(model)
    np.testing.assert_allclose(result.filter(like="prediction"), program.predict(x), rtol=1e-12, atol=1e-12)
    if program.single:
        np.testing.assert_array_equal(result["leaf"], program.leaf(x)[:, 0])


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", FITTED)
def test_a_thousand_rows_in_sqlite(name, tmp_path):
    model, rows = fitted(name)
    export.to_sql(model, tmp_path / "model.sql", keys="id")
    check(in_sqlite(tmp_path / "model.sql", frame_of(rows)), model, rows)


@pytest.fixture(scope="module")
def server():
    """The folder of the socket of a PostgreSQL server, which refuses to run as root."""
    if not (SERVER / "pg_ctl").exists():
        pytest.skip("no PostgreSQL server")
    user = {"user": "postgres"} if os.geteuid() == 0 else {}
    call = lambda *words: subprocess.run([SERVER / words[0], *words[1:]], check=True, stdout=subprocess.DEVNULL, **user)
    with tempfile.TemporaryDirectory() as folder:
        if user:
            shutil.chown(folder, "postgres")
        call("initdb", "-D", f"{folder}/data", "-U", "postgres", "--auth=trust")
        start = ["-D", f"{folder}/data", "-l", f"{folder}/log", "-o", f"-c listen_addresses='' -k {folder}"]
        call("pg_ctl", *start, "-w", "start")
        yield folder
        call("pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "-w", "stop")


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", FITTED)
def test_a_thousand_rows_in_postgresql(name, server, tmp_path):
    model, rows = fitted(name)
    table = """the "rows" of it's day"""
    export.to_sql(model, tmp_path / "model.sql", keys="id", table=table)
    frame, types = frame_of(rows), {"O": "text", "b": "boolean", "f": "double precision"}
    name = lambda text: '"' + text.replace('"', '""') + '"'
    columns = ['"id" integer', *(f"{name(c)} {types[frame[c].dtype.kind]}" for c in frame)]
    frame.to_csv(tmp_path / "rows.csv", index_label="id")
    statement = (tmp_path / "model.sql").read_text().rstrip(";\n")
    script = [
        f"DROP TABLE IF EXISTS {name(table)};",
        f"CREATE TABLE {name(table)} ({', '.join(columns)});",
        f"\\copy {name(table)} FROM '{tmp_path}/rows.csv' CSV HEADER",
        f"CREATE TEMPORARY VIEW result AS {statement};",
        f"\\copy (SELECT * FROM result) TO '{tmp_path}/result.csv' CSV HEADER\n",
    ]
    psql = [SERVER / "psql", "-h", server, "-U", "postgres", "-qX", "-v", "ON_ERROR_STOP=1"]
    subprocess.run(psql, input="\n".join(script), text=True, check=True)
    check(pd.read_csv(tmp_path / "result.csv"), model, rows)


def test_names_levels_and_missing_texts_are_those_of_predict(tmp_path):
    names = ['say "it\'s"', "sum_0"]
    levels = ["it's", '"x"', "a\\b", "gas -- oil", "ö\n", None] * 5
    frame = pd.DataFrame({names[0]: levels, names[1]: np.arange(30.0), "new": [True, None, False] * 10})
    frame.loc[3, "sum_0"] = np.nan
    model = of_frame(frame, np.arange(30.0))
    rows = pd.DataFrame({name: frame[name].astype(object) for name in frame})
    rows.loc[:5, names[0]] = ["NA", " ? ", "coal", "1", "It's", None]
    rows.loc[:3, "sum_0"] = [None, "NA", " ", "3.5"]
    rows.loc[:3, "new"] = ["true", "False", " TRUE ", "NA"]
    export.to_sql(model, tmp_path / "model.sql", keys="id", table='the "rows"')
    result = in_sqlite(tmp_path / "model.sql", rows, 'the "rows"')
    typed = rows.assign(sum_0=[None, None, None, 3.5, *frame["sum_0"][4:]]).astype({"sum_0": float})
    typed["new"] = pd.Series([True, False, True, None, *frame["new"][4:]], dtype="boolean")
    leaves, expected = predictions(model, typed)
    np.testing.assert_allclose(result.filter(like="prediction"), expected, rtol=1e-12)
    assert leaves.tolist() == result[["leaf"]].to_numpy().tolist()


def test_a_level_may_look_like_a_missing_value(tmp_path):
    """A level with spaces around it is another level. NumPy files agree."""
    model = of_frame(pd.DataFrame({"code": ["NA", "x", None] * 10}), np.arange(30.0))
    rows = pd.DataFrame({"code": ["NA", " NA ", "?", "x", None]})
    _, expected = predictions(model, rows)
    assert len(np.unique(expected, axis=0)) == 4
    export.to_sql(model, tmp_path / "model.sql")
    export.to_numpy(model, tmp_path / "model.py")
    result = in_sqlite(tmp_path / "model.sql", rows).filter(like="prediction")
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(runpy.run_path(str(tmp_path / "model.py"))["predict"](rows), expected)


def test_numbers_are_rounded_to_single_precision(tmp_path):
    """As NumPy does, also between two neighbours and beside powers of two."""
    rng = np.random.default_rng(0)
    halves = rng.integers(2**23, 2**24, 500) + 0.5
    powers = 2.0 ** np.arange(-100, 100)
    x = np.concatenate([halves, *(np.nextafter(a, b) for a in (halves, powers, -powers) for b in (-np.inf, np.inf))])
    x = np.concatenate([x, rng.normal(size=500) * 10.0 ** rng.integers(-30, 30, 500), [0.0, 1e30]])
    tree = ObliqueTree(jnp.zeros((1, 1)), -jnp.ones(1), Linear(jnp.ones((2, 1)), jnp.zeros(2)))
    export.to_sql(tree, tmp_path / "model.sql")
    result = in_sqlite(tmp_path / "model.sql", pd.DataFrame({"x0": x}))
    np.testing.assert_array_equal(result["prediction"], x.astype(np.float32))


def test_a_missing_number_of_an_array_has_no_prediction(tmp_path):
    tree = ObliqueTree(jnp.eye(3, 2), -jnp.ones(3), Values(jnp.arange(4.0)))
    export.to_sql(tree, tmp_path / "model.sql", keys=["id"], feature_names=["a", "b"])
    frame = pd.DataFrame({"b": [0.0, 0.0], "a": [np.nan, 2.0]})
    result = in_sqlite(tmp_path / "model.sql", frame)
    assert result.isna().to_numpy().tolist() == [[False, True, True], [False, False, False]]
    assert result.iloc[1].tolist() == [1, 2, 2]


def test_columns_of_the_result(tmp_path):
    columns = {}
    for name, options in {"logit, depth 1": {"class_names": ["no", 'a "b"']}, "votes": {}, "constant": {}}.items():
        model, x = MODELS[name]()
        outputs = program_of(model).predict(x).shape[1]
        options |= {"class_names": ["no", 'a "b"', "c"]} if options else {}
        export.to_sql(model, tmp_path / "model.sql", keys=["id", "x0"], **options)
        columns[name] = list(in_sqlite(tmp_path / "model.sql", frame_of(x))), outputs
    assert columns == {
        "logit, depth 1": (["id", "x0", "prediction_no", 'prediction_a "b"', "prediction_c", "leaf"], 3),
        "votes": (["id", "x0", *(f"prediction_{k}" for k in range(4))], 4),
        "constant": (["id", "x0", "prediction", "leaf"], 1),
    }


def test_what_sql_refuses(tmp_path):
    path = tmp_path / "model.sql"
    tree, _ = MODELS["logit, depth 1"]()
    dates = pd.DataFrame({"sold": pd.date_range("2024-01-01", periods=30), "a": np.arange(30.0)})
    for message, model, options in (
        ("columns must not be dates, which differ between databases, got 'sold'", of_frame(dates, dates["a"]), {}),
        ("class_names must hold 3 names, one an output, got 2", tree, {"class_names": ["a", "b"]}),
        ("class_names must give different columns .*, got 'prediction_a' twice", tree, {"class_names": "aba"}),
        ("keys must give different columns of the result, got 'leaf' twice", tree, {"keys": ["id", "leaf"]}),
        ("feature_names must hold 2 names", tree, {"feature_names": ["a"]}),
        (r"names and levels must have no null character in SQL, got 'a\\x00'", tree, {"table": "a\0"}),
        ("model must be an ObliqueTree or a Forest of them", 3, {}),
    ):
        with pytest.raises(ValueError, match=message):
            export.to_sql(model, path, **options)
    assert not path.exists()
