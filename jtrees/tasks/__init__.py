"""Tasks and their losses: what is predicted, and what a prediction costs. :mod:`jtrees.losses` has the losses."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.tasks.choices import Classification as Classification, Policy as Policy, check_log_loss as check_log_loss
from jtrees.tasks.regression import Regression as Regression
from jtrees.tasks.targets import checked_targets as checked_targets
from jtrees.tasks.task import Task as Task

_list_public_names(__name__)
