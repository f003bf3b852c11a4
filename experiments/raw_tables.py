"""Raw tables, directly in jtrees and encoded by hand: a made table with text, dates and gaps, and sets with made gaps.

python -m experiments.raw_tables --data-dir DATA [--write] [--splits 5] [--datasets abalone ...]
"""

import itertools
from typing import Any
import warnings

import jax
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, TargetEncoder

from experiments import benchmark, data, studies
import jtrees
from jtrees.estimators import TreeClassifier

DATASETS = ("abalone", "airfoil-self-noise", "combined-cycle-power-plant", "cpu-act", "elevators", "kin8nm", "space-ga")
DATASETS += ("ailerons",)
RECIPE = jtrees.LatentTree(depth=5, weight_decay=0.0)
ROWS = 3000  # upper limit of the rows of a set
SHARES, SEEDS = (0.1, 0.3), 3
START, DAY = pd.Timestamp("2021-01-01"), pd.Timedelta(days=1)


def houses(n: int = 4000, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Returns a made table of houses and whether each is sold; one house in eight is sold.

    The table has numbers and text with missing values, 40 cities, dates and an identifier.
    """
    rng = np.random.default_rng(seed)
    city = rng.choice(40, n, p=rng.dirichlet(np.full(40, 2.0)))
    by_city = rng.normal(size=40)
    frame = pd.DataFrame(
        {
            "id": [f"house {i}" for i in range(1, n + 1)],
            "area": rng.lognormal(4.4, 0.4, n),
            "built": rng.integers(1900, 2024, n).astype(float),
            "heating": rng.choice(["gas", "oil", "wood", "district"], n, p=[0.5, 0.3, 0.15, 0.05]),
            "city": [f"city {i}" for i in city],
            "offered": START + pd.to_timedelta(rng.integers(0, 1000, n), "D"),
            "garden": rng.random(n) < 0.4,
        }
    )
    month = frame["offered"].dt.month.to_numpy()
    score = 1.2 * by_city[city] + 0.02 * (frame["area"] - 85) * np.where(frame["heating"] == "oil", -1, 1)
    score += 0.8 * np.isin(month, [4, 5, 6]) + 0.015 * (frame["built"] - 1960) * frame["garden"]
    sold = (score + rng.logistic(size=n) * 0.7 > np.quantile(score, 0.88)).to_numpy()
    gap = rng.random((n, 3)) < 0.12
    gap[:, 1] |= (frame["built"] < 1930) & (rng.random(n) < 0.5)  # values that are not missing at random
    frame.loc[gap[:, 0], "area"] = np.nan
    frame.loc[gap[:, 1], "built"] = np.nan
    frame.loc[gap[:, 2], "heating"] = None
    return frame, np.where(sold, "sold", "not sold")


def by_hand(seed: int) -> Any:
    """Returns the same estimator after scikit-learn's imputer and encoders."""
    folds: Any = StratifiedKFold(5, shuffle=True, random_state=0)
    columns = make_column_transformer(
        (SimpleImputer(strategy="median", add_indicator=True), ["area", "built"]),
        (OneHotEncoder(sparse_output=False), ["heating"]),
        (TargetEncoder(cv=folds), ["city"]),
        (FunctionTransformer(lambda x: (x - START) / DAY), ["offered"]),
        ("passthrough", ["garden"]),
    )
    return make_pipeline(columns, TreeClassifier(random_state=seed))


def boosting(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the table for gradient boosting: categories, dates as days, no row number."""
    days, text = (frame["offered"] - START) / DAY, dict.fromkeys(("heating", "city"), "category")
    return frame.astype(text).assign(offered=days, month=frame["offered"].dt.month).drop(columns="id")


def aucs(splits: int) -> dict[str, list[float]]:
    """Returns the area under the ROC curve on a quarter of the rows, for each split."""
    frame, y = houses()
    bins: Any = HistGradientBoostingClassifier
    programs = {
        "TreeClassifier, raw table": (lambda seed: TreeClassifier(random_state=seed), frame),
        "TreeClassifier, encoded by hand": (by_hand, frame),
        bins.__name__: (lambda seed: bins(categorical_features="from_dtype", random_state=seed), boosting(frame)),
    }
    scores: dict[str, list[float]] = {name: [] for name in programs}
    for seed, (name, (make, x)) in itertools.product(range(splits), programs.items()):
        train, test, _, _ = data.split(np.arange(len(y)), y, seed)
        probability = make(seed).fit(x.iloc[train], y[train]).predict_proba(x.iloc[test])[:, 1]
        scores[name].append(float(roc_auc_score(y[test], probability)))
    return scores


def with_gaps(x: np.ndarray, share: float, at_random: bool, rng: np.random.Generator) -> np.ndarray:
    """Returns a copy in which a share of each column is missing, at random or mostly the large values."""
    rank = x.argsort(0).argsort(0) / len(x)
    return np.where(rng.random(x.shape) < (share if at_random else 2 * share * rank), np.nan, x)


def scores_with_gaps(name: str, share: float, at_random: bool, seed: int, data_dir: str | None) -> list[float]:
    """Returns test R^2 in per cent: from the raw table, from means with masks, and from the rows without gaps."""
    table, rng = data.load(name, data_dir=data_dir), np.random.default_rng(seed)
    rows = rng.permutation(len(table.x))[:ROWS]
    x = with_gaps(table.x[rows].astype(float), share, at_random, rng)
    x, x_test, y, y_test = data.split(x, table.y[rows].astype(float), seed)
    masks, means, whole = SimpleImputer(add_indicator=True).fit(x), SimpleImputer().fit(x), ~np.isnan(x).any(1)
    scores = []
    for train, target, test in (
        (x, y, x_test),
        (masks.transform(x), y, masks.transform(x_test)),
        (x[whole], y[whole], means.transform(x_test)),
    ):
        able = len(train) >= 50
        split: Any = train, test, target, y_test
        scores.append(studies.percent(studies.fit(RECIPE, split, seed).predict(test), y_test) if able else np.nan)
    return scores


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    datasets = {"nargs": "*", "default": DATASETS}
    options = benchmark.parse("raw_tables", __doc__, arguments, data_dir=None, splits=5, datasets=datasets)
    warnings.simplefilter("ignore", UserWarning)  # unused columns
    table, ahead = benchmark.Table("score", "table", "values"), []
    for name, auc in aucs(options.splits).items():
        table.add("AUC, houses", name, f"{np.mean(auc):.3f}: {' '.join(f'{a:.3f}' for a in auc)}")
    for name in options.datasets:
        for share, at_random in itertools.product(SHARES, (True, False)):
            each = [scores_with_gaps(name, share, at_random, seed, options.data_dir) for seed in range(SEEDS)]
            ahead += [straight - means for straight, means, _ in each]
            how = f"{share:.0%} missing{'' if at_random else ', large values more often'}"
            cells = ("-" if np.isnan(mean) else f"{mean:.1f}" for mean in np.mean(each, 0))
            table.add(f"R², {name}", how, " / ".join(cells))
        jax.clear_caches()
    if ahead:
        error = np.std(ahead, ddof=1) / np.sqrt(len(ahead))
        table.add("R², raw minus means", "all of these", f"{np.mean(ahead):.2f} ± {error:.2f}")
    notes = (
        "Houses: a made table of 4000 rows with gaps, 40 cities, dates and a row number; one house in eight is sold. "
        f"Its values are the mean AUC of {options.splits} splits and the AUC of each split. In the other tables, of up "
        f"to {ROWS} rows, gaps were made in all columns. Their values are the test R² of {type(RECIPE).__name__} of "
        f"depth {RECIPE.depth} in per cent, means of {SEEDS} splits: raw table / means and masks by scikit-learn / "
        "only rows without gaps. For the third value, means fill the gaps of the test rows, and `-` stands for fewer "
        "than 50 training rows. The last row is the mean difference and its standard error."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
