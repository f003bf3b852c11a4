"""One paper's recipe each."""

from jtrees.methods.get import FitResult as FitResult, GetReport as GetReport, fit_get as fit_get, get as get
