"""A tree or a forest as an ONNX model of standard operators."""

import os
from typing import Any

import numpy as np

from jtrees import io
from jtrees.export.program import Program, program_of

_OPSET = 17
_SCORED = 7  # levels whose nodes are all scored by one matrix product; below, weights on the path are gathered


def to_onnx(model: Any, path: str | os.PathLike) -> None:
    """Writes a model as an ONNX model in double precision: input ``x (n, p)``, outputs ``prediction`` and ``leaf``.

    Predictions are ``(n,)`` or ``(n, k)``; leaves int64, ``(n,)``, of a forest ``(n, trees)``; n is any number. ONNX's
    own operators for trees are not used, as their splits have one feature. A score is summed in an order that the
    runtime chooses: leaves are those of :meth:`jtrees.ObliqueTree.leaf_index` but for scores of about 1e-15. Needs the
    extra ``export``.

    Args:
      model: an :class:`jtrees.ObliqueTree`, or a :class:`jtrees.Forest` of them.
      path: path of the file, which is written whole or not at all.

    Raises:
      ImportError: without onnx.
      ValueError: for another model.
      OSError: if the file cannot be written.
    """
    of = program_of(model)
    contents = _model(of).SerializeToString()
    with io.written_whole(path) as file:
        file.write(contents)


class _Graph:
    """Nodes and constants of a graph under construction; values are their names."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[tuple[Any, ...], Any] = {}  # by their contents

    def __call__(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        """Adds an operator; inputs are names, or arrays, which become constants. Returns the name of its output."""
        from onnx import helper

        names = [one if isinstance(one, str) else self._constant(one) for one in inputs]
        name = f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, names, [name], **attributes))
        return name

    def _constant(self, array: Any) -> str:
        from onnx import numpy_helper

        array = np.ascontiguousarray(array)
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(array, f"constant_{len(self.constants)}")
        return self.constants[key].name


def _model(of: Program) -> Any:
    from onnx import TensorProto, checker, helper

    add = _Graph()
    double = lambda value: add("Cast", value, to=TensorProto.DOUBLE)
    z = double(add("Cast", add("Sub", "x", of.zero), to=TensorProto.FLOAT))
    sums, leaves = [], []
    for tree in range(len(of.bias)):
        leaf = _leaf(add, z, of.weights[tree], of.bias[tree], of.depth)
        at_leaf = lambda values, leaf=leaf, tree=tree: double(add("Gather", values[tree], leaf, axis=0))
        value = at_leaf(of.intercept)
        if of.coefficients is not None:
            terms = add("Mul", at_leaf(of.coefficients), add("Unsqueeze", z, np.array([1])))
            value = add("Add", value, add("ReduceSum", terms, np.array([2]), keepdims=0))
        if of.lower is not None and of.upper is not None:
            value = add("Min", add("Max", value, at_leaf(of.lower)), at_leaf(of.upper))
        sums.append(value)
        leaves.append(add("Unsqueeze", leaf, np.array([1])))
    out = add("Add", add("Div", add("Sum", *sums), np.float64(of.divisor)), of.offset)
    if of.softmax:
        out = add("Softmax", out, axis=1)
    squeezed = lambda value, flat: add("Squeeze", value, np.array([1])) if flat else add("Identity", value)
    last = squeezed(out, of.scalar), squeezed(add("Concat", *leaves, axis=1), of.single)
    for name, value in zip(("prediction", "leaf"), last, strict=True):
        add.nodes.append(helper.make_node("Identity", [value], [name]))
    value = helper.make_tensor_value_info
    of_out, of_leaf = [len(of.offset)] * (not of.scalar), [len(of.bias)] * (not of.single)
    graph = helper.make_graph(
        add.nodes,
        "jtrees",
        [value("x", TensorProto.DOUBLE, ["n", len(of.zero)])],
        [value("prediction", TensorProto.DOUBLE, ["n", *of_out]), value("leaf", TensorProto.INT64, ["n", *of_leaf])],
        list(add.constants.values()),
        doc_string=of.described(),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], producer_name="jtrees")
    model.ir_version = 8  # that of the operators, which older runtimes read
    checker.check_model(model)
    return model


def _leaf(add: _Graph, z: str, weights: np.ndarray, bias: np.ndarray, depth: int) -> str:
    """Adds a tree; returns the name of the leaves, int64 ``(n,)``."""
    from onnx import TensorProto

    above = 2 ** min(depth, _SCORED) - 1
    weights, wide = np.asarray(weights), np.float64
    score = add("Add", add("MatMul", z, wide(weights[:above].T)), wide(bias[:above]))
    right = add("Cast", add("Greater", score, wide(0)), to=TensorProto.INT64)
    # The root has number 1, so that children are 2 node and 2 node + 1.
    node = add("Add", add("Squeeze", add("Slice", right, *map(np.array, ([0], [1], [1]))), np.array([1])), np.int64(2))
    for level in range(1, depth):
        number = add("Sub", node, np.int64(1))
        if 2 ** (level + 1) - 1 <= above:
            column = add("Unsqueeze", number, np.array([1]))
            bit = add("Squeeze", add("GatherElements", right, column, axis=1), np.array([1]))
        else:
            of_node = lambda a, number=number: add("Cast", add("Gather", a, number, axis=0), to=TensorProto.DOUBLE)
            terms = add("ReduceSum", add("Mul", of_node(weights), z), np.array([1]), keepdims=0)
            bit = add("Cast", add("Greater", add("Add", terms, of_node(bias)), wide(0)), to=TensorProto.INT64)
        node = add("Add", add("Mul", node, np.int64(2)), bit)
    return add("Sub", node, np.int64(2**depth))
