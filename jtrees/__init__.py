"""Decision trees learnt by gradients: a small set of pure functions that compose, compile and vmap."""

from jtrees import (
    isotonic as isotonic,
    leaves as leaves,
    losses as losses,
    nn as nn,
    plotting as plotting,
    routing as routing,
    topology as topology,
    validation as validation,
    warmstart as warmstart,
)
from jtrees.methods.annealing import FitReport as FitReport, FitResult as FitResult
from jtrees.methods.bandit import (
    Bandit as Bandit,
    BanditRun as BanditRun,
    BanditState as BanditState,
    bandit_classifier as bandit_classifier,
    bandit_regressor as bandit_regressor,
    run_bandit as run_bandit,
    two_rates as two_rates,
)
from jtrees.methods.clustering import (
    ClusteringResult as ClusteringResult,
    dendrogram_purity as dendrogram_purity,
    fit_latent_clustering as fit_latent_clustering,
)
from jtrees.methods.dgt import (
    ChainedTree as ChainedTree,
    DGTForestResult as DGTForestResult,
    DGTResult as DGTResult,
    dgt as dgt,
    fit_dgt as fit_dgt,
    fit_dgt_forest as fit_dgt_forest,
    pat as pat,
)
from jtrees.methods.forest import Forest as Forest, ForestResult as ForestResult, train_forest as train_forest
from jtrees.methods.get import fit_get as fit_get, get as get
from jtrees.methods.latent import (
    LatentModel as LatentModel,
    LatentResult as LatentResult,
    fit_latent as fit_latent,
    latent as latent,
)
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
