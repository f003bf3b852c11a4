"""SELECT statements in PostgreSQL, and names, levels and missing values in SQL. All models: ``test_export.py``."""

import os
from pathlib import Path
import shutil
import subprocess
import tempfile

from exported_models import MODELS, expected_of, fitted_model, frame_of, identity_model, random_tree, sqlite_result
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from jtrees import ObliqueTree, export
from jtrees.leaves import Linear, Values

SERVER = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path(shutil.which("initdb") or "").parent)


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
@pytest.mark.parametrize("name", ["linear leaves", "three classes", "quantiles", "policy", "array"])
def test_a_thousand_rows_in_postgresql(name, server, tmp_path):
    model, rows = fitted_model(name)
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
    result = pd.read_csv(tmp_path / "result.csv").sort_values("id")
    leaves, expected = expected_of(model, rows)
    assert list(result["id"]) == list(range(len(rows)))
    np.testing.assert_allclose(result.filter(like="prediction"), expected, rtol=1e-9, atol=1e-12)
    if leaves.shape[1] == 1:
        np.testing.assert_array_equal(result["leaf"], leaves[:, 0])


def test_names_levels_and_missing_texts_are_those_of_predict(tmp_path):
    names = ['say "it\'s"', "sum_0"]
    levels = ["it's", '"x"', "a\\b", "gas -- oil", "ö\nü", None] * 5
    frame = pd.DataFrame({names[0]: levels, names[1]: np.arange(30.0), "new": [True, None, False] * 10})
    frame.loc[3, "sum_0"] = np.nan
    model = identity_model(frame, np.arange(30.0))
    rows = pd.DataFrame({name: frame[name].astype(object) for name in frame})
    rows.loc[:5, names[0]] = ["NA", " ? ", "coal", "1", "It's", None]
    rows.loc[:3, "sum_0"] = [None, "NA", " ", "3.5"]
    rows.loc[:3, "new"] = ["true", "False", " TRUE ", "NA"]
    result = sqlite_result(model, rows, tmp_path, 'the "rows"', keys="id")
    typed = rows.assign(sum_0=[None, None, None, 3.5, *frame["sum_0"][4:]]).astype({"sum_0": float})
    typed["new"] = pd.Series([True, False, True, None, *frame["new"][4:]], dtype="boolean")
    leaves, expected = expected_of(model, typed)
    np.testing.assert_allclose(result.filter(like="prediction"), expected, rtol=1e-12)
    np.testing.assert_array_equal(result[["leaf"]], leaves)


def test_a_level_may_look_like_a_missing_value(tmp_path):
    """Spaces around a level do not count."""
    model = identity_model(pd.DataFrame({"code": ["NA", "x", None] * 10}), np.arange(30.0))
    rows = pd.DataFrame({"code": ["NA", " NA ", "?", "x", None]})
    _, expected = expected_of(model, rows)
    assert len(np.unique(expected, axis=0)) == 3
    np.testing.assert_array_equal(sqlite_result(model, rows, tmp_path).filter(like="prediction"), expected)


def test_numbers_are_rounded_to_single_precision(tmp_path):
    """As NumPy does, also between two neighbours and beside powers of two."""
    rng = np.random.default_rng(0)
    halves, powers = rng.integers(2**23, 2**24, 500) + 0.5, 2.0 ** np.arange(-100, 100)
    x = np.concatenate([halves, *(np.nextafter(a, b) for a in (halves, powers, -powers) for b in (-np.inf, np.inf))])
    x = np.concatenate([x, rng.normal(size=500) * 10.0 ** rng.integers(-30, 30, 500), [0.0, 1e30]])
    tree = ObliqueTree(jnp.zeros((1, 1)), -jnp.ones(1), Linear(jnp.ones((2, 1)), jnp.zeros(2)))
    result = sqlite_result(tree, pd.DataFrame({"x0": x}), tmp_path)
    np.testing.assert_array_equal(result["prediction"], x.astype(np.float32))


def test_a_missing_number_of_an_array_has_no_prediction(tmp_path):
    tree = ObliqueTree(jnp.eye(3, 2), -jnp.ones(3), Values(jnp.arange(4.0)))
    frame = pd.DataFrame({"b": [0.0, 0.0], "a": [np.nan, 2.0]})
    result = sqlite_result(tree, frame, tmp_path, keys=["id"], feature_names=["a", "b"])
    assert result.isna().to_numpy().tolist() == [[False, True, True], [False, False, False]]
    assert result.iloc[1].tolist() == [1, 2, 2]


def test_columns_of_the_result(tmp_path):
    for name, options, columns in (
        (
            "logit, depth 1",
            {"class_names": ["no", 'a "b"', "c"]},
            ["prediction_no", 'prediction_a "b"', "prediction_c"],
        ),
        ("constant", {}, ["prediction"]),
    ):
        model, x = MODELS[name]()
        result = sqlite_result(model, x, tmp_path, keys=["id", "x0"], **options)
        assert list(result) == ["id", "x0", *columns, "leaf"]


DATES = pd.DataFrame({"sold": pd.date_range("2024-01-01", periods=30), "a": np.arange(30.0)})


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("columns must not be dates, .* got 'sold'", {"model": identity_model(DATES, DATES["a"])}),
        ("class_names must hold 3 names, .* got 2", {"class_names": ["a", "b"]}),
        ("class_names must give different columns .*, got 'prediction_a' twice", {"class_names": "aba"}),
        ("keys must give different columns of the result, got 'leaf' twice", {"keys": ["id", "leaf"]}),
        ("feature_names must hold 2 names", {"feature_names": ["a"]}),
        (r"names and levels must have no null character in SQL, got 'a\\x00'", {"table": "a\0"}),
    ],
)
def test_what_sql_refuses(message, options, tmp_path):
    with pytest.raises(ValueError, match=message):
        export.to_sql(**{"model": random_tree("logit", 1, 2)[0], "path": tmp_path / "model.sql"} | options)
    assert not list(tmp_path.iterdir())
