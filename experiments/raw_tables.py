"""Raw tables, directly in jtrees and encoded by hand: a made table with text, dates and gaps, and sets with made gaps.

python -m experiments.raw_tables --data-dir DATA [--write] [--splits 5] [--datasets abalone ...]
"""

from typing import Any
import warnings

import jax
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, TargetEncoder

from experiments import benchmark, data
import jtrees
from jtrees.estimators import TreeClassifier

DATASETS = (
    "abalone",
    "airfoil-self-noise",
    "combined-cycle-power-plant",
    "cpu-act",
    "elevators",
    "kin8nm",
    "space-ga",
    "ailerons",
)
RECIPE = jtrees.LatentTree(depth=5, weight_decay=0.0)
ROWS = 3000  # upper limit of the rows of a set
SHARES = (0.1, 0.3)
SEEDS = 3


def houses(n: int = 4000, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Returns a made table of houses and whether each is sold; one house in eight is sold.

    The table has numbers and text with missing values, 40 cities, dates and an identifier.
    """
    rng = np.random.default_rng(seed)
    city = rng.choice(40, n, p=rng.dirichlet(np.full(40, 2.0)))
    of_city = rng.normal(size=40)
    frame = pd.DataFrame(
        {
            "id": [f"house {i}" for i in range(1, n + 1)],
            "area": rng.lognormal(4.4, 0.4, n),
            "built": rng.integers(1900, 2024, n).astype(float),
            "heating": rng.choice(["gas", "oil", "wood", "district"], n, p=[0.5, 0.3, 0.15, 0.05]),
            "city": [f"city {i}" for i in city],
            "offered": pd.Timestamp("2021-01-01") + pd.to_timedelta(rng.integers(0, 1000, n), "D"),
            "garden": rng.random(n) < 0.4,
        }
    )
    month = frame["offered"].dt.month.to_numpy()
    score = 1.2 * of_city[city] + 0.02 * (frame["area"] - 85) * np.where(frame["heating"] == "oil", -1, 1)
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
    days = FunctionTransformer(lambda x: (x - pd.Timestamp("2021-01-01")) / pd.Timedelta(days=1))
    columns = make_column_transformer(
        (SimpleImputer(strategy="median", add_indicator=True), ["area", "built"]),
        (OneHotEncoder(sparse_output=False), ["heating"]),
        (TargetEncoder(cv=folds), ["city"]),
        (days, ["offered"]),
        ("passthrough", ["garden"]),
    )
    return make_pipeline(columns, TreeClassifier(random_state=seed))


def boosting(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the table for gradient boosting: categories, dates as days, no row number."""
    text = {name: "category" for name in ("heating", "city")}
    days = (frame["offered"] - pd.Timestamp("2021-01-01")) / pd.Timedelta(days=1)
    return frame.astype(text).assign(offered=days, month=frame["offered"].dt.month).drop(columns="id")


def aucs(splits: int) -> dict[str, list[float]]:
    """Returns the area under the ROC curve on a quarter of the rows, for each split."""
    frame, y = houses()
    scores: dict[str, list[float]] = {}
    for seed in range(splits):
        train, test = train_test_split(np.arange(len(y)), test_size=0.25, random_state=seed, stratify=y)
        for name, model, x in (
            ("TreeClassifier, raw table", TreeClassifier(random_state=seed), frame),
            ("TreeClassifier, encoded by hand", by_hand(seed), frame),
            (
                "HistGradientBoostingClassifier",
                HistGradientBoostingClassifier(categorical_features="from_dtype", random_state=seed),
                boosting(frame),
            ),
        ):
            model.fit(x.iloc[train], y[train])
            probability = model.predict_proba(x.iloc[test])[:, 1]
            scores.setdefault(name, []).append(float(roc_auc_score(y[test], probability)))
    return scores


def with_gaps(x: np.ndarray, share: float, at_random: bool, rng: np.random.Generator) -> np.ndarray:
    """Returns a copy in which a share of each column is missing, at random or mostly the large values."""
    probability = np.full(x.shape, share)
    if not at_random:
        rank = x.argsort(0).argsort(0) / len(x)
        probability = 2 * share * rank
    return np.where(rng.random(x.shape) < probability, np.nan, x)


def scores_with_gaps(name: str, share: float, at_random: bool, seed: int, data_dir: str | None) -> list[float]:
    """Returns test R^2 in per cent: from the raw table, from means with masks, and from the rows without gaps."""
    table, rng = data.load(name, data_dir=data_dir), np.random.default_rng(seed)
    rows = rng.permutation(len(table.x))[:ROWS]
    x, y = with_gaps(table.x[rows].astype(float), share, at_random, rng), table.y[rows].astype(float)
    train, test = train_test_split(np.arange(len(rows)), test_size=0.25, random_state=seed)
    means = SimpleImputer(add_indicator=True).fit(x[train])
    whole = np.array([row for row in train if not np.isnan(x[row]).any()], int)
    scores = []
    for x_train, y_train, x_test in (
        (x[train], y[train], x[test]),
        (means.transform(x[train]), y[train], means.transform(x[test])),
        (x[whole], y[whole], SimpleImputer().fit(x[train]).transform(x[test])),
    ):
        if len(x_train) < 50:
            scores.append(np.nan)
            continue
        fit = jtrees.fit(RECIPE, x_train, y_train, key=jax.random.key(seed))
        scores.append(100 * float(r2_score(y[test], fit.predict(x_test))))
    return scores


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    datasets = {"nargs": "*", "default": DATASETS}
    options = benchmark.parse("raw_tables", __doc__, arguments, data_dir=None, splits=5, datasets=datasets)
    warnings.simplefilter("ignore", UserWarning)  # unused columns, and fits that are worse than a linear model
    table = benchmark.Table("score", "table", "values")
    for name, auc in aucs(options.splits).items():
        table.add("AUC, houses", name, f"{np.mean(auc):.3f}: {' '.join(f'{a:.3f}' for a in auc)}")
    ahead = []
    for name in options.datasets:
        for share in SHARES:
            for at_random in (True, False):
                each = [scores_with_gaps(name, share, at_random, seed, options.data_dir) for seed in range(SEEDS)]
                ahead += [straight - means for straight, means, _ in each]
                how = f"{share:.0%} missing{'' if at_random else ', large values more often'}"
                shown = ["-" if np.isnan(mean) else f"{mean:.1f}" for mean in np.mean(each, 0)]
                table.add(f"R², {name}", how, " / ".join(shown))
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
