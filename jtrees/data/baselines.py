"""The warning of fits that are behind a baseline."""


class BehindBaselineWarning(UserWarning):
    """A model has a higher loss than a linear model or a constant."""
