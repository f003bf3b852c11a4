"""The public names of jtrees. They import JAX, so ``jtrees`` imports this module at the first use of a name."""

from jtrees import (
    data as data,
    distributed as distributed,
    io as io,
    isotonic as isotonic,
    leaves as leaves,
    losses as losses,
    methods as methods,
    ops as ops,
    report as report,
    routing as routing,
    search as search,
    sharding as sharding,
    tables as tables,
    tasks as tasks,
    topology as topology,
    training as training,
    warmstart as warmstart,
)
from jtrees.caching import cache as cache
from jtrees.distillation import DistillResult as DistillResult, distill as distill
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
    GRANDE as GRANDE,
    NODE as NODE,
    RADDT as RADDT,
    TEL as TEL,
    DTSemNet as DTSemNet,
    LatentClustering as LatentClustering,
    LatentTree as LatentTree,
    NonGreedy as NonGreedy,
    SoftDecisionTree as SoftDecisionTree,
)
from jtrees.search import Recipe as Recipe
from jtrees.search.fit import FitResult as FitResult, fit as fit
from jtrees.search.from_method import FromMethod as FromMethod
from jtrees.search.warmup import warmup as warmup
from jtrees.selection import (
    LogUniform as LogUniform,
    SweepResult as SweepResult,
    Uniform as Uniform,
    sweep as sweep,
    tune as tune,
)
from jtrees.soft_model import SoftModel as SoftModel
from jtrees.tasks import Classification as Classification, Policy as Policy, Regression as Regression
from jtrees.training import Batch as Batch, Method as Method, train as train
from jtrees.tree import ObliqueTree as ObliqueTree, Origin as Origin
