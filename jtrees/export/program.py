"""A tree or a forest, and the columns of a raw table, as plain arrays: the common part of all export formats."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrees import exact, losses, prediction
from jtrees.forest import Forest, votes
from jtrees.leaves import Linear, Values
from jtrees.tables import FrameModel, TableEncoder
from jtrees.tables.cells import missing_numbers
from jtrees.tables.frame import ColumnSchema, Frame, RawColumn
from jtrees.tables.program import Operation
from jtrees.tasks.base import linked
from jtrees.tree import ObliqueTree
from jtrees.validation import hint_of_estimator, quoted

_ARRAYS = ("weights", "bias", "intercept", "coefficients", "lower", "upper", "zero", "offset", "medians")
_TESTED = 10  # rows of a self-test
_CALENDAR = -719_161, 2_932_895  # days since 1970 of the years 1 to 9999, less a day for time zones
MICROSECONDS = 86_400_000_000  # microseconds in a day; durations are whole microseconds


class Field(NamedTuple):
    """A column that the model uses.

    Attributes:
      name: name of the column.
      place: position of the column in the raw table.
      column: what the column holds.
      operations: the program of the column.
      missing: texts that mean a missing value.
    """

    name: str
    place: int
    column: ColumnSchema
    operations: tuple[Operation, ...]
    missing: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """``"number"``, ``"boolean"``, ``"date"`` (days since 1970) or ``"text"``."""
        return self.column.kind

    @property
    def missing_numbers(self) -> tuple[float, ...]:
        """The numbers that mean a missing value in a column of numbers."""
        return missing_numbers(self.missing) if self.column.value_kind == "number" else ()


def fields_of(encoder: TableEncoder) -> list[Field]:
    """Returns the columns that a model uses, in the order of their features.

    Raises ``ValueError`` for levels in an array, because files find the columns of arrays by position, as numbers.
    """
    schema, fields = encoder.schema, []
    if not schema.named and (text := [name for name, c in schema.used.items() if c.kind == "text"]):
        raise ValueError(f"levels must be in a table with names, such as a DataFrame, got the column {quoted(text[0])}")
    for place, (name, column) in enumerate(schema.columns.items()):
        if name in encoder.encodings:
            missing = tuple(text for text in schema.missing if text not in column.training_levels)
            fields.append(Field(name, place, column, encoder.encodings[name].operations, missing))
    return fields


def test_table(encoder: TableEncoder, rows: int) -> Frame:
    """Returns rows for the self-test of a file: numbers around their centres, all levels, and missing values."""
    rng = np.random.default_rng(0)
    sample = {}
    for name, column in encoder.schema.columns.items():
        missing = rng.random(rows) < 0.2
        if column.kind == "drop":
            sample[name] = RawColumn("number", np.zeros(rows))
        elif column.kind == "text":
            new_level = "\0" * (1 + max(map(len, column.training_levels), default=0))
            levels = np.array([*column.levels, new_level], object)
            sample[name] = RawColumn("text", levels[rng.integers(len(levels), size=rows)])
            sample[name].values[missing] = None
        else:
            encoding = encoder.encodings[name]
            values = encoding.start + encoding.center + encoding.spread * rng.normal(size=rows)
            values = (values > 0.5) * 1.0 if column.kind == "boolean" else values
            if column.kind == "date":  # whole minutes; with a zone noon, because an hour may be left out in spring
                values = np.clip(values, *_CALENDAR)
                values = np.floor(values * 1440) / 1440 if column.zone is None else np.floor(values) + 0.5
            values = np.round(values * MICROSECONDS) / MICROSECONDS if column.durations else values
            source = "durations" if column.durations else "text"
            sample[name] = RawColumn(column.kind, np.where(missing, np.nan, values), column.zone, source)
    return Frame(sample, named=encoder.schema.named)


class Program(NamedTuple):
    """One or several trees, and the combination of their predictions.

    Let ``z = float32(x - zero)``. A sample goes right at node j of a tree if ``weights[j] @ z + bias[j] > 0``, else
    left. A leaf predicts ``intercept + z @ coefficients``, clipped to ``lower`` and ``upper``. The sum over the trees
    is divided by ``divisor``. Then ``offset`` is added, and the link is applied.

    Attributes:
      weights: float32, ``(trees, nodes, p)``.
      bias: float32, ``(trees, nodes)``.
      zero: origin of the features, ``(p,)``.
      intercept: float64, ``(trees, leaves, k)``.
      coefficients: float32, ``(trees, leaves, k, p)``; None for constant leaves.
      lower: float64, ``(trees, leaves, k)``. None: no bounds.
      upper: float64, ``(trees, leaves, k)``. None: no bounds.
      divisor: number of trees for a mean, 1 for a sum.
      offset: ``(k,)``.
      link: name of the link, as in :class:`jtrees.Forest`.
      single: whether the model is a single tree. Leaves are then ``(n,)``, otherwise ``(n, trees)``.
      scalar: whether predictions are ``(n,)``, otherwise ``(n, k)``.
      encoder: the encoder of the rows of a raw table, or None.
      medians: float64, ``(p,)``, the features that fill missing values. None: rows have no missing values.
    """

    weights: np.ndarray
    bias: np.ndarray
    zero: np.ndarray
    intercept: np.ndarray
    coefficients: np.ndarray | None
    lower: np.ndarray | None
    upper: np.ndarray | None
    divisor: int
    offset: np.ndarray
    link: losses.Link
    single: bool
    scalar: bool
    encoder: TableEncoder | None
    medians: np.ndarray | None

    @property
    def arrays(self) -> dict[str, np.ndarray | None]:
        """The arrays of numbers by name."""
        return {name: getattr(self, name) for name in _ARRAYS}

    @property
    def depth(self) -> int:
        """Depth of the trees."""
        return (self.bias.shape[1] + 1).bit_length() - 1

    def fields(self, feature_names: Sequence[str]) -> list[Field]:
        """Returns the columns of a row: the columns of the raw table, or a column of numbers for each feature name."""
        if self.encoder is not None:
            return fields_of(self.encoder)
        # If there are no medians, the feature of a missing number is NaN.
        centers = np.full(len(feature_names), np.nan) if self.medians is None else self.medians
        operations = [(Operation("difference", 0.0, float(center)),) for center in centers]
        kind = ColumnSchema("number")
        return [Field(name, j, kind, operations[j]) for j, name in enumerate(feature_names)]

    def relative(self, x: np.ndarray) -> np.ndarray:
        """Returns samples relative to the origin, ``(n, p)`` float32."""
        return (prediction.fill_gaps(np.asarray(x, np.float64), self.medians) - self.zero).astype(np.float32)

    def leaf(self, x: np.ndarray) -> np.ndarray:
        """Returns the leaf of each sample in each tree, ``(n, trees)``."""
        return exact.leaf_index(self.weights, self.bias, self.relative(x)).T

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Returns predictions in double precision, ``(n, k)``."""
        z, leaf, trees = self.relative(x).astype(np.float64), self.leaf(x), np.arange(len(self.bias))
        out = self.intercept[trees, leaf]
        if self.coefficients is not None:
            out += np.einsum("ntkp,np->ntk", self.coefficients[trees, leaf], z)
        if self.lower is not None and self.upper is not None:
            out = np.clip(out, self.lower[trees, leaf], self.upper[trees, leaf])
        return linked(self.link, out.sum(1) / self.divisor + self.offset)

    def test_rows(self) -> tuple[Any, np.ndarray]:
        """Returns rows for the self-test of a file, and the features of the rows, ``(10, p)``.

        The rows are random normal numbers in float32, or a raw table.
        """
        if self.encoder is not None:
            table = test_table(self.encoder, _TESTED)
            return table, self.encoder.encode(table)
        rows = np.random.default_rng(0).normal(size=(_TESTED, len(self.zero)))
        rows = (self.zero + rows).astype(np.float32).astype(np.float64)
        return rows, rows

    def described(self) -> str:
        """Returns a line that describes the model."""
        trees = f"{'a tree' if self.single else f'{len(self.bias)} trees'} of depth {self.depth}"
        kind = "constant" if self.coefficients is None else "linear"
        return f"{trees} with {len(self.zero)} features, {kind} leaves, {len(self.offset)} outputs"


def program_of(model: Any) -> Program:
    """Returns the program of a model.

    Raises ``ValueError`` for models other than trees and forests of trees, for weights that are not float32, for
    numbers that are not finite, or for votes of linear leaves.
    """
    encoder = None
    if isinstance(model, FrameModel):
        model, encoder = model.model, model.encoder
    is_tree = isinstance(model, ObliqueTree) and np.ndim(model.weights) == 2
    forest = Forest(jax.tree.map(lambda a: np.asarray(a)[None], model)) if is_tree else model
    tree = forest.trees if isinstance(forest, Forest) else None
    if isinstance(forest, Forest):
        forest.check_origin()
    if not isinstance(tree, ObliqueTree) or np.ndim(tree.weights) != 3:
        detail = f" of {type(tree).__name__}" if isinstance(model, Forest) else ""
        detail = f" of shape {np.shape(model.weights)}" if isinstance(model, ObliqueTree) else detail
        came = f"{type(model).__name__}{detail}"
        expected = "an ObliqueTree or a Forest of them (to_stablehlo takes all others)"
        raise ValueError(f"model must be {expected}, got {came}{hint_of_estimator(model)}")
    if np.asarray(tree.weights).dtype != np.float32:
        raise ValueError(f"model must have float32 weights, got {np.asarray(tree.weights).dtype}")
    origin, leaves, wide = tree.origin, tree.leaves, lambda a: np.asarray(a, np.float64)
    coefficients = lower = upper = None
    if isinstance(leaves, Linear):
        intercept, coefficients = wide(leaves.intercept), np.asarray(leaves.coefficients)
        coefficients = coefficients[..., None, :] if intercept.ndim == 2 else np.swapaxes(coefficients, -1, -2)
        if leaves.lower is not None:
            lower, upper = wide(leaves.lower), wide(leaves.upper)
    elif isinstance(leaves, Values):
        intercept = wide(leaves.predictions())
    else:
        raise ValueError(f"leaves must be Values or Linear, got {type(leaves).__name__}")
    if forest.combine == "vote":
        if coefficients is not None:
            raise ValueError("trees with linear leaves cannot vote: combine must be 'mean' or 'sum'")
        intercept = votes(intercept)
    scalar = intercept.ndim == 2
    outputs: Any = lambda a: a if a is None or not scalar else a[..., None]
    trees, k = len(intercept), 1 if scalar else intercept.shape[-1]
    zero = np.zeros(tree.features) if origin is None else np.asarray(origin.x, np.float64)[0]
    offset = np.zeros(k) if origin is None or origin.y is None else np.asarray(origin.y, np.float64)[0] * np.ones(k)
    divisor = 1 if forest.combine == "sum" else trees
    medians = None if encoder is not None or forest.medians is None else wide(forest.medians)
    program = Program(
        np.asarray(tree.weights),
        np.asarray(tree.bias),
        zero,
        outputs(intercept),
        coefficients,
        outputs(lower),
        outputs(upper),
        divisor,
        offset * (trees / divisor),
        forest.link,
        is_tree,
        scalar,
        encoder,
        medians,
    )
    for name, numbers in program.arrays.items():
        if numbers is not None and not (finite := np.isfinite(numbers)).all():
            raise ValueError(f"model must hold finite numbers, got {numbers[~finite][0]} in its {name}")
    return program
