"""Recipes, their searches, the engine that runs searches side by side, and the driver that fits recipes."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.search.engine import MOST as MOST, Engine as Engine
from jtrees.search.problem import (
    DeviceValue as DeviceValue,
    Fitted as Fitted,
    LeftOut as LeftOut,
    OutOfTimeError as OutOfTimeError,
    Problem as Problem,
    Trained as Trained,
    gather as gather,
)
from jtrees.search.recipe import Recipe as Recipe, fitted_tree as fitted_tree
from jtrees.search.report import (
    FitReport as FitReport,
    Preconditioning as Preconditioning,
    Report as Report,
    TrainingReport as TrainingReport,
    Trial as Trial,
    Tuning as Tuning,
)
from jtrees.search.run import Evaluation as Evaluation, Run as Run

from jtrees.search import options as options  # isort: skip
from jtrees.search.options import Ranges as Ranges, checked_values as checked_values, option as option  # isort: skip
from jtrees.search.minibatch import (  # isort: skip
    MiniBatchRecipe as MiniBatchRecipe,
    NetworkRecipe as NetworkRecipe,
    Schedule as Schedule,
    trained as trained,
)
from jtrees.search.precondition import (  # isort: skip
    Preconditioned as Preconditioned,
    preconditioned as preconditioned,
)

from jtrees.search.sample import fold_rows as fold_rows  # isort: skip

_list_public_names(__name__)
