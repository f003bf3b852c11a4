"""A raw table, and the command line, for the tests of commands and of reports."""

import numpy as np
import pandas as pd

from jtrees import cli

QUICK = ["--set", "depth=2", "starts=2", "epochs=30"]
TREE = ["--tree", *QUICK]


def houses(n=300):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "id": [f"house {i}" for i in range(n)],
            "area": rng.uniform(20, 200, n).round(1),
            "heating": rng.choice(["gas", "wood", "oil & <b>"], n),
            "offered": (np.datetime64("2020-01-01") + rng.integers(0, 900, n)).astype(str),
        }
    )
    frame["price"] = (frame["area"] * 2 + 50 * (frame["heating"] == "gas") + rng.normal(size=n)).round(2)
    frame["verdict"] = np.where(frame["price"] > 250, "sold", "not yet")
    frame.loc[::9, "area"] = np.nan
    return frame


def dated(frame):
    """The table with its dates, which a CSV has as text."""
    return frame.assign(offered=pd.to_datetime(frame["offered"]))


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])
