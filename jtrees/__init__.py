"""Decision trees trained by gradient descent: a small set of pure functions that compose, compile and vmap."""

from jtrees import (
    data as data,
    explain as explain,
    export as export,
    io as io,
    isotonic as isotonic,
    leaves as leaves,
    losses as losses,
    methods as methods,
    nn as nn,
    ops as ops,
    plotting as plotting,
    routing as routing,
    search as search,
    sharding as sharding,
    tasks as tasks,
    topology as topology,
    training as training,
    warmstart as warmstart,
)
from jtrees._public import list_public_names as _list_public_names
from jtrees.ensembles import (
    Bagged as Bagged,
    BestOf as BestOf,
    Boosted as Boosted,
    Polished as Polished,
    Refined as Refined,
    Sparse as Sparse,
)
from jtrees.forest import Forest as Forest
from jtrees.io import load as load, save as save
from jtrees.methods import (
    CO2 as CO2,
    DGT as DGT,
    GET as GET,
    RADDT as RADDT,
    TEL as TEL,
    LatentClustering as LatentClustering,
    LatentTree as LatentTree,
    NonGreedy as NonGreedy,
)
from jtrees.search import Recipe as Recipe
from jtrees.search.fit import FitResult as FitResult, fit as fit
from jtrees.search.from_method import FromMethod as FromMethod
from jtrees.selection import SweepResult as SweepResult, sweep as sweep, tune as tune
from jtrees.soft_model import SoftModel as SoftModel
from jtrees.tasks import Classification as Classification, Policy as Policy, Regression as Regression
from jtrees.training import Batch as Batch, Method as Method, train as train
from jtrees.tree import ObliqueTree as ObliqueTree, Origin as Origin

__version__ = "0.1.0"
_list_public_names()
