"""A raw table is read once in a fit, a command or a report, and the features of its training rows are made once."""

from collections import Counter

import jax
import pytest

import jtrees
from jtrees.estimators import BoostedClassifier, BoostedRegressor, TreeClassifier, TreeRegressor
from jtrees.tables import TableEncoder, frame, inference
from tests.houses import dated, houses, run

pytestmark = pytest.mark.usefixtures("standard_promotion")  # fits with Adam

STUMP = jtrees.GET(depth=1, starts=1, epochs=4)
TABLE = houses(60)
X, Y = dated(TABLE).drop(columns=["id", "price", "verdict"]), TABLE["price"].to_numpy()


@pytest.fixture
def counts(monkeypatch):
    """Counts the columns that are read, described and converted, and the times that training features are made."""
    counts = Counter()

    def count(owner, name, title):
        original = getattr(owner, name)

        def counted(*args, **options):
            counts[title] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(frame, "_read_series", "read")
    count(frame.ColumnSchema, "convert", "converted")
    count(inference, "_described", "described")
    count(TableEncoder, "of_rows", "encoded")
    for estimator in (TreeRegressor, TreeClassifier):
        monkeypatch.setattr(estimator, "default_recipe", STUMP)
    for estimator in (BoostedRegressor, BoostedClassifier):
        monkeypatch.setattr(estimator, "default_recipe", jtrees.Boosted(STUMP, rounds=2))
    return counts


def test_a_fit_reads_and_describes_each_column_once(counts):
    jtrees.fit(STUMP, X, Y, key=jax.random.key(0))
    assert counts == {"read": 3, "described": 3, "encoded": 1}


@pytest.mark.parametrize("how", ["described", "converted"])
def test_an_estimator_reads_each_column_once(counts, how):
    columns = jtrees.tables.schema(X) if how == "converted" else None
    counts.clear()
    assert TreeRegressor(columns=columns).fit(X, Y).feature_importances_.shape == (3,)
    assert counts == {"read": 3, how: 3, "encoded": 1}


@pytest.mark.parametrize(("command", "encoded"), [("fit", 2), pytest.param("report", 1, marks=pytest.mark.slow)])
def test_a_command_reads_each_column_once(counts, tmp_path, command, encoded):
    """A command fits to the training rows, and ``jtrees fit`` then to all rows."""
    TABLE.drop(columns="verdict").to_csv(tmp_path / "houses.csv", index=False)
    recipe = ["--recipe", "GET", "--set", "depth=1", "starts=1", "epochs=4"]
    assert run(command, tmp_path / "houses.csv", "--target", "price", "--out", tmp_path / "out", *recipe) == 0
    assert counts == {"read": 4, "described": 4, "encoded": encoded}
