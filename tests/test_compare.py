"""The main job from its command line: what it prints, what it writes, and how it refuses."""

import json
import os

import numpy as np
import pandas as pd
import pytest
from sklearn.utils import Bunch

from experiments import compare, data

pytestmark = pytest.mark.usefixtures("standard_promotion")

QUICK = ["--depth", "2", "--starts", "2", "--epochs", "30"]


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
    assert compare.main(["--data-dir", str(folder), "--dataset", "plane", "--out", str(out), *QUICK]) == 0
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
