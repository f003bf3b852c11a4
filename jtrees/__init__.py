"""Decision trees trained by gradient descent: a small set of pure functions that compose, compile and vmap."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

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
from jtrees._public import list_public_names as _list_public_names
from jtrees.caching import cache as cache, cache_by_environment as _cache_by_environment
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

if _TYPE_CHECKING:
    from jtrees import explain as explain, export as export, kernels as kernels, nn as nn, plotting as plotting

__version__ = "0.1.0"
_LATER = ("estimators", "explain", "export", "kernels", "nn", "plotting")  # packages that are imported on first use
_list_public_names()
_cache_by_environment()


def __getattr__(name: str) -> object:
    if name in _LATER:
        return _importlib.import_module(f"jtrees.{name}")
    raise AttributeError(f"module 'jtrees' has no attribute {name!r:.80}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
