"""Explains predictions: the path of a sample, the nearest change of a sample, and the importance of columns.

Functions take a fitted model, such as ``result.model`` or an estimator's ``model_``, and rows in the form that the
model accepts. Models of raw tables are explained by column. All features of a column belong together: the levels of a
category, or a value and its indicator for missing values.
"""

from jtrees._public import list_public_names as _list_public_names
from jtrees.explain.changes import Change as Change, nearest_change as nearest_change
from jtrees.explain.importance import permutation_importance as permutation_importance
from jtrees.explain.paths import Path as Path, Split as Split, path as path
from jtrees.explain.shapley import Shapley as Shapley, shapley_values as shapley_values

_list_public_names(__name__)
