"""Recipes over other recipes: bagging, the best of several runs, subtree polish, splits of few terms."""

from jtrees.ensembles.bagged import Bagged as Bagged
from jtrees.ensembles.best_of import BestOf as BestOf
from jtrees.ensembles.boosted import Boosted as Boosted
from jtrees.ensembles.polished import Polished as Polished
from jtrees.ensembles.refined import Refined as Refined
from jtrees.ensembles.sparse import Sparse as Sparse
