"""Recipes with a budget that passes scikit-learn's checks."""

import jtrees

_GET = jtrees.GET(depth=2, starts=1, epochs=30)
_DGT = jtrees.DGT(depth=3, epochs=60, widths=())
_WEAK = jtrees.GET(depth=2, starts=1, epochs=10, cart="binned", halving=False, precondition=0, shrink=False)

QUICK = [_DGT]
OTHERS = [
    _GET,
    jtrees.RADDT(depth=2, starts=1, epochs=10),
    jtrees.LatentTree(depth=2, epochs=60),
    jtrees.TEL(depth=3, trees=5, epochs=60),
    jtrees.CO2(depth=3, epochs=20),
    jtrees.NonGreedy(depth=3, greedy_epochs=10, epochs=30),
]
COMBINATORS = [
    jtrees.Boosted(_WEAK, rounds=10, learning_rate=0.5, patience=None),
    jtrees.Bagged(_DGT, trees=3),
    jtrees.BestOf(_DGT, runs=2),
    jtrees.Polished(_GET, epochs=10),
    jtrees.Sparse(_DGT, terms=2, epochs=10),
]
