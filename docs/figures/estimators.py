"""Draws scores beside seconds and numbers, from the committed study: ``python docs/figures/estimators.py FOLDER``."""

from pathlib import Path
import sys

import matplotlib.pyplot as plt
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))
import results_tables

# Estimators of regression, and of classification.
OURS = (
    ("BoostedRegressor()", "TreeRegressor()", "Refined()"),
    ("BoostedClassifier()",),
)
RIVALS = ("CART", "random forest", "LightGBM", "CatBoost")
# Places of labels that would meet a neighbour's point above their own: offset in points, and alignment.
PLACES = {
    "TreeRegressor()": (0, -15, "center"),
    "BoostedRegressor()": (8, -13, "left"),
    "LightGBM": (0, -15, "center"),
}
PLACES |= {"random forest": (8, -3, "left"), "CatBoost": (-13, -3, "right")}
MEASURES = {"second fit, s": "seconds of a fit", "numbers": "numbers in the model"}


def draw() -> plt.Figure:
    """Returns the figure: a row for each task, a column for each measure, on logarithmic axes."""
    means = [table for table in results_tables.tables("estimators.md") if table.index.name.startswith("mean of")]
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), sharey="row", constrained_layout=True)
    for row, table, ours in zip(axes, means, OURS, strict=True):
        values = results_tables.numbers(table)
        score = values.columns[0]
        for ax, (measure, label) in zip(row, MEASURES.items(), strict=True):
            draw_models(ax, values[[measure, score]], ours)
            ax.set_xlabel(label)
        row[0].set_ylabel(f"{score.replace(', %', ' in %')}, {table.index.name}")
    return figure


def draw_models(ax: plt.Axes, values: pd.DataFrame, ours: tuple[str, ...]) -> None:
    """Draws a point with a name for each model; ``values`` has the measure and the score of each."""
    for name in (*ours, *RIVALS):
        x, y = values.loc[name]
        is_ours = name in ours
        ax.plot(x, y, "o" if is_ours else "s", color="tab:green" if is_ours else "0.55", markersize=8)
        dx, dy, side = PLACES.get(name, (0, 8, "center"))
        ax.annotate(name, (x, y), xytext=(dx, dy), textcoords="offset points", ha=side, fontsize=8)
    ax.set_xscale("log")
    ax.margins(0.4, 0.15)
    ax.grid(alpha=0.3)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    draw().savefig(folder / "estimators.svg")
