"""Recipes over other recipes: bagging, boosting, joint training, the best run, subtree polish, splits of few terms."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.ensembles.bagged import Bagged as Bagged, BaggedReport as BaggedReport
from jtrees.ensembles.best_of import BestOf as BestOf, BestOfReport as BestOfReport
from jtrees.ensembles.boosted import Boosted as Boosted, BoostedReport as BoostedReport
from jtrees.ensembles.polished import Polished as Polished, PolishedReport as PolishedReport
from jtrees.ensembles.refined import Refined as Refined, RefinedReport as RefinedReport
from jtrees.ensembles.sparse import Sparse as Sparse, SparseReport as SparseReport

_list_public_names(__name__)
