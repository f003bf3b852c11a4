"""Routing maps the scores of splits to leaves. Each kind of routing has its own module."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.routing.conditional import (
    conditional_ensemble as conditional_ensemble,
    reachable_leaves as reachable_leaves,
)
from jtrees.routing.entmax import entmax as entmax, entmax_step as entmax_step
from jtrees.routing.hard import leaf_index as leaf_index
from jtrees.routing.path_sum import mean_size as mean_size, path_sum as path_sum
from jtrees.routing.soft import (
    expected_value as expected_value,
    leaf_probabilities as leaf_probabilities,
    reach_probabilities as reach_probabilities,
)
from jtrees.routing.steps import smooth_step as smooth_step
from jtrees.routing.traversal import (
    activity as activity,
    position as position,
    rewards as rewards,
)
from jtrees.routing.violation import path_violations as path_violations, violation as violation

_list_public_names(__name__)
