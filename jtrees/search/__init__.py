"""Recipes, the searches over scaled data that they define, and the driver that runs them in rounds."""

from jtrees.search.recipe import (
    Finished as Finished,
    Recipe as Recipe,
    Round as Round,
    Rounds as Rounds,
    Search as Search,
    SearchResult as SearchResult,
    check_finite as check_finite,
    finished_tree as finished_tree,
)

from jtrees.search import options as options  # isort: skip
from jtrees.search._first_step import by_first_step as by_first_step  # isort: skip
from jtrees.search._minibatch import Schedule as Schedule, minibatch as minibatch  # isort: skip
from jtrees.search._precondition import preconditioned as preconditioned  # isort: skip
from jtrees.search._restarts import restarts as restarts  # isort: skip
