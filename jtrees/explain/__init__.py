"""Explanations of predictions: the path of a sample, the nearest change of it, and what each column is worth.

Functions take a fitted model, such as ``result.model`` or an estimator's ``model_``, and rows as it does. Models of raw
tables are explained by column: the levels of a category, or a value and whether it is missing, belong together.
"""

from jtrees._public import list_public_names as _list_public_names
from jtrees.explain.changes import Change as Change, nearest_change as nearest_change
from jtrees.explain.importance import permutation_importance as permutation_importance
from jtrees.explain.paths import Path as Path, Split as Split, path as path
from jtrees.explain.shapley import Shapley as Shapley, shapley_values as shapley_values

_list_public_names()
