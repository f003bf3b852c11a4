"""Plots trees and their splits on matplotlib axes (needs ``pip install "jtrees[plots]"``)."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.plotting.splits import plot_splits as plot_splits
from jtrees.plotting.sweeps import plot_sweep as plot_sweep
from jtrees.plotting.trees import plot_tree as plot_tree

_list_public_names(__name__)
