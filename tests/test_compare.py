"""The main job from its command line: what it prints, what it writes, and how it refuses."""

import json
import os

import numpy as np
import pandas as pd
import pytest
from sklearn.utils import Bunch

from experiments import compare, data
import jtrees
from jtrees.table import checked_table

pytestmark = pytest.mark.usefixtures("standard_promotion")

QUICK = ["--depth", "2", "--starts", "2", "--epochs", "10"]


@pytest.fixture
def folder(tmp_path):
    """A data folder with one small regression set and one with class labels."""
    rng = np.random.default_rng(0)
    x = rng.random((120, 3), dtype=np.float32)
    np.savez(tmp_path / "plane.npz", X=x, y=x @ np.float32([1, -2, 3]))
    np.savez(tmp_path / "labels.npz", X=x, y=(x[:, 0] > 0.5).astype(np.int32))
    return tmp_path


def test_writes_everything_it_promises(folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--data-dir", str(folder), "--dataset", "plane", "--out", str(out), *QUICK]
    assert compare.main([*arguments, "--methods", "cart", "get", "forest"]) == 0
    printed = capsys.readouterr().out
    assert "get" in printed and "cart" in printed and "forest" in printed
    (run,) = out.iterdir()
    names = {file.name for file in run.iterdir()}
    assert {"table.csv", "table.md", "config.json", "figure.png", "get_depth2.npz", "get_depth2.txt"} <= names
    table = pd.read_csv(run / "table.csv").set_index("method")
    assert table.loc["get", "train_r2"] >= table.loc["cart", "train_r2"]
    assert table.loc["get", "leaves"] <= 4
    config = json.loads((run / "config.json").read_text())
    assert config["options"]["seed"] == 0 and config["data"]["rows"] == 120 and "jax" in config["versions"]
    with np.load(run / "get_depth2.npz") as saved:
        assert saved["weights"].shape == (3, 3) and saved["leaf_values"].shape == (4,)


@pytest.mark.parametrize("method", compare.MODELS)
def test_every_method_is_a_recipe_that_fits_or_an_estimator(folder, method):
    options, table = compare.parse(["--seed", "3"]), data.load("plane", data_dir=folder)
    model = compare.MODELS[method](3, options, len(table.x))
    if method in ("cart", "forest"):
        assert model.random_state == 3
        return
    assert isinstance(model, jtrees.Recipe)
    checked = model.checked(checked_table(table.x, table.y, None, "regression"))
    assert getattr(checked, "base", checked).depth == 3


@pytest.mark.slow
def test_every_method_runs(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "_batch_epochs", lambda n: 5)
    arguments = ["--data-dir", str(folder), "--dataset", "plane", "--out", str(tmp_path / "out"), *QUICK]
    assert compare.main([*arguments, "--methods", *compare.MODELS]) == 0
    (run,) = (tmp_path / "out").iterdir()
    table = pd.read_csv(run / "table.csv").set_index("method")
    assert list(table.index) == list(compare.MODELS)
    names = {file.name for file in run.iterdir()}
    assert {f"{name}_depth2.npz" for name in ("cart", "get", "get-polished", "get-linear", "raddt", "dgt")} <= names
    assert (table["leaves"] >= 1).all() and (table["parameters"] > table["leaves"] - 1).all()
    assert np.isfinite(table["test_r2"]).all()


def test_defaults():
    options = compare.parse([])
    assert options.methods == ["cart", "get", "get-linear", "forest"] and options.depth == [1, 2, 3]


def test_a_saved_tree_is_whole_where_values_lie_far_from_zero(folder, tmp_path):
    with np.load(folder / "plane.npz") as near:
        np.savez(folder / "far.npz", X=near["X"] + np.float32(4096), y=near["y"])
    arguments = [
        "--data-dir",
        str(folder),
        "--dataset",
        "far",
        "--methods",
        "get",
        "--out",
        str(tmp_path / "out"),
        *QUICK,
    ]
    assert compare.main(arguments) == 0
    (run,) = (tmp_path / "out").iterdir()
    with np.load(run / "get_depth2.npz") as saved:
        assert saved["origin_x"].shape == (3,) and np.all(saved["origin_x"] > 4000)


def test_results_are_never_half_written(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(compare, "_figure", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare.main(["--data-dir", str(folder), "--dataset", "plane", "--methods", "cart", "--out", str(out), *QUICK])
    assert os.listdir(out) == []


def test_two_runs_within_a_second_keep_both(folder, tmp_path):
    out = tmp_path / "out"
    arguments = ["--data-dir", str(folder), "--dataset", "plane", "--methods", "cart", "--out", str(out), *QUICK]
    assert [compare.main(arguments), compare.main(arguments)] == [0, 0]
    assert len(os.listdir(out)) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dataset", "labels"], "class labels"),
        (["--dataset", "plane", "--depth", "17"], "depth must be from 1 to 16"),
        (["--dataset", "plane", "--depth", "0"], "depth must be from 1 to 16"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(folder, tmp_path, capsys, arguments, said):
    assert compare.main(["--data-dir", str(folder), "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_unknown_name_says_which_there_are(folder, monkeypatch):
    def unreachable(**_):
        raise OSError("no network")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", unreachable)
    with pytest.raises(data.DataError, match=r"'nowhere'.*labels, plane, diabetes.*no network"):
        data.load("nowhere", data_dir=folder)


def test_openml_answer_becomes_a_table(monkeypatch, tmp_path):
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3, 4]})
    answer = Bunch(data=frame, target=pd.Series([0.5, 1.5], name="t"))
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda **asked: answer if asked["name"] == "set" else None)
    table = data.load("set", data_dir=tmp_path)
    assert table.feature_names == ["a", "b"] and table.x.dtype == np.float32
    np.testing.assert_array_equal(table.y, [0.5, 1.5])


def test_classes_on_openml_are_numbered_and_those_missing_refused(monkeypatch, tmp_path):
    frame, names = pd.DataFrame({"a": [1.0, 2.0, 3.0]}), pd.CategoricalDtype(["0", "1", "7"])
    digits = Bunch(data=frame, target=pd.Series(["7", "0", "7"], dtype=names))
    missing = Bunch(data=frame, target=pd.Series(["7", None, "0"], dtype=names))
    answers = {"mnist_784": digits, "gaps": missing}
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda **asked: answers[asked["name"]])
    table = data.load("mnist", data_dir=tmp_path)
    assert table.name == "mnist" and table.is_classification and table.y.dtype == np.int32
    np.testing.assert_array_equal(table.y, [2, 0, 2])
    with pytest.raises(data.DataError, match="the target must have no missing"):
        data.load("gaps", data_dir=tmp_path)


def test_environment_variable_names_the_folder(folder, monkeypatch):
    monkeypatch.setenv("JTREES_DATA", str(folder))
    assert data.load("plane").x.shape == (120, 3)


def test_csv(tmp_path):
    file = tmp_path / "houses.csv"
    file.write_text("rooms,area,price\n1,20.5,100\n2,40,210\n3,70,350\n")
    table = data.load(csv=file, target="price")
    assert table.feature_names == ["rooms", "area"]
    np.testing.assert_array_equal(table.y, [100, 210, 350])


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        ("a,b\n1,2\n", None, "columns a, b"),
        ("a,b\n1,2\n", "c", "got 'c'"),
        ("a,b\nred,2\n", "b", "column 'a' must be numeric"),
        ("a,b\n,2\n1,3\n", "b", "column 'a' must have no missing"),
        ("b\n2\n", "b", "at least one column"),
    ],
)
def test_bad_csv(tmp_path, text, target, said):
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(data.DataError, match=said):
        data.load(csv=file, target=target)


def test_missing_csv_and_folder(tmp_path):
    with pytest.raises(data.DataError, match="cannot read"):
        data.load(csv=tmp_path / "none.csv", target="y")
    with pytest.raises(data.DataError, match="does not exist"):
        data.load("plane", data_dir=tmp_path / "none")


def test_embedded_default():
    table = data.load()
    assert table.name == "diabetes" and table.x.shape == (442, 10)
