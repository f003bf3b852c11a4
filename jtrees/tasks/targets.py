"""Tasks by name, with their checked targets."""

from typing import Any

import numpy as np

from jtrees import validation as checks
from jtrees.tasks import labels
from jtrees.tasks.choices import Classification
from jtrees.tasks.regression import Regression
from jtrees.tasks.task import Task


def checked_targets(task: str | Task, y: Any, n: int) -> tuple[Task, np.ndarray]:
    """Returns the task, and the checked training targets of n samples.

    Args:
      task: a task, or ``"regression"`` or ``"classification"``. If a name is given, the number of outputs or classes is
        inferred from y.
      y: targets.
      n: number of samples.

    Raises:
      ValueError: for an unknown task, or for targets that do not fit the task. If the number of classes is inferred,
        every class up to the largest label must be present.
    """
    if isinstance(task, Task):
        return task, task.targets(y, n)
    checks.check_choice("task", task, ("regression", "classification"), "a task such as jtrees.Classification(3)")
    if task == "classification":
        y = labels.checked_classes(y)
        task = Classification(y.shape[1] if labels.is_soft(y) else int(y.max()) + 1)
    else:
        task = Regression(*checks.check_targets(y, n).shape[1:])
    return task, task.targets(y, n)
