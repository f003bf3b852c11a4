"""The comparison of a model with simpler models: verdicts of fits and of the command line, and the report as a page.

Every fit is compared with a constant and a linear model. The command line and its report also compare with models of
scikit-learn, on held-out rows.
"""

from jtrees._public import list_public_names as _list_public_names
from jtrees.report.comparison import (
    BehindBaselineWarning as BehindBaselineWarning,
    Comparison as Comparison,
    compared as compared,
)

_list_public_names(__name__)
