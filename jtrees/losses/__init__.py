"""Losses of samples as pure functions, and losses of tasks with links, derivatives and best constants.

The package also computes means, class frequencies and quantiles of the targets in each leaf.
"""

from jtrees.losses.base import Link as Link, Loss as Loss
from jtrees.losses.choices import Frequencies as Frequencies, LogLoss as LogLoss, Rewards as Rewards
from jtrees.losses.deviances import Gamma as Gamma, Poisson as Poisson, Tweedie as Tweedie
from jtrees.losses.errors import (
    AbsoluteError as AbsoluteError,
    Huber as Huber,
    Quantile as Quantile,
    SquaredError as SquaredError,
)
from jtrees.losses.frequencies import class_counts as class_counts, fit_frequencies as fit_frequencies
from jtrees.losses.means import fit_constant as fit_constant
from jtrees.losses.newton import newton_constants as newton_constants
from jtrees.losses.own import OwnLoss as OwnLoss
from jtrees.losses.quantiles import weighted_quantiles as weighted_quantiles
from jtrees.losses.samples import (
    log_loss as log_loss,
    mean_loss as mean_loss,
    weighted_mean as weighted_mean,
)
