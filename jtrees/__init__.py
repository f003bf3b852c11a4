"""Decision trees learnt by gradients: a small set of pure functions that compose, compile and vmap."""

from jtrees import (
    leaves as leaves,
    losses as losses,
    plotting as plotting,
    routing as routing,
    topology as topology,
    validation as validation,
    warmstart as warmstart,
)
from jtrees.methods.annealing import FitReport as FitReport, FitResult as FitResult
from jtrees.methods.get import fit_get as fit_get, get as get
from jtrees.methods.polish import PolishResult as PolishResult, polish as polish
from jtrees.methods.raddt import fit_raddt as fit_raddt, raddt as raddt
from jtrees.training import (
    Method as Method,
    MultiStart as MultiStart,
    TrainResult as TrainResult,
    multi_start as multi_start,
    train as train,
)
from jtrees.tree import ConstantLeaves as ConstantLeaves, LinearLeaves as LinearLeaves, ObliqueTree as ObliqueTree

__version__ = "0.1.0"
