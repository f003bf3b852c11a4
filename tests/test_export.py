"""Exported files against the model: the same leaf for every row, and the same predictions."""

import ctypes
import datetime
import runpy
import sqlite3
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees import Forest, ObliqueTree, export
from jtrees.export.c_columns import new_name
from jtrees.export.template import c_comment, c_literal, sql_literal, sql_name
from jtrees.leaves import Values
from jtrees.tables import FrameModel, TableEncoder
from tests import exported_models as models, nasty, recipes, sweeps, tables
from tests.needs import COMPILER, needs_compiler, needs_node


@pytest.mark.parametrize("form", models.forms())
@pytest.mark.parametrize("name", sweeps.quick(models.MODELS, models.FEW, models.SLOW))
def test_files_have_the_leaves_and_predictions_of_models_of_arrays(form, name, tmp_path):
    models.check(form, *models.MODELS[name](), tmp_path)


@pytest.mark.parametrize("form", models.forms("SQL", "StableHLO"))
@pytest.mark.parametrize("name", models.RAW)
def test_files_have_the_leaves_and_predictions_of_models_of_raw_tables(form, name, tmp_path):
    models.check(form, *models.RAW[name](), tmp_path)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("form", models.forms("StableHLO"))
@pytest.mark.parametrize("name", sweeps.slow(models.FITTED, ["linear leaves", "three classes", "counts"]))
def test_files_have_the_leaves_and_predictions_of_fitted_models(form, name, tmp_path):
    model, rows = models.fitted_model(name)
    models.check(form, model, rows, tmp_path, rtol=1e-9)
    assert len(np.unique(models.expected_of(model, rows)[1])) > 3 or name == "policy"


FILLED = np.where(np.isnan(tables.GAPS), np.median(tables.X, axis=0), tables.GAPS)


def check_gaps(form, model, convert, folder):
    """A missing value has the answer of the model for the median of the training rows, in which none is missing."""
    models.check(form, model, convert(tables.GAPS), folder)
    for gaps, medians in zip(*(models.expected_of(model, convert(x)) for x in (tables.GAPS, FILLED)), strict=True):
        np.testing.assert_array_equal(gaps, medians)
        assert len(np.unique(gaps)) > 1


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("form", models.forms())
@pytest.mark.parametrize(
    ("recipe", "task"),
    [
        (recipes.GET, "regression"),
        pytest.param(recipes.BOOSTED, "classes", marks=pytest.mark.slow),
        pytest.param(recipes.LINEAR, "two outputs", marks=pytest.mark.wide),
    ],
)
def test_files_of_models_of_arrays_fill_gaps_that_the_training_rows_did_not_have(form, recipe, task, fitted, tmp_path):
    check_gaps(form, fitted(recipe, task).model, np.array, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("form", models.forms("StableHLO"))
def test_files_of_models_of_tables_fill_gaps_that_the_training_rows_did_not_have(form, tmp_path):
    model = jtrees.fit(recipes.GET, models.frame_of(tables.X), tables.Y, key=jax.random.key(0)).model
    check_gaps(form, model, models.frame_of, tmp_path)


@pytest.mark.parametrize("form", models.forms("StableHLO"))
@pytest.mark.parametrize("name", ["@COLUMNS@ $x", '*/ "\\'])
def test_names_and_levels_may_look_like_parts_of_a_template(form, name, tmp_path):
    """Or like the end of a literal or of a comment."""
    frame = pd.DataFrame({name: [*nasty.TEXTS, None] * 10})
    models.check(form, models.identity_model(frame, np.arange(len(frame))), frame, tmp_path)


TEXTS = list(enumerate(nasty.TEXTS))


@needs_compiler
def test_the_rule_of_escape_of_c(tmp_path):
    (tmp_path / "model.h").write_text(
        "".join(f"/* {c_comment(text)}\n*/ static const char text_{i}[] = {c_literal(text)};\n" for i, text in TEXTS)
    )
    texts = ", ".join(f"text_{i}" for i, _ in TEXTS)
    library = models.compiled(tmp_path / "model.h", f"const char *const texts[] = {{{texts}}};")
    assert [text.decode() for text in (ctypes.c_char_p * len(TEXTS)).in_dll(library, "texts")] == nasty.TEXTS


def test_the_rule_of_escape_of_sql():
    columns = ", ".join(f"{sql_literal(text)} AS {sql_name(text)}" for text in nasty.TEXTS)
    result = sqlite3.connect(":memory:").execute(f"SELECT {columns}")
    assert [name for name, *_ in result.description] == nasty.TEXTS and list(result.fetchone()) == nasty.TEXTS


def test_a_file_for_numpy_refuses_what_a_model_without_medians_refuses(tmp_path):
    model, x = models.MODELS["constant"]()
    predict = models.numpy_file(model, tmp_path)["predict"]
    for bad in (np.nan, np.inf, 1e39):
        for refusing in (model.predict, predict):
            with np.errstate(over="ignore"), pytest.raises(ValueError, match="must be finite"):
                refusing(np.where(np.arange(5) == 2, bad, x))


@needs_compiler
def test_exponentials_in_c(tmp_path):
    """Of all numbers in double precision that have one within its range, and beyond it."""
    x = np.concatenate([np.linspace(-708, 709, 20_001), np.random.default_rng(0).normal(size=20_000), [0.0, -0.0]])
    tree = ObliqueTree(jnp.zeros((1, 1)), jnp.zeros(1), Values(jnp.zeros(2)))
    export.to_c(models.stacked([tree], "sum", "exp"), tmp_path / "model.h")
    exponential = models.compiled(
        tmp_path / "model.h", "double exponential(double v) { return jtrees_exp(v); }"
    ).exponential
    exponential.argtypes, exponential.restype = [ctypes.c_double], ctypes.c_double
    exactly = np.exp(x.astype(np.longdouble))
    assert np.abs(np.array([exponential(v) for v in x]) / exactly - 1).max() < 1e-15
    assert [exponential(v) for v in (-800, -np.inf, 800, np.inf)] == [0, 0, np.inf, np.inf]
    assert np.isnan(exponential(np.nan))


@needs_compiler
@pytest.mark.parametrize("flags", [(), ("-O3", "-march=native"), ("-O1", "-U__GNUC__")])
@pytest.mark.parametrize("power", sweeps.quick([0, -110, -61, 62, 110], [0], [-110, 110]))
def test_single_precision_decides_in_c_only_what_it_can(power, flags, tmp_path):
    """Sizes whose squares underflow or overflow, rows close to splits, and rows without numbers."""
    tree, x = models.random_tree("constant", depth=4, p=6)
    size = np.float32(2.0) ** power
    for scaled, rows in (
        (tree.replace(weights=tree.weights * size, bias=tree.bias * size), x),
        (tree.replace(weights=tree.weights / size), x * np.float64(size)),
    ):
        rows = rows.astype(np.float32).astype(np.float64)
        rows[:4, 0] = np.nan, np.inf, -np.inf, 3e38
        with np.errstate(invalid="ignore"):
            expected = jtrees.export.program.program_of(scaled).leaf(rows)
        np.testing.assert_array_equal(models.in_c(scaled, rows, tmp_path, flags=flags)[0], expected)


@needs_compiler
@pytest.mark.parametrize("raw", [False, True])
def test_c_in_single_precision(raw, tmp_path):
    model, x = models.RAW["array with gaps"]() if raw else models.random_tree("linear", p=6)
    leaf, predicted = models.in_c(
        model, x.astype(np.float32), tmp_path, "float", ("-O3", "-march=native"), prefix="my_tree"
    )
    leaves, expected = models.expected_of(model, x.astype(np.float32))
    np.testing.assert_array_equal(leaf, leaves)
    np.testing.assert_allclose(predicted, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", models.forms("C", "StableHLO"))
def test_levels_and_texts_that_mean_a_missing_value_are_those_of_predict(form, tmp_path):
    """A level may look like a missing value, also a rare level, and a blank text where the format has one."""
    blank = "c" if form == "ONNX" else ""
    frame = pd.DataFrame({"c": ["a", blank, "?", None] * 8 + ["None", "nan"], "y": np.arange(34.0)})
    rows = pd.DataFrame({"c": ["a", blank, "?", None, "None", "nan", "NA", "N/A", "new"], "y": 1.0})
    models.check(form, models.identity_model(frame, np.arange(34.0)), rows, tmp_path)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("form", models.forms("StableHLO"))
def test_numbers_that_mean_a_missing_value_are_those_of_predict(form, named, tmp_path):
    """Also where numbers have single precision, and in a column of an array."""
    frame = pd.DataFrame({"a": np.arange(40.0), "b": np.arange(40) % 20})
    frame.loc[::4, "a"], frame.loc[::5, "b"] = -99.9, -999
    cells = {"a": [-99.9, np.float32(-99.9), -999, 7, np.nan, 0], "b": [-999, 3, -999.0, 7, np.nan, -998]}
    rows = pd.DataFrame(cells, np.arange(6)).loc[np.arange(60) % 6].reset_index(drop=True)
    table, rows = (frame, rows) if named else (frame.to_numpy(), rows.to_numpy())
    model = models.identity_model(table, missing=("-999", -99.9, 7))
    assert model.encoder.gaps(rows)["a" if named else "x0"].tolist() == 10 * [True, True, True, True, True, False]
    models.check(form, model, rows, tmp_path)


@pytest.mark.parametrize("form", ["NumPy", pytest.param("JavaScript", marks=needs_node)])
def test_files_that_read_cells_know_numbers_that_mean_a_missing_value(form, tmp_path):
    """In text, among levels, and in no other column."""
    numbers = [*np.arange(38) % 19, 1, 7]
    frame = pd.DataFrame(
        {"number": map(str, numbers), "unit": [f"${i}.50" for i in numbers], "flag": [True, False] * 20}
    )
    frame["level"] = ["a", "7", "7.5", "b"] * 10
    model = models.identity_model(frame, missing=("7", "0", "7.5"))
    cells = [7, "7", "7.0", 7.5, "7.50", "$7.5", 0, "0", 8, "a"]
    rows = pd.DataFrame({name: pd.Series(cells, dtype=object) for name in frame})
    rows["flag"] = pd.Series([0, False, 1, True, "true", "0", "false", 0, 1, None], dtype=object)
    models.check(form, model, rows, tmp_path)


@needs_compiler
def test_a_header_is_a_program_that_tests_itself(tmp_path):
    path, program = tmp_path / "model.h", tmp_path / "program"
    export.to_c(models.random_tree("frequency")[0], path)
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


@needs_compiler
def test_a_header_of_a_raw_table_names_its_columns_and_levels(tmp_path):
    export.to_c(models.raw_model()[0], tmp_path / "model.h")
    text = (tmp_path / "model.h").read_text()
    assert all(f" {member};" in text for member in ("living_area", "living_area_2", "int_2", "heating___x_"))
    assert " same;" not in text
    body = "int level(const char *text) { return jtrees_heating___x__of(text); }"
    level = models.compiled(tmp_path / "model.h", body).level
    texts = ["@MISSING@", "gas */", "oil\n2", "öl", "coal", "", "NA", None]
    assert [level(None if text is None else text.encode()) for text in texts] == [0, 1, 2, 3, 4, 5, 5, 5]


def test_equal_names_in_c_have_numbers_in_a_time_that_grows_with_their_count():
    """As names of levels without letters of ASCII are. A number may be taken by another name."""
    used = {}
    assert [new_name(text, used) for text in ("å", "a_2", "a", "a", "a_2", "ä", "a")] == [
        *("x_", "a_2", "a", "a_3", "a_2_2", "x__2", "a_4")
    ]
    start = time.process_time()
    assert new_name("C_汽", used) == "C__" and [new_name("C_油", used) for _ in range(30_000)][-1] == "C___30001"
    assert time.process_time() - start < 2


@needs_compiler
def test_a_compiler_that_ignores_nan_refuses_a_header_that_reads_it(tmp_path):
    """The header of a model that never reads NaN compiles with the same option."""
    export.to_c(models.RAW["array with gaps"]()[0], tmp_path / "gaps.h")
    export.to_c(models.random_tree("constant")[0], tmp_path / "numbers.h")
    for name, refused in (("gaps.h", True), ("numbers.h", False)):
        command = [COMPILER, *models.STRICT, "-ffast-math", "-x", "c", "-fsyntax-only", tmp_path / name]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode != 0) == refused and ("NaN is a missing value here" in done.stderr) == refused


@pytest.mark.parametrize("name", ["linear outputs", "sum"])
def test_numpy_and_onnx_predict_any_number_of_rows_in_the_shapes_of_the_model(name, tmp_path):
    model, x = models.MODELS[name]()
    file, session = models.numpy_file(model, tmp_path), models.onnx_session(model, tmp_path)
    for rows in (x, x[:7], x[:0]):
        predicted, leaf = session.run(["prediction", "leaf"], {"x": np.float64(rows)})
        for predictions, leaves in ((predicted, leaf), (file["predict"](rows), file["leaf"](rows))):
            assert predictions.shape == model.predict(rows).shape and predictions.dtype == np.float64
            assert leaves.shape == (len(rows), *(() if isinstance(model, ObliqueTree) else (len(model),)))
    with pytest.raises(ValueError, match="x must have shape"):
        file["predict"](x[:, :-1])


def test_a_numpy_file_needs_numpy_alone_and_tests_itself(tmp_path):
    path = tmp_path / "model.py"
    export.to_numpy(models.random_tree("linear")[0], path)
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    path.write_text(path.read_text().replace("    return leaf[:, 0]", "    return 7 - leaf[:, 0]"))
    with pytest.raises(AssertionError):
        runpy.run_path(str(path), run_name="__main__")


def test_a_numpy_file_of_a_raw_table_takes_objects_and_dicts(tmp_path):
    model, frame = models.raw_model()
    leaves, predictions = models.expected_of(model, frame)
    file = models.numpy_file(model, tmp_path)
    for table in (frame.astype(object), {name: column.tolist() for name, column in frame.items()}):
        np.testing.assert_array_equal(file["leaf"](table), leaves[:, 0])
        np.testing.assert_allclose(file["predict"](table), predictions[:, 0], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="x must have a column 'city'"):
        file["predict"](frame.drop(columns="city"))
    numbered = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 2)))  # its columns are 0 and 1
    model = models.identity_model(numbered)
    predictions = models.numpy_file(model, tmp_path)["predict"](numbered)
    np.testing.assert_array_equal(predictions, models.expected_of(model, numbered)[1])


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("recipe", [recipes.TEL, recipes.RECIPES["LatentTree"]], ids=["TEL", "LatentTree"])
def test_stablehlo_of_soft_models(recipe, tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 4)) + 100
    bag = jtrees.Bagged(recipe, trees=2, combine="mean")
    model = jtrees.fit(bag, x, np.arange(60) % 3, key=jax.random.key(0), task="classification").model
    export.to_stablehlo(model, tmp_path / "model.stablehlo")
    with jax.enable_x64(True):
        program = jax.export.deserialize(bytearray((tmp_path / "model.stablehlo").read_bytes()))
        for rows in (x, x[:7]):
            predicted, expected = np.asarray(program.call(rows)), model.predict(rows)
            assert predicted.shape == expected.shape and predicted.dtype == np.float64
            np.testing.assert_allclose(predicted, expected, rtol=1e-5)


@pytest.mark.parametrize("clock", [False, True])
def test_dates_are_those_of_numpy(clock, tmp_path):
    """Months and weekdays of three thousand years; or times of day, also around midnight and before 1970."""
    rng = np.random.default_rng(0)
    days = np.concatenate([np.arange(-600_000, 500_000, 170), np.arange(-1500, 1500)]).astype("datetime64[D]")
    milliseconds = rng.integers(-(10**12), 10**12, 4000)
    milliseconds[:1000] += -milliseconds[:1000] % 86_400_000 - rng.integers(0, 2, 1000)
    milliseconds[1000:2000] -= milliseconds[1000:2000] % 60_000
    frame = pd.DataFrame({"day": milliseconds.astype("datetime64[ms]") if clock else days.astype("datetime64[ms]")})
    hours, minutes = frame["day"].dt.hour.to_numpy(), frame["day"].dt.minute.to_numpy()
    months, weekdays = days.astype("datetime64[M]").astype(int) % 12, (days.astype(int) + 3) % 7
    y = 3.0 * hours + 50.0 * (minutes >= 30) if clock else 3.0 * months + 50.0 * (weekdays == 2)
    model = models.identity_model(frame, y)
    parts = {"month", "weekday"} | ({"hour", "minute"} if clock else set())
    assert parts == set(model.encoder.encodings["day"].lookups)
    for evaluate in (models.in_onnx, models.in_numpy, models.in_c) if COMPILER else (models.in_onnx, models.in_numpy):
        np.testing.assert_allclose(evaluate(model, frame, tmp_path)[1], models.expected_of(model, frame)[1], rtol=1e-12)


@pytest.mark.parametrize("form", models.forms("SQL", "StableHLO"))
def test_periods_of_dates_have_no_features_without_targets(form, tmp_path):
    frame = pd.DataFrame({"day": pd.date_range("2024-01-01", periods=40, freq="9D")})
    model = models.identity_model(frame)
    assert model.encoder.feature_names == ["day (days since 2024-01-01)"]
    models.check(form, model, frame, tmp_path)


@pytest.mark.parametrize("zone", ["America/Sao_Paulo", "offsets"])
def test_a_numpy_file_with_times_of_a_zone_predicts_as_the_model(zone, tmp_path):
    rng = np.random.default_rng(0)
    times = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 288_000, 300), unit="min")
    y = (times.hour >= 12) * 2.0 + (times.minute >= 30)
    if zone == "offsets":
        times = [f"{time.isoformat()}+0{hour}:00" for time, hour in zip(times, rng.integers(0, 9, 300), strict=True)]
    else:
        times = times.tz_localize("UTC").tz_convert(zone)
    frame = pd.DataFrame({"when": times, "z": rng.normal(size=300)})
    model = models.identity_model(frame, np.asarray(y))
    assert "hour" in model.encoder.encodings["when"].lookups
    np.testing.assert_allclose(
        models.numpy_file(model, tmp_path)["predict"](frame), models.expected_of(model, frame)[1], rtol=1e-12
    )


@pytest.mark.parametrize("zone", ["", "Z"])
def test_a_numpy_file_tests_itself_with_dates_of_the_calendar(zone, tmp_path):
    """A date without an end is often 9999-12-31. The deviation is then thousands of years."""
    dates = [f"{year}-12-31T00:00{zone}" for year in [2020, 2021, 2022, 2023, 2024, 9999, 9999] * 8]
    models.numpy_file(models.identity_model(pd.DataFrame({"until": dates})), tmp_path)
    runpy.run_path(str(tmp_path / "model.py"), run_name="__main__")


DAYS = pd.to_datetime(["2024-01-01", "2024-01-02"])
BERLIN = pd.date_range("2024-03-01", periods=40, tz="Europe/Berlin")
TIMES = [datetime.time(hour, 59, 59, 999) for hour in range(24)]


@pytest.mark.parametrize(
    ("training", "rows"),
    [
        (pd.Categorical([0.1, 0.2] * 20), pd.Categorical(np.float32([0.2, 0.1]))),
        (pd.Categorical(pd.to_datetime(["2024-01-01", "2024-01-02"] * 20)), pd.Categorical(DAYS[::-1].as_unit("s"))),
        (["\0", "a", "b"] * 10 + ["c"], ["\0", "a", "new"]),
        (pd.to_timedelta(np.arange(40) % 7, "us"), pd.to_timedelta([3, 5], "us")),
        (BERLIN, BERLIN[:3].tz_convert("UTC")),
        (TIMES, TIMES[::-1]),
        (TIMES, pd.to_timedelta([11, 13], "h")),
    ],
)
def test_a_numpy_file_reads_cells_as_the_model(training, rows, tmp_path):
    model = models.identity_model(pd.DataFrame({"a": training}))
    predict = models.numpy_file(model, tmp_path)["predict"]
    for values in (training, rows):
        frame = pd.DataFrame({"a": values})
        expected = models.expected_of(model, frame)[1]
        np.testing.assert_array_equal(predict(frame).reshape(expected.shape), expected)


@pytest.mark.usefixtures("standard_promotion")
def test_what_cannot_be_exported(tmp_path, fitted):
    tree, x = models.random_tree("linear")
    path = tmp_path / "model"
    path.write_text("before")
    many = jax.tree.map(lambda a: jnp.stack([a, a]), tree)
    trees_alone = r"model must be an ObliqueTree or a Forest of them \(to_stablehlo takes all others\), got"
    wrong = [
        (many, rf"{trees_alone} ObliqueTree of shape \(2, 7, 5\)"),
        (tree.replace(weights=np.float64(tree.weights)), "model must have float32 weights, got float64"),
        (Forest(many, "vote"), "trees with linear leaves cannot vote"),
        (tree.replace(bias=tree.bias.at[1].set(-np.inf)), "model must hold finite numbers, got -inf in its bias"),
        (tree.replace(leaves=Values(jnp.full(8, jnp.nan))), "must hold finite numbers, got nan in its intercept"),
    ]
    soft = fitted(recipes.TEL).model
    trees_only = (export.to_c, export.to_numpy, export.to_onnx, export.to_sql, export.to_javascript)
    for write in (*trees_only, export.to_stablehlo):
        rest = [(soft, f"{trees_alone} {type(soft).__name__}"), (3, "model must be an Ob")]
        for model, message in wrong + (rest if write in trees_only else [(3, "model must be a fitted model")]):
            with pytest.raises(ValueError, match=message):
                write(model, path)
        with pytest.raises(OSError):
            write(tree, tmp_path / "missing" / "model")
    column = TableEncoder.fit(pd.DataFrame({"leaf": x[:, 0]}))[0]
    nul = pd.DataFrame({"a": ["a\0b", "a"] * 20})
    for write, model, options, message in (
        (export.to_stablehlo, FrameModel(tree, TableEncoder.fit(x)[0]), {}, "StableHLO has no text"),
        (export.to_onnx, FrameModel(models.random_tree("linear", p=1)[0], column), {}, "other names in ONNX .* 'leaf'"),
        (export.to_c, models.identity_model(nul), {}, "levels must have no null character in C, got .* 'a'"),
        (export.to_c, tree, {"prefix": "2nd"}, "prefix must be a name in C, got '2nd'"),
        (export.to_c, tree, {"precision": "half"}, "precision must be"),
    ):
        with pytest.raises(ValueError, match=message):
            write(model, path, **options)
    assert path.read_text() == "before" and [file.name for file in tmp_path.iterdir()] == ["model"]
