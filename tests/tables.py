"""Tables that tests share. They have one number of rows and of features, so tests share compiled programs."""

import numpy as np

ROWS, FEATURES = 400, 4

_rng = np.random.default_rng(0)
X = _rng.normal(size=(ROWS, FEATURES))
Y = np.where(X[:, 0] + X[:, 1] > 0, 2.0, -1.0) + X[:, 2]  # an oblique split, and a slope
BINARY = (X[:, 0] + X[:, 1] > 0).astype(int)
CLASSES = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)  # three of them
COUNTS = _rng.poisson(np.exp(0.5 * X[:, 0])).astype(float)
GAPS = np.where(_rng.uniform(size=X.shape) < 0.1, np.nan, X)
WEIGHTS = _rng.uniform(0.5, 2.0, ROWS)

# The targets of a task by its name.
TARGETS = {"regression": Y, "two outputs": np.stack([Y, X[:, 3]], axis=1), "binary": BINARY, "classes": CLASSES}


def frame(rows: int = ROWS):
    """A DataFrame with numbers, gaps, text, dates and booleans; its target is ``TARGETS["regression"]``."""
    import pandas as pd

    rng = np.random.default_rng(1)
    columns = {
        "size": X[:, 0],
        "age": GAPS[:, 1],
        "town": rng.choice(["Bonn", "Rome", "Lima"], ROWS),
        "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 700, ROWS), unit="D"),
        "new": rng.uniform(size=ROWS) < 0.5,
    }
    return pd.DataFrame(columns).head(rows)
