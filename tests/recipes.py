"""Recipes that tests share, each with the smallest budget. A test that needs another budget replaces an option."""

from flax.core import FrozenDict

import jtrees


def get_of_depth_2(**options):
    """A method that a user has written."""
    return jtrees.methods.get(2, **options)


GET = jtrees.GET(depth=2, starts=1, epochs=4)
STARTS = GET.replace(starts=2)
LINEAR = GET.replace(leaves="linear")
WEAK = GET.replace(cart="binned", precondition=0)  # a base that Boosted trains in compiled rounds
DGT = jtrees.DGT(depth=2, epochs=4, batch_size=100, widths=(), cycles=1)
TEL = jtrees.TEL(depth=2, epochs=4, batch_size=100, trees=3)
CO2 = jtrees.CO2(depth=2, epochs=4, batch_size=100)
BOOSTED = jtrees.Boosted(WEAK, rounds=3)
BAGGED = jtrees.Bagged(DGT, trees=2)

# A recipe of each class, by the name of the class.
RECIPES = {
    "GET": STARTS,
    "RADDT": jtrees.RADDT(depth=2, starts=2, epochs=4),
    "DGT": DGT.replace(widths=(4,), cycles=2),
    "FromMethod": jtrees.FromMethod(make=get_of_depth_2, options=FrozenDict(alpha=15.0), epochs=4, batch_size=100),
    "LatentTree": jtrees.LatentTree(depth=3, epochs=4, batch_size=50),
    "TEL": TEL,
    "NODE": jtrees.NODE(depth=2, epochs=4, batch_size=100, trees=3, layers=2),
    "GRANDE": jtrees.GRANDE(depth=2, epochs=4, batch_size=100, trees=3),
    "DTSemNet": jtrees.DTSemNet(depth=2, epochs=4, batch_size=100),
    "SoftDecisionTree": jtrees.SoftDecisionTree(depth=2, epochs=4, batch_size=100, starts=2),
    "CO2": CO2,
    "NonGreedy": jtrees.NonGreedy(depth=2, epochs=4, batch_size=100, greedy_epochs=2),
    "LatentClustering": jtrees.LatentClustering(depth=2, epochs=4, batch_size=100, penalty=0.1),
    "Bagged": BAGGED,
    "BestOf": jtrees.BestOf(DGT, runs=2),
    "Boosted": BOOSTED,
    "Polished": jtrees.Polished(DGT.replace(depth=1), epochs=4),
    "Refined": jtrees.Refined(BOOSTED, epochs=2),
    "Sparse": jtrees.Sparse(DGT, terms=2, epochs=4),
}
