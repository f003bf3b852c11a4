"""One module for each paper, with its method for :func:`jtrees.train` and its recipe."""

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
from jtrees.methods.dgt import DGT as DGT, ChainedTree as ChainedTree, dgt as dgt
from jtrees.methods.get import GET as GET, get as get
from jtrees.methods.latent import (
    Architecture as Architecture,
    LatentModel as LatentModel,
    LatentTree as LatentTree,
    latent as latent,
)
from jtrees.methods.nongreedy import CO2 as CO2, NonGreedy as NonGreedy, nongreedy as nongreedy
from jtrees.methods.raddt import RADDT as RADDT, raddt as raddt
from jtrees.methods.tel import TEL as TEL, Ensemble as Ensemble, EnsembleModel as EnsembleModel, tel as tel
