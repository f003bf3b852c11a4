"""Tables of the site, computed from the committed reports in ``experiments/results`` during the build."""

from pathlib import Path
import re

import pandas as pd

RESULTS = Path(__file__).parents[1] / "experiments" / "results"


def tables(name: str) -> list[pd.DataFrame]:
    """Returns the tables of a committed report. Cells are text without asterisks; the first column is the index."""
    parsed: list[list[list[str]]] = []
    inside = False
    for line in (RESULTS / name).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif not inside:
            parsed.append([cells])
            inside = True
        elif not re.fullmatch(r"[-|: ]+", line):
            parsed[-1].append(cells)
    return [pd.DataFrame(rows[1:], columns=rows[0]).set_index(rows[0][0]) for rows in parsed]


def numbers(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with the first number of every cell, or NaN if the cell has no number."""
    first = lambda cell: float(match[0].replace(",", "")) if (match := re.search(r"-?[\d,]*\.?\d+", cell)) else None
    return table.map(first).astype(float)


def made_by(name: str) -> str:
    """Returns the command that made a committed report."""
    return re.findall(r"`(python -m [^`]+)`", (RESULTS / name).read_text(encoding="utf-8"))[0]


def kin8nm() -> pd.DataFrame:
    """Returns the table of ``make compare``."""
    return tables("kin8nm/table.md")[0]


def front(task: str) -> pd.DataFrame:
    """Returns the means of ``estimators.md`` for ``"regression"`` or ``"classification"``: scores, seconds, numbers."""
    score = {"regression": "R², %", "classification": "accuracy, %"}[task]
    means = [table for table in tables("estimators.md") if str(table.index.name).startswith("mean of")]
    (table,) = (table for table in means if score in table)
    return table.rename_axis(None)
