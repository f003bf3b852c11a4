"""Tasks and their losses: what is predicted, and what a prediction costs. :mod:`jtrees.losses` has the losses."""

from jtrees.tasks.task import (
    Classification as Classification,
    Policy as Policy,
    Regression as Regression,
    Task as Task,
    check_log_loss as check_log_loss,
    checked_targets as checked_targets,
)
