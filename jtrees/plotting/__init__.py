"""Plots trees and fits on matplotlib axes (needs ``pip install "jtrees[plots]"``)."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.plotting.charts import (
    plot_importances as plot_importances,
    plot_learning_curve as plot_learning_curve,
    plot_leaves as plot_leaves,
    plot_regions as plot_regions,
    plot_splits as plot_splits,
)
from jtrees.plotting.sweeps import plot_sweep as plot_sweep
from jtrees.plotting.trees import plot_tree as plot_tree

_list_public_names()
