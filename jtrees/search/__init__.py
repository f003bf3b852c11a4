"""Recipes, the runs that their searches train, and the driver that fits them."""

from jtrees.search.recipe import (
    Finished as Finished,
    HeldOut as HeldOut,
    LeftOut as LeftOut,
    Recipe as Recipe,
    SearchResult as SearchResult,
    check_finite as check_finite,
    finished_tree as finished_tree,
)
from jtrees.search.report import (
    FitReport as FitReport,
    Preconditioning as Preconditioning,
    Report as Report,
    TreeReport as TreeReport,
    Trial as Trial,
    Tuning as Tuning,
)
from jtrees.search.runs import Run as Run, Runs as Runs, Stacked as Stacked, Trained as Trained

from jtrees.search import options as options  # isort: skip
from jtrees.search.minibatch import (  # isort: skip
    Schedule as Schedule,
    Training as Training,
    advanced as advanced,
    initial as initial,
    result_of as result_of,
    trained as trained,
)
from jtrees.search.precondition import held_out_rows as held_out_rows, preconditioned as preconditioned  # isort: skip
