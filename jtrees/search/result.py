"""The result of a fit, in the user's units."""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jtrees import io, pytree, validation as checks
from jtrees.description import kind_of
from jtrees.search.recipe import Recipe
from jtrees.search.report import FitReport
from jtrees.tree import ObliqueTree


@io.model
@pytree.dataclass
class FitResult:
    """The result of :func:`fit`, in the user's units.

    Attributes:
      model: the fitted model. ``model.predict(x)`` returns predictions of y, or class probabilities ``(n, K)``. For a
        raw table (a DataFrame, or an array with NaN), the model is a :class:`jtrees.tables.FrameModel`.
      tree: the model if it is a :class:`jtrees.ObliqueTree`, else None. For a raw table, the tree of the features
        that its columns become.
      loss: the mean loss of the task by which the model was chosen, such as the mean squared error or the log loss.
        For several targets, the mean squared error is computed on targets scaled to [0, 1]. The loss is on
        ``validation`` if given, else on the training data. Recipes document exceptions.
      step: number of updates before the model was evaluated.
      history: training loss before each update, on scaled data. The last axis counts updates, up to the longest run.
        An entry is NaN if the run did not make the update.
      report: how the fit went; ``report.search`` is the report of the recipe.
    """

    model: Any
    tree: ObliqueTree | None
    loss: float
    step: int
    history: np.ndarray
    report: FitReport = pytree.field(pytree_node=False)

    def predict(self, x: Any) -> Any:
        """Returns the predictions of the model: short for ``fit.model.predict(x)``."""
        return self.model.predict(x)

    def to_text(self, *args: Any, **shown: Any) -> str:
        """Returns the kind of the tree, on a line that begins with ``#``, and the rules of the tree.

        The arguments are passed to :meth:`jtrees.ObliqueTree.to_text`. ``fit.model.to_text`` returns the rules without
        the kind.

        Raises:
          ValueError: if the model is not a single tree. Also in the cases of :meth:`jtrees.ObliqueTree.to_text`.
        """
        if self.tree is None:
            raise ValueError(f"model must be a single tree to have rules, got {checks.quoted(self.model)}")
        return f"# {self.kind}\n{self.model.to_text(*args, **shown)}"

    @property
    def kind(self) -> str:
        """Description of the tree and of the search for it; for a model that is not a tree, its ``repr``."""
        if self.tree is None:
            return repr(self.model)
        return kind_of(self.tree, self.report.chosen)

    def to_save(self) -> "FitResult":
        """Returns the fit with tuned options in a form that can be saved: a function becomes its name."""
        if (tuning := self.report.tuning) is None:
            return self
        trials = [trial._replace(options=_plain_options(trial.options)) for trial in tuning.trials]
        tuning = tuning.replace(options=_plain_options(tuning.options), trials=trials)
        return self.replace(report=self.report.replace(tuning=tuning))

    def __str__(self) -> str:
        lines = [f"model: {self.model!r}", f"tree: {self.kind}" if self.tree is not None else None]
        lines += [self.report.verdict, self._numbers()]
        return "\n".join(line for line in lines if line is not None)

    def __repr__(self) -> str:
        return f"FitResult(model={self.model!r}, {self._numbers()})"

    def _numbers(self) -> str:
        end = "" if self.report.ended == "finished" else f"ended={self.report.ended}, "
        return f"loss={self.loss}, step={self.step}, {end}report: {', '.join(self.report.names())}"


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value if io.is_data(value) else plain(value) for name, value in options.items()}


def described(recipe: Recipe) -> dict[str, Any]:
    """Returns the name and options of a recipe as plain data."""
    fields = dataclasses.fields(recipe)  # pyright: ignore[reportArgumentType]
    return {"name": type(recipe).__name__} | {field.name: plain(getattr(recipe, field.name)) for field in fields}


def plain(value: Any) -> Any:
    """Returns a value as plain data: a recipe becomes its name and options, a function becomes its name."""
    if isinstance(value, Recipe):
        return described(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, functools.partial):
        arguments = [str(plain(item)) for item in value.args]
        arguments += [f"{name}={plain(item)}" for name, item in value.keywords.items()]
        return f"{plain(value.func)}({', '.join(arguments)})"
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)
