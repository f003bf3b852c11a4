"""The checks of the site (docs/check.py): each finds what it is for, and nothing in the library as it is."""

import importlib.util
from pathlib import Path
import re
import zlib

import pytest

import jtrees
from jtrees import pytree
from jtrees.search import option

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check", DOCS / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_option_has_a_line(check, monkeypatch):
    assert check.options_without_a_line() == []
    assert {"GET", "Bagged", "FromMethod"} <= {name.partition(".")[2] for name in check.recipes()}

    @pytree.dataclass(kw_only=True)
    class Forgetful(jtrees.Recipe):
        """A recipe.

        Attributes:
          epochs: passes.
          gone: an option that was taken out.
        """

        epochs: int = option(1)
        depth: int = option(2)

    monkeypatch.setattr(check, "recipes", lambda: {"Forgetful": Forgetful})
    assert check.options_without_a_line() == [
        "Forgetful: the option depth has no line under Attributes",
        "Forgetful: gone is described and is no option",
    ]


def test_names_without_an_example_are_the_listed_ones(check, monkeypatch):
    assert check.names_without_example() == []
    monkeypatch.setattr(check, "WITHOUT_EXAMPLE", {"jtrees.GET"})
    assert check.names_without_example() == ["jtrees.GET has an example: take it out of WITHOUT_EXAMPLE"]
    monkeypatch.setattr(check, "WITHOUT_EXAMPLE", set())
    monkeypatch.setattr(check, "wanting_examples", lambda: {"jtrees.x": object})
    assert check.names_without_example() == ["jtrees.x has no example in its docstring"]


def test_blocks_that_nothing_runs(check, monkeypatch, tmp_path):
    assert check.blocks_that_nothing_runs() == []
    (tmp_path / "page.md").write_text("# Page\n\n```python\n1 / 0\n```\n\n```{code-cell}\n1\n```\n")
    monkeypatch.setattr(check, "DOCS", tmp_path)
    assert check.blocks_that_nothing_runs() == [
        "page.md:3: make it a code-cell",
        "page.md has code cells, and no header that makes it a notebook",
    ]


def test_tables_in_paragraphs(check, monkeypatch, tmp_path):
    assert check.tables_in_paragraphs() == []
    (tmp_path / "README.md").write_text("{.sentences}\n| a |\n|---|\n| b |\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# Page\n\n{.sentences} | a |\n\nb | |---|\n")
    monkeypatch.setattr(check, "DOCS", tmp_path / "docs")
    message = "a table needs a line for each row"
    assert check.tables_in_paragraphs() == [f"docs/page.md:3: {message}", f"docs/page.md:5: {message}"]


def test_names_without_an_entry(check, tmp_path):
    every = [name for module in check.MODULES for name, _ in check.public(module)]
    subset = [name for name in every if not name.startswith("jtrees.topology.")]
    lines = "\n".join(f"{name} py:function 1 page.html#$ -" for name in subset)
    (tmp_path / "objects.inv").write_bytes(b"#\n" * 4 + zlib.compress(lines.encode()))
    missing = check.names_without_an_entry(tmp_path)
    assert "jtrees.topology.num_leaves has no entry in the reference" in missing
    assert all(".topology." in name for name in missing)


def test_the_quoted_results_stand_in_their_files():
    rows = [line.split("|")[1:-1] for line in (DOCS / "results" / "index.md").read_text("utf-8").splitlines()]
    quoted = [cells for cells in rows if len(cells) == 4 and re.search(r"\.md`\]\(\w+\.md#", cells[3])]
    assert len(quoted) == 8
    for _, ours, rival, file in quoted:
        report = (DOCS.parent / "experiments" / "results" / re.findall(r"`(\w+\.md)`", file)[0]).read_text("utf-8")
        for number in re.findall(r"[+\d][\d.]*\d", re.sub(r"`[^`]*`", "", ours + rival)):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", report), (file, number)
