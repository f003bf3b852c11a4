"""One module or package for each paper, with its method for :func:`jtrees.train` and its recipe."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.methods.annealed.get import GET as GET, get as get
from jtrees.methods.annealed.raddt import RADDT as RADDT, raddt as raddt
from jtrees.methods.annealed.result import AnnealedReport as AnnealedReport
from jtrees.methods.bandit import (
    Bandit as Bandit,
    BanditState as BanditState,
    bandit_classifier as bandit_classifier,
    bandit_regressor as bandit_regressor,
    two_rates as two_rates,
)
from jtrees.methods.bandit_stream import BanditRun as BanditRun, run_bandit as run_bandit
from jtrees.methods.clustering import LatentClustering as LatentClustering
from jtrees.methods.dgt import DGT as DGT, ChainedTree as ChainedTree, dgt as dgt
from jtrees.methods.dtsemnet import DTSemNet as DTSemNet, dtsemnet as dtsemnet
from jtrees.methods.grande import GRANDE as GRANDE, grande as grande
from jtrees.methods.latent_tree.architecture import Architecture as Architecture
from jtrees.methods.latent_tree.latent import (
    LatentModel as LatentModel,
    LatentTree as LatentTree,
    latent as latent,
)
from jtrees.methods.node import NODE as NODE, node as node
from jtrees.methods.nongreedy_tree.co2 import CO2 as CO2, GreedyReport as GreedyReport
from jtrees.methods.nongreedy_tree.nongreedy import NonGreedy as NonGreedy, nongreedy as nongreedy
from jtrees.methods.soft_decision_tree import (
    SoftDecisionTree as SoftDecisionTree,
    soft_decision_tree as soft_decision_tree,
)
from jtrees.methods.tree_ensemble.ensemble import Ensemble as Ensemble
from jtrees.methods.tree_ensemble.tel import (
    TEL as TEL,
    tel as tel,
)

_list_public_names(__name__)
