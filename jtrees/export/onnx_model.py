"""Writes a tree or a forest as an ONNX model of standard operators."""

import os
from typing import Any

import numpy as np

from jtrees import io
from jtrees.export.program import Field, Program, fields_of, program_of
from jtrees.tables import TableEncoder
from jtrees.tables.parse import DAY
from jtrees.tables.periods import level_number
from jtrees.tables.program import Operation
from jtrees.validation import quoted

_OPSET = 17
_FOR_TEXT = "ai.onnx.ml"  # has the only standard operator that maps strings to numbers
_TEXT = """\
An input of strings takes the canonical text of a level, as in training. A whole number has no decimals: 1, not 1.0. \
Another float is the shortest text that reads back as the same float. Booleans are True and False. \
An empty string is a missing value, and so are the texts that mean one in training. \
Any other string counts as a level that the training rows did not have."""
_SCORED = 7  # levels whose nodes are all scored by one matrix product; lower levels gather the weights on the path


def to_onnx(model: Any, path: str | os.PathLike) -> None:
    """Writes a model as an ONNX model in double precision: input ``x (n, p)``, outputs ``prediction`` and ``leaf``.

    Predictions are ``(n,)`` or ``(n, k)``. Leaves are int64, ``(n,)``, or ``(n, trees)`` for a forest. n is any number.
    ONNX has its own operators for trees, but their splits use a single feature, so they are not used. The runtime
    chooses the order in which a score is summed. Leaves therefore equal :meth:`jtrees.ObliqueTree.leaf_index`, except
    for scores of about 1e-15. This function needs the extra ``export``.

    A model of DataFrames has an input ``(n,)`` for each column that the model uses, with the name of the column.
    Numbers, booleans (0 and 1) and dates are double. NaN is a missing value, and so are the numbers that mean one for
    ``predict``. Dates are days since 1970-01-01, local days for dates with a time zone. Durations, and times of day
    since midnight, are days. In the input ``x``, NaN is a missing value, which a tree without ``medians`` does not
    read.

    Text is a string, the canonical text of a level: ``1``, not ``1.0``. The empty string and the texts that mean a
    missing value for ``predict`` are missing values. Any other string counts as a level that the training rows did not
    have. The metadata of the file say so, as ``text``.

    Args:
      model: as for :func:`jtrees.export.to_c`.
      path: path of the file. The file is written completely or not at all.

    Raises:
      ImportError: without onnx.
      ValueError: for any other model, for a column with the name of an output, or for a level that is an empty text.
      OSError: if the file cannot be written.

    Example:
      >>> import onnx
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> jtrees.export.to_onnx(tree, "tree.onnx")
      >>> [output.name for output in onnx.load("tree.onnx").graph.output]
      ['prediction', 'leaf']
    """
    io.write_file(path, _model(program_of(model)).SerializeToString())


class _Graph:
    """Nodes and constants of a graph under construction. Names identify values."""

    def __init__(self) -> None:
        import onnx  # an optional package

        self.onnx: Any = onnx
        self.nodes: list[Any] = []
        self.names: dict[str, str] = {}  # of the first output of a node, by its contents
        self.constants: dict[tuple[Any, ...], Any] = {}  # by their contents

    def __call__(self, operator: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> str:
        """Adds an operator, unless an equal one exists. Returns the name of its first output.

        Inputs are names, or arrays for constants.
        """
        names = [operand if isinstance(operand, str) else self._constant(operand) for operand in inputs]
        if (name := self.names.get(contents := repr((operator, names, outputs, attributes)))) is not None:
            return name
        name = f"jtrees.{operator.lower()}_{len(self.nodes)}"  # a column may be called ``add_1``
        self.names[contents] = name
        further = [f"{name}.{i}" for i in range(1, outputs)]
        self.nodes.append(self.onnx.helper.make_node(operator, names, [name, *further], **attributes))
        return name

    def cast(self, value: str, kind: str) -> str:
        """Adds a conversion to a type of ONNX, such as ``"DOUBLE"``."""
        return self("Cast", value, to=self.onnx.TensorProto.DataType.Value(kind))

    def rows(self, name: str, kind: str, *shape: int) -> Any:
        """Returns an input or an output of n rows of a type of ONNX."""
        return self.onnx.helper.make_tensor_value_info(name, self.onnx.TensorProto.DataType.Value(kind), ["n", *shape])

    def _constant(self, array: Any) -> str:
        array = np.asarray(array, order="C")
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = self.onnx.numpy_helper.from_array(array, f"jtrees.constant_{len(self.constants)}")
        return self.constants[key].name


def _model(program: Program) -> Any:
    add = _Graph()
    helper = add.onnx.helper
    inputs, features = [add.rows("x", "DOUBLE", len(program.zero))], "x"
    if program.encoder is not None:
        inputs, features = _encoded(add, program.encoder)
    elif program.medians is not None:
        features = add("Where", add("IsNaN", "x"), program.medians, "x")
    z = add.cast(add.cast(add("Sub", features, program.zero), "FLOAT"), "DOUBLE")
    sums, leaves = [], []
    for tree in range(len(program.bias)):
        leaf = _leaf(add, z, program.weights[tree], program.bias[tree], program.depth)
        leaf_values = lambda values, leaf=leaf, tree=tree: add("Gather", values[tree], leaf, axis=0)
        value = leaf_values(program.intercept)
        if program.coefficients is not None:
            slopes = add.cast(leaf_values(program.coefficients), "DOUBLE")
            terms = add("Mul", slopes, add("Unsqueeze", z, np.array([1])))
            value = add("Add", value, add("ReduceSum", terms, np.array([2]), keepdims=0))
        if program.lower is not None and program.upper is not None:
            value = add("Min", add("Max", value, leaf_values(program.lower)), leaf_values(program.upper))
        sums.append(value)
        leaves.append(add("Unsqueeze", leaf, np.array([1])))
    out = add("Add", add("Div", add("Sum", *sums), np.float64(program.divisor)), program.offset)
    if program.link == "softmax":
        out = add("Softmax", out, axis=1)
    elif program.link == "exp":
        out = add("Exp", out)
    elif program.link == "sorted":
        out = add("TopK", out, np.array([len(program.offset)]), axis=1, largest=0, sorted=1, outputs=2)
    squeezed = lambda value, flat: add("Squeeze", value, np.array([1])) if flat else add("Identity", value)
    last = squeezed(out, program.scalar), squeezed(add("Concat", *leaves, axis=1), program.single)
    for name, value in zip(("prediction", "leaf"), last, strict=True):
        add.nodes.append(helper.make_node("Identity", [value], [name]))
    outputs = [add.rows("prediction", "DOUBLE", *([] if program.scalar else [len(program.offset)]))]
    outputs += [add.rows("leaf", "INT64", *([] if program.single else [len(program.bias)]))]
    constants, about = list(add.constants.values()), program.described()
    graph = helper.make_graph(add.nodes, "jtrees", inputs, outputs, constants, doc_string=about)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_FOR_TEXT, 2)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="jtrees")
    model.ir_version = 8  # the version of the operators, which older runtimes read
    if any(value.type.tensor_type.elem_type == add.onnx.TensorProto.STRING for value in inputs):
        helper.set_model_props(model, {"text": _TEXT})
    add.onnx.checker.check_model(model)
    return model


def _encoded(add: _Graph, encoder: TableEncoder) -> tuple[list[Any], str]:
    """Adds the encoding of a raw table. Returns the inputs, and the name of the features, ``(n, p)``."""
    fields, parts, named = fields_of(encoder), [], encoder.schema.named
    inputs = [] if named else [add.rows("x", "DOUBLE", len(encoder.schema.columns))]
    for field in fields:
        if named:
            if field.name in ("prediction", "leaf", "") or field.name.startswith("jtrees.") or "\0" in field.name:
                reserved = "'', 'prediction', 'leaf', 'jtrees....' and texts with the character 0"
                raise ValueError(f"columns must have other names in ONNX than {reserved}, got {quoted(field.name)}")
            inputs.append(add.rows(field.name, "STRING" if field.kind == "text" else "DOUBLE"))
        value = field.name if named else add("Gather", "x", np.int64(field.place), axis=1)
        parts += [_OPERATIONS[operation.name](add, operation, field, value) for operation in field.operations]
    return inputs, add("Concat", *parts, axis=1)


def _difference(add: _Graph, operation: Operation, field: Field, value: str) -> str:
    number = add("Sub", value, np.float64(operation.start))
    return add("Unsqueeze", add("Where", _gaps(add, field, value), np.float64(operation.center), number), np.array([1]))


def _missing(add: _Graph, operation: Operation, field: Field, value: str) -> str:
    return add("Unsqueeze", add.cast(_gaps(add, field, value), "DOUBLE"), np.array([1]))


def _gaps(add: _Graph, field: Field, value: str) -> str:
    """Adds the mask of the missing values of a column of numbers, booleans or dates."""
    gaps = add("IsNaN", value)
    for number in field.missing_numbers:
        gaps = add("Or", gaps, add("Equal", value, np.float64(number)))
    return gaps


def _lookup(add: _Graph, operation: Operation, field: Field, value: str) -> str:
    number = _level if operation.part == "level" else _period
    return add("Gather", operation.table, number(add, operation, field, value), axis=0)


# The code of the features of each operation of a column's program, ``(n, k)``.
_OPERATIONS = {"difference": _difference, "missing": _missing, "lookup": _lookup}


def _level(add: _Graph, operation: Operation, field: Field, value: str) -> str:
    """Adds the rows of levels in their table."""
    if "" in field.column.levels:
        name = quoted(field.name)
        raise ValueError(f"an empty text must be a missing value in ONNX, got a level '' of the column {name}")
    keys, count = [*field.column.levels, *field.missing], len(field.column.levels)
    codes = {"values_int64s": [*range(count), *[count + 1] * len(field.missing)], "default_int64": count}
    return add("LabelEncoder", value, domain=_FOR_TEXT, keys_strings=keys, **codes)


def _period(add: _Graph, operation: Operation, field: Field, value: str) -> str:
    """Adds the rows of days since 1970 in the table of a period."""
    floor = lambda number: add.cast(add("Floor", number), "INT64")
    missing = add("IsNaN", value)
    days = add("Where", missing, np.float64(0), value)
    time = add("Mul", add("Sub", days, add("Floor", days)), np.float64(DAY))
    units = {"day": floor(days), "time": floor(add("Add", time, np.float64(0.5)))}
    operators = {"+": "Add", "*": "Mul", "//": "Div", "%": "Mod"}  # of numbers below 0, only Mod rounds down
    steps = {step: lambda x, n, name=name: add(name, x, np.int64(n)) for step, name in operators.items()}
    number = level_number(operation.part, units, steps)
    return add("Where", missing, np.int64(len(operation.table) - 1), number)


def _leaf(add: _Graph, z: str, weights: np.ndarray, bias: np.ndarray, depth: int) -> str:
    """Adds a tree. Returns the name of its leaves, int64 ``(n,)``."""
    above = 2 ** min(depth, _SCORED) - 1
    weights, wide = np.asarray(weights), np.float64
    score = add("Add", add("MatMul", z, wide(weights[:above].T)), wide(bias[:above]))
    right = add.cast(add("Greater", score, wide(0)), "INT64")
    # The root has number 1. The children of a node are 2 node and 2 node + 1.
    node = add("Add", add("Squeeze", add("Slice", right, *map(np.array, ([0], [1], [1]))), np.array([1])), np.int64(2))
    for level in range(1, depth):
        number = add("Sub", node, np.int64(1))
        if 2 ** (level + 1) - 1 <= above:
            column = add("Unsqueeze", number, np.array([1]))
            bit = add("Squeeze", add("GatherElements", right, column, axis=1), np.array([1]))
        else:
            node_values = lambda a, number=number: add.cast(add("Gather", a, number, axis=0), "DOUBLE")
            terms = add("ReduceSum", add("Mul", node_values(weights), z), np.array([1]), keepdims=0)
            bit = add.cast(add("Greater", add("Add", terms, node_values(bias)), wide(0)), "INT64")
        node = add("Add", add("Mul", node, np.int64(2)), bit)
    return add("Sub", node, np.int64(2**depth))
