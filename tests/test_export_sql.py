"""SELECT statements in PostgreSQL, and names, levels and missing values in SQL. All models: ``test_export.py``."""

import os
import shutil
import sqlite3
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees import ObliqueTree, export
from jtrees.leaves import Linear, Values
from tests import needs, sweeps
from tests.exported_models import (
    FITTED,
    MODELS,
    expected_of,
    fitted_model,
    frame_of,
    identity_model,
    random_tree,
    sqlite_result,
)


@pytest.fixture(scope="module")
def server():
    """The folder of the socket of a PostgreSQL server, which refuses to run as root."""
    programs = needs.POSTGRESQL
    needs.check(programs is not None and (programs / "pg_ctl").exists(), "PostgreSQL")
    user = {"user": "postgres"} if os.geteuid() == 0 else {}
    quietly = {"check": True, "stdout": subprocess.DEVNULL, **user}
    call = lambda program, *words: subprocess.run([programs / program, *words], **quietly)
    with tempfile.TemporaryDirectory() as folder:
        if user:
            shutil.chown(folder, "postgres")
        call("initdb", "-D", f"{folder}/data", "-U", "postgres", "--auth=trust")
        start = ["-D", f"{folder}/data", "-l", f"{folder}/log", "-o", f"-c listen_addresses='' -k {folder}"]
        call("pg_ctl", *start, "-w", "start")
        yield folder
        call("pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "-w", "stop")


def run_in_postgresql(script, server):
    psql = [needs.POSTGRESQL / "psql", "-h", server, "-U", "postgres", "-qX", "-v", "ON_ERROR_STOP=1"]
    subprocess.run(psql, input=script, text=True, check=True)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", sweeps.slow(FITTED, ["three classes"]))
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
    run_in_postgresql("\n".join(script), server)
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


def test_a_statement_computes_the_text_of_a_cell_once_for_all_levels(tmp_path):
    levels = [f"level {i}" for i in range(300)]
    model = identity_model(pd.DataFrame({"c": levels * 5}), np.arange(1500) % 7.0)
    rows = pd.DataFrame({"c": [*levels, "new", " NA ", "level 7 ", None]})
    result = sqlite_result(model, rows, tmp_path).filter(like="prediction")
    np.testing.assert_allclose(result, expected_of(model, rows)[1], rtol=1e-12)
    assert (tmp_path / "model.sql").read_text().count("TRIM(") == 2  # of missing values, and of levels


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


def test_a_table_in_a_schema(tmp_path):
    model, x = MODELS["constant"]()
    result = sqlite_result(model, x, tmp_path)["prediction"]
    export.to_sql(model, tmp_path / "model.sql", table=("main", "a.rows"))
    database = sqlite3.connect(":memory:")
    frame_of(x).to_sql("a.rows", database)
    np.testing.assert_array_equal(pd.read_sql((tmp_path / "model.sql").read_text(), database)["prediction"], result)


def test_a_thousand_terms_are_not_too_deep(tmp_path):
    p = 1200
    weights = np.float32(np.random.default_rng(0).normal(size=(1, p)))
    tree = ObliqueTree(weights, np.zeros(1, np.float32), Linear(np.concatenate([weights, -weights]), np.zeros(2)))
    x = np.random.default_rng(1).normal(size=(3, p)).astype(np.float32)
    rows = pd.DataFrame({"id": range(3), **{f"x{j}": column for j, column in enumerate(x.T)}}).set_index("id")
    result = sqlite_result(tree, rows, tmp_path)
    leaves, expected = expected_of(tree, x)
    np.testing.assert_allclose(result["prediction"], expected[:, 0], rtol=1e-12)
    np.testing.assert_array_equal(result["leaf"], leaves[:, 0])


OUTSIDE = pd.DataFrame({"x0": [1.0, np.inf, -np.inf, 1e39, -1e39], "x1": 1.0})


def two_columns(medians):
    tree = ObliqueTree(jnp.eye(1, 2), -jnp.ones(1) / 2, Values(jnp.arange(2.0)))
    return tree if medians is None else tree.with_medians(np.array(medians))


def test_a_number_that_a_model_refuses_has_no_prediction(tmp_path):
    for medians in (None, [3.0, 0.0]):
        result = sqlite_result(two_columns(medians), OUTSIDE, tmp_path)
        np.testing.assert_array_equal(result["prediction"], [1, *[np.nan] * 4])


@pytest.mark.slow
@pytest.mark.parametrize(("medians", "missing"), [(None, np.nan), ([-3.0, 0.0], 0), ([3.0, 0.0], 1)])
def test_nan_is_a_missing_value_in_postgresql(medians, missing, server, tmp_path):
    export.to_sql(two_columns(medians), tmp_path / "model.sql", keys="id", table=("other", "rows"))
    statement = (tmp_path / "model.sql").read_text().rstrip(";\n")
    values = "(0, 1), (1, 'infinity'), (2, '-infinity'), (3, 1e39), (4, 'nan'), (5, NULL), (6, -1)"
    script = f"""DROP SCHEMA IF EXISTS other CASCADE; CREATE SCHEMA other;
    CREATE TABLE other.rows (id integer, x0 double precision, x1 double precision DEFAULT 1);
    INSERT INTO other.rows VALUES {values};
    CREATE TEMPORARY VIEW result AS {statement};
    \\copy (SELECT * FROM result) TO '{tmp_path}/result.csv' CSV HEADER\n"""
    run_in_postgresql(script, server)
    result = pd.read_csv(tmp_path / "result.csv").sort_values("id")
    expected = [1, np.nan, np.nan, np.nan, missing, missing, 0]
    np.testing.assert_array_equal(result["prediction"], expected)
    np.testing.assert_array_equal(result["leaf"], expected)


@pytest.mark.slow
def test_numbers_that_mean_a_missing_value_do_so_in_columns_of_every_type_of_postgresql(server, tmp_path):
    frame = pd.DataFrame({name: [1.0, 2.0, np.nan, 4.0] * 10 for name in "abcd"})
    model = identity_model(frame, missing=(-999, "-99.9"))
    export.to_sql(model, tmp_path / "model.sql", keys="id", table="codes")
    statement = (tmp_path / "model.sql").read_text().rstrip(";\n")
    script = f"""DROP TABLE IF EXISTS codes;
    CREATE TABLE codes (id integer, a integer, b double precision, c numeric(6, 2), d real);
    INSERT INTO codes VALUES (0, -999, -999, -999, -999), (1, -999, -99.9, -99.9, -99.9), (2, 3, 3, 3, 3);
    CREATE TEMPORARY VIEW result AS {statement};
    \\copy (SELECT * FROM result) TO '{tmp_path}/result.csv' CSV HEADER\n"""
    run_in_postgresql(script, server)
    result = pd.read_csv(tmp_path / "result.csv").sort_values("id").filter(like="prediction")
    expected = expected_of(model, pd.DataFrame({name: [np.nan, np.nan, 3.0] for name in "abcd"}))[1]
    np.testing.assert_array_equal(result, expected)


RETURN = identity_model(pd.DataFrame({"text": ["x\r\ny", "y", None] * 10}))
DATES = pd.DataFrame({"sold": pd.date_range("2024-01-01", periods=30), "a": np.arange(30.0)})


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("columns must not be dates, .* got 'sold'", {"model": identity_model(DATES, DATES["a"])}),
        ("class_names must hold 3 names, .* got 2", {"class_names": ["a", "b"]}),
        ("class_names must give different columns .*, got 'prediction_a', 'prediction_a'", {"class_names": "aba"}),
        ("class_names must give different columns .*, got 'prediction_a', 'prediction_A'", {"class_names": "abA"}),
        ("class_names must .* 'prediction_eee.*, 'prediction_eee", {"class_names": [60 * "e" + c for c in "abc"]}),
        ("keys must give different columns of the result, got 'Leaf', 'leaf'", {"keys": ["id", "Leaf"]}),
        ("columns must have different names in SQL, got 'A', 'a': rename them", {"feature_names": ["A", "a"]}),
        ("columns must have different names in SQL", {"feature_names": [63 * "é" + c for c in "ab"]}),
        ("feature_names must hold 2 names", {"feature_names": ["a"]}),
        (r"names and levels must have no null character .* in SQL, got 'a\\x00'", {"table": "a\0"}),
        (r"names and levels must have no .* carriage return in SQL, got 'x\\r\\ny'", {"model": RETURN}),
    ],
)
def test_what_sql_refuses(message, options, tmp_path):
    with pytest.raises(ValueError, match=message):
        export.to_sql(**{"model": random_tree("logit", 1, 2)[0], "path": tmp_path / "model.sql"} | options)
    assert not list(tmp_path.iterdir())


def test_times_of_day_in_text_are_refused_and_durations_are_days(tmp_path):
    """A database would read 14:35 as 14 days."""
    times = [f"{i % 24}:{i}" for i in range(10, 50)]
    durations = pd.Series(pd.to_timedelta(np.arange(40) % 20, "h"))
    for cells in (times, [*times[1:], "soon"], [*durations[1:], "14:35"]):
        with pytest.raises(ValueError, match=r"columns must hold plain numbers in SQL, got 'a' with '\d\d:\d\d'"):
            export.to_sql(identity_model(pd.DataFrame({"a": cells})), tmp_path / "model.sql")
    for cells in (durations, [*durations[1:], "soon"]):
        model = identity_model(pd.DataFrame({"a": cells}))
        days = pd.DataFrame({"a": durations / pd.Timedelta(1, "D")})
        expected = expected_of(model, pd.DataFrame({"a": durations}))[1]
        np.testing.assert_array_equal(sqlite_result(model, days, tmp_path).filter(like="prediction"), expected)


@pytest.mark.parametrize("cell", ["${:,.2f}", "{:.1f} %", "{:.1f} km"])
def test_numbers_that_a_database_cannot_read_are_refused(cell, tmp_path):
    numbers = np.linspace(500, 9000, 60)
    table = pd.DataFrame({"size": [cell.format(number) for number in numbers]})
    fit = jtrees.fit(jtrees.GET(depth=1, starts=1, epochs=5), table, numbers, key=jax.random.key(0))
    with pytest.raises(ValueError, match="columns must hold plain numbers in SQL, got 'size' with '"):
        export.to_sql(fit.model, tmp_path / "model.sql")
    assert not (tmp_path / "model.sql").exists()
