"""Every example of the README runs unchanged, without the other examples. Those of the site run when it is built."""

import os
from pathlib import Path
import re

import numpy as np
import pandas as pd
import pytest

README = Path(__file__).parents[1] / "README.md"
FENCED = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples() -> list:
    """The blocks of Python that use the library, with the line on which each begins."""
    text = README.read_text(encoding="utf-8")
    blocks = [(block[1], text.count("\n", 0, block.start()) + 2) for block in FENCED.finditer(text)]
    return [pytest.param(code, line, id=f"line {line}") for code, line in blocks if "jtrees" in code]


def passengers() -> pd.DataFrame:
    """The raw table Titanic, from the folder of raw tables; without the folder, a made table of the same columns."""
    data = os.environ.get("JTREES_DATA")
    folder = os.environ.get("JTREES_TABLES") or (Path(data).parent / "tables" if data else "no folder")
    if (file := Path(folder) / "titanic.csv.gz").exists():
        return pd.read_csv(file)
    rng, n = np.random.default_rng(0), 200
    sex, ticket = rng.choice(["male", "female"], n), rng.integers(1000, 400_000, n).astype(str)
    ticket[::10] = [f"A/5. {number}" for number in ticket[::10]]
    columns = {
        "PassengerId": np.arange(1, n + 1),
        "Survived": (rng.random(n) < np.where(sex == "female", 0.8, 0.2)).astype(int),
        "Pclass": rng.integers(1, 4, n),
        "Sex": sex,
        "Age": np.where(rng.random(n) < 0.2, np.nan, rng.integers(1, 80, n)),
        "SibSp": rng.integers(0, 4, n),
        "Parch": rng.integers(0, 3, n),
        "Ticket": ticket,
        "Fare": rng.lognormal(3, 1, n).round(4),
        "Cabin": np.where(rng.random(n) < 0.8, None, [f"C{i}" for i in range(n)]),
        "Embarked": rng.choice(["S", "C", "Q"], n),
    }
    return pd.DataFrame(columns)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore::jtrees.tables.ColumnsWarning")  # the text above the example announces it
@pytest.mark.parametrize(("code", "line"), examples())
def test_examples_run(code, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # nothing that they write stays
    passengers().to_csv("titanic.csv", index=False)
    padded = "\n" * (line - 1) + code  # so that a traceback names the line of the README
    exec(compile(padded, str(README), "exec"), {"__name__": "__main__"})
    assert "nan" not in capsys.readouterr().out
    (tmp_path / "titanic.csv").unlink()
    assert {file.suffix for file in tmp_path.iterdir()} <= {".jtrees", ".h", ".py"}  # models are the only trace


def test_there_are_examples():
    actual = [example.values[0] for example in examples()]
    assert len(actual) == 3  # the table, the sweep and the method
    assert "jtrees.fit(" in actual[0] and "jtrees.sweep(" in actual[1] and "jtrees.train(" in actual[2]


def test_it_is_one_page_and_its_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (README.parent / link).exists(), link


def test_the_quoted_results_are_the_committed_ones():
    rows = lambda text: [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    results = README.parent / "experiments" / "results"
    parts = map(str.strip, (results / "networks_all_rows.md").read_text(encoding="utf-8").split("\n\n"))
    records = lambda table: {row[0]: dict(zip(table[0], row, strict=True)) for row in table}
    measured = {table[0][0]: records(table) for table in map(rows, filter(None, parts))}
    quoted = [row for row in rows(README.read_text(encoding="utf-8")) if len(row) == 6 and " sets of " in row[1]]
    for sets in ("8 sets of regression", "16 sets of classification"):
        actual = [[name.removesuffix("()"), *numbers] for name, of_sets, *numbers in quoted if of_sets == sets]
        columns = ["score, %", "log loss", "numbers", "processor seconds"]
        kept = [row for name, row in measured[sets].items() if name != sets and set(name) != {"-"}]
        assert actual == [[row[sets], *(row.get(column, "") for column in columns)] for row in kept] and kept
    # Raw tables: the mean and the median, the tables on which the model is ahead, the longest fit.
    measured = [row for row in rows((results / "raw_tables.md").read_text(encoding="utf-8")) if len(row) == 8]
    summary = [[row[0], *row[1:3], *row[5:7]] for row in measured if row[0].endswith("()")]
    raw = [row for row in rows(README.read_text(encoding="utf-8")) if len(row) == 5 and " of 9" in row[3]]
    assert raw == summary and len(raw) == 3
