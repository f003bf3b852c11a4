"""Decision trees learnt by gradients: a small set of pure functions that compose, compile and vmap."""

from jtrees import (
    io as io,
    isotonic as isotonic,
    leaves as leaves,
    losses as losses,
    nn as nn,
    ops as ops,
    plotting as plotting,
    routing as routing,
    sharding as sharding,
    splitting as splitting,
    topology as topology,
    validation as validation,
    warmstart as warmstart,
)
from jtrees.bagging import Bagged as Bagged
from jtrees.forest import Forest as Forest
from jtrees.io import load as load, save as save
from jtrees.methods.bandit import (
    Bandit as Bandit,
    BanditRun as BanditRun,
    BanditState as BanditState,
    bandit_classifier as bandit_classifier,
    bandit_regressor as bandit_regressor,
    run_bandit as run_bandit,
    two_rates as two_rates,
)
from jtrees.methods.clustering import LatentClustering as LatentClustering, dendrogram_purity as dendrogram_purity
from jtrees.methods.co2 import CO2 as CO2
from jtrees.methods.dgt import DGT as DGT, PAT as PAT, ChainedTree as ChainedTree, dgt as dgt, pat as pat
from jtrees.methods.get import GET as GET, get as get
from jtrees.methods.latent import (
    Architecture as Architecture,
    LatentModel as LatentModel,
    LatentTree as LatentTree,
    latent as latent,
)
from jtrees.methods.lazy_adam import lazy_adam as lazy_adam
from jtrees.methods.lazy_momentum import lazy_momentum as lazy_momentum
from jtrees.methods.nongreedy import NonGreedy as NonGreedy, nongreedy as nongreedy
from jtrees.methods.polish import Polished as Polished
from jtrees.methods.raddt import RADDT as RADDT, raddt as raddt
from jtrees.methods.tel import TEL as TEL, Ensemble as Ensemble, EnsembleModel as EnsembleModel, tel as tel
from jtrees.methods.trained import Trained as Trained
from jtrees.recipes import Fit as Fit, Found as Found, Recipe as Recipe, fit as fit
from jtrees.starts import MultiStart as MultiStart, map_starts as map_starts, multi_start as multi_start
from jtrees.sweep import SweepResult as SweepResult, sweep as sweep
from jtrees.tasks import Classification as Classification, Regression as Regression
from jtrees.training import (
    Batch as Batch,
    Best as Best,
    Method as Method,
    TrainResult as TrainResult,
    TrainState as TrainState,
    advance as advance,
    best as best,
    start as start,
    train as train,
)
from jtrees.tree import ObliqueTree as ObliqueTree, Origin as Origin
from jtrees.tune import Trial as Trial, tune as tune

__version__ = "0.1.0"
