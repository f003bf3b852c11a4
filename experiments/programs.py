"""Costs of a program, from its text or its trace: bytes that it moves, collectives, operations of its kernels."""

import math
import re
from typing import Any

import jax

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "f64": 8}
# A line of a compiled program has a name, the types of the results, an operation and its operands.
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*?)\)(?:,|$)")
_NOTHING = ("parameter", "bitcast", "tuple", "get-tuple-element", "constant")
# Operations of a kernel that only move numbers, or that run at compile time.
_MOVES = ("get", "swap", "reshape", "broadcast_in_dim", "iota", "slice", "concatenate", "convert_element_type", "copy")
_MOVES += ("squeeze", "transpose", "program_id", "masked_load", "masked_swap", "load", "multiple_of", "pad")


def size(types: str) -> int:
    """Returns the bytes of arrays, from their types in the text of a program, such as ``f32[8,128]``."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
    return sum(BYTES.get(kind, 0) * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in arrays)


def collectives(text: str) -> tuple[str, int]:
    """Returns the kinds of collectives in a compiled program, and the bytes of their results."""
    results = re.findall(
        r"= (.*?) (all-(?:reduce|gather|to-all)|collective-\w+|reduce-scatter|ragged-all-to-all)(?:-start)?\(", text
    )
    return ", ".join(sorted({kind for _, kind in results})), sum(size(types) for types, _ in results)


def traffic(text: str) -> int:
    """Returns the bytes that a compiled program moves: operands and results of each of its kernels."""
    sizes, moved = {}, 0
    for line in text[text.find("ENTRY") :].splitlines():
        if (match := _INSTRUCTION.match(line)) is None:
            continue
        name, types, operation, operands = match.groups()
        sizes[name] = size(types)
        if operation not in _NOTHING:
            moved += sizes[name] + sum(sizes.get(operand, 0) for operand in re.findall(r"%([\w.\-]+)", operands))
    return moved


def operations(trace: Any) -> tuple[int, int]:
    """Returns the kernel operations that a traced program's results need: products, and all other operations."""
    return _count(trace.jaxpr.jaxpr, 1, inside=False)


def _count(jaxpr: Any, times: int, inside: bool) -> tuple[int, int]:
    """Counts the operations of a program that runs ``times`` times, or of a program inside a kernel."""
    products = vectors = 0
    for equation in jaxpr.eqns if inside else _live_equations(jaxpr):
        name, params = equation.primitive.name, equation.params
        if name == "pallas_call":
            grid = math.prod(params["grid_mapping"].grid)
            counts = _count(params["jaxpr"], times * grid, inside=True)
        elif name == "dot_general" and inside:
            (axes, _), _ = params["dimension_numbers"]
            a, (out,) = equation.invars[0].aval, equation.outvars
            counts = 2 * times * out.aval.size * math.prod(a.shape[i] for i in axes), 0
        else:
            length = params.get("length", 1) if name == "scan" else 1
            parts = [_count(getattr(part, "jaxpr", part), times * length, inside) for part in _jaxprs(params)]
            counts = sum(part[0] for part in parts), sum(part[1] for part in parts)
            if inside and not parts and name not in _MOVES:
                variables = (*equation.outvars, *equation.invars)
                sizes = [variable.aval.size for variable in variables if hasattr(variable.aval, "size")]
                counts = 0, times * max(sizes, default=0)  # a sum has one operation per term
        products, vectors = products + counts[0], vectors + counts[1]
    return products, vectors


def _live_equations(jaxpr: Any) -> list[Any]:
    """Returns the equations that the results depend on."""
    live, equations = {id(variable) for variable in jaxpr.outvars}, []
    for equation in reversed(jaxpr.eqns):
        if any(id(variable) in live for variable in equation.outvars):
            equations.append(equation)
            live |= {id(variable) for variable in equation.invars}
    return equations


def _jaxprs(params: dict[str, Any]) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(params, is_leaf=_is_jaxpr) if _is_jaxpr(leaf)]


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")
