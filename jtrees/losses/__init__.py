"""Losses: of samples, as pure functions; and of tasks, with the link, derivatives and best constants of each."""

from jtrees.losses.quantiles import weighted_quantiles as weighted_quantiles
from jtrees.losses.regression import (
    AbsoluteError as AbsoluteError,
    Gamma as Gamma,
    Huber as Huber,
    Link as Link,
    LogLoss as LogLoss,
    Loss as Loss,
    OwnLoss as OwnLoss,
    Poisson as Poisson,
    Quantile as Quantile,
    Rewards as Rewards,
    SquaredError as SquaredError,
    Tweedie as Tweedie,
    linked as linked,
    named as named,
)
from jtrees.losses.samples import (
    SampleLoss as SampleLoss,
    check_without_link as check_without_link,
    log_loss as log_loss,
    own_loss as own_loss,
    squared_error as squared_error,
    weighted_mean as weighted_mean,
)
