"""Every example of the README runs as it stands there, by itself. Those of the site run when it is built."""

import ast
import inspect
from pathlib import Path
import re

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import r2_score

import jtrees

README = Path(__file__).parents[1] / "README.md"
FENCED = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What takes more than some seconds, nearly all of it compilation, by a word of it that no other example has.
SLOW = {
    "pd.DataFrame": "GET and CART for a raw table, and four ways to use the tree",
    "jtrees.sweep": "GET for four combinations and three seeds",
    "huber_loss": "500 steps of a method of one's own",
}


def examples() -> list:
    """The blocks of Python that use the library, with the line on which each begins."""
    found = []
    text = README.read_text(encoding="utf-8")
    for block in FENCED.finditer(text):
        if "jtrees" in (code := block[1]):
            line = text.count("\n", 0, block.start()) + 2
            slow = [pytest.mark.slow for word in SLOW if word in code]
            found.append(pytest.param(code, line, id=f"line {line}", marks=slow))
    return found


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("code", "line"), examples())
def test_examples_run(code, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # nothing that they write stays
    at_its_place = "\n" * (line - 1) + code  # so that a traceback names the line of the README
    exec(compile(at_its_place, str(README), "exec"), {"__name__": "__main__"})
    assert "nan" not in capsys.readouterr().out
    assert {file.suffix for file in tmp_path.iterdir()} <= {".jtrees", ".h", ".py"}  # models are the only trace


@pytest.mark.parametrize("code", [pytest.param(one.values[0], id=one.id) for one in examples()])
def test_examples_call_what_there_is(code):
    """The small sibling of those that are slow: names exist, and take what they are given."""
    called = 0
    for node in ast.walk(ast.parse(code)):
        whole = node.func if isinstance(node, ast.Call) else node
        if not isinstance(whole, ast.Attribute) or not re.fullmatch(r"jtrees(\.\w+)+", name := ast.unparse(whole)):
            continue
        thing = jtrees
        for part in name.split(".")[1:]:
            thing = getattr(thing, part)
        if isinstance(node, ast.Call):
            named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(thing).bind_partial(*node.args, **named)
            called += 1
    assert called or "from jtrees" in code


def test_there_are_examples():
    found = [example.values[0] for example in examples()]
    assert len(found) == 4  # the table, the sweep, the layer and the method
    assert "jtrees.fit(" in found[0] and "jtrees.sweep(" in found[1] and "nn.LatentTree(" in found[2]
    assert all(sum(word in code for code in found) == 1 for word in SLOW)


def test_it_is_one_page_and_its_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (README.parent / link).exists(), link


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # they leave two files to Python to close
def test_a_saved_tree_in_lines_of_numpy(monkeypatch):
    """The very lines; what they say of the embedded data is what the committed table says of the tree."""
    (code,) = (block[1] for block in FENCED.finditer(README.read_text(encoding="utf-8")) if "jtrees" not in block[1])
    monkeypatch.chdir(README.parent)
    exec(code, names := {})
    with np.load(README.parent / "experiments" / "embedded" / "kin8nm.npz") as data:
        y = data["y"]
    table = pd.read_csv(README.parent / "experiments" / "results" / "kin8nm" / "table.csv")
    (row,) = (row for _, row in table.iterrows() if row["method"] == "get" and row["depth"] == 4)
    share = np.array([0.6, 0.15, 0.25])  # of the rows to train on, to choose by and to test with
    expected = share @ [row["train"], row["validate"], row["test"]]
    # R2 of parts and of the whole differ by the parts' own means and variances.
    assert r2_score(y, names["y"]) == pytest.approx(expected, abs=0.01)


def test_the_quoted_table_is_the_committed_one():
    quoted = README.read_text(encoding="utf-8").split("\nmethod       depth", 1)[1].split("\n\n", 1)[0]
    table = (README.parent / "experiments" / "results" / "kin8nm" / "table.md").read_text(encoding="utf-8")
    rows = [line.replace("|", " ").split() for line in table.splitlines()]
    assert [line.split() for line in quoted.splitlines()[1:]] == rows[2:]
    assert rows[2][0] == "baseline"
