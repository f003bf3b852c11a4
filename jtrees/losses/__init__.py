"""Losses of samples as pure functions, and losses of tasks with links, derivatives and best constants.

The module also has fits of leaf values: means, and constants by Newton steps.
"""

from jtrees._public import list_public_names as _list_public_names
from jtrees.tasks.base import Link as Link, Loss as Loss, mean_loss as mean_loss, weighted_mean as weighted_mean
from jtrees.tasks.classes import (
    Frequencies as Frequencies,
    LogLoss as LogLoss,
    Rewards as Rewards,
    log_loss as log_loss,
)
from jtrees.tasks.custom import CustomLoss as CustomLoss
from jtrees.tasks.deviances import Gamma as Gamma, Poisson as Poisson, Tweedie as Tweedie
from jtrees.tasks.errors import (
    AbsoluteError as AbsoluteError,
    Huber as Huber,
    Quantile as Quantile,
    SquaredError as SquaredError,
)
from jtrees.tasks.fits import fit_constant as fit_constant, newton_constants as newton_constants

_list_public_names(__name__, home="jtrees.tasks")
