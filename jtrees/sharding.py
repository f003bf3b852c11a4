"""Many devices: a mesh with the axes ``starts`` and ``data``, and rows laid out over ``data``.

With such a mesh in context (``with jax.set_mesh(sharding.mesh(...))``) the functions of this library share out runs
over ``starts`` and rows over ``data``. Which numbers go where is the compiler's affair: what is written for one device
holds for all, and only loops over samples and kernels look here. A loop over blocks of rows that are shared out must
take a block of each part at once, and a kernel is a stranger to the compiler.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

STARTS, DATA = "starts", "data"


def mesh(starts: int = 1, data: int | None = None) -> Mesh:
    """All devices, of all processes, as a mesh.

    Args:
      starts: devices, or groups of them, that work on runs of their own: seeds, configurations, trees of a forest.
      data: devices in each of these groups, which share the rows; None: as many as there are.

    Raises:
      ValueError: if the devices cannot be shared out so.
    """
    count = jax.device_count()
    data = count // starts if data is None and starts > 0 else data
    if data is None or starts < 1 or data < 1 or starts * data != count:
        raise ValueError(f"starts x data must be the number of devices, {count}, got starts={starts}, data={data}")
    return jax.make_mesh((starts, data), (STARTS, DATA), axis_types=(AxisType.Auto, AxisType.Auto))


def put_rows(tree: Any) -> Any:
    """Arrays ``(n, ...)``, the same in every process, as device arrays with their rows over ``data``.

    Without a mesh in context they go to the default device, as ever.

    Raises:
      ValueError: if n is not a multiple of the size of ``data``.
    """
    if _without_data():
        return jax.device_put(tree)
    _check_rows(tree, parts(), "the size of the axis data")
    return jax.device_put(tree, _over_data())


def join_rows(tree: Any) -> Any:
    """Arrays ``(m, ...)``, of which each process has its own rows, as one array ``(processes x m, ...)`` over ``data``.

    Raises:
      ValueError: without a mesh in context; if processes share parts of ``data``, as they do where ``starts`` lies
        across processes; and if the rows cannot be shared out among the devices of the process.
    """
    if _without_data():
        raise ValueError("a mesh with the axis data must be in context: with jax.set_mesh(sharding.mesh()), got none")
    mesh = jax.sharding.get_mesh()
    along = mesh.axis_names.index(DATA)
    mine = {at[along] for at, device in np.ndenumerate(mesh.devices) if device.process_index == jax.process_index()}
    if len(mine) * jax.process_count() != mesh.shape[DATA]:
        raise ValueError(
            f"each process must have parts of data of its own: {len(mine)} of {mesh.shape[DATA]} are this one's, of "
            f"{jax.process_count()} processes; give a mesh with starts=1"
        )
    _check_rows(tree, len(mine), "the devices along data of a process")
    return jax.tree.map(lambda a: jax.make_array_from_process_local_data(_over_data(), np.asarray(a)), tree)


def parts(n: int | None = None) -> int:
    """Into how many parts rows are laid out: the size of ``data`` in the mesh in context, 1 where there is none; and
    for n rows that are no multiple of it, which are not laid out.
    """
    context = jax.sharding.get_abstract_mesh()
    if DATA not in context.axis_names or DATA in context.manual_axes:
        return 1
    if DATA in context.explicit_axes:
        raise ValueError(f"the axis data must be automatic, as jtrees.sharding.mesh makes it, got {context}")
    size = context.shape[DATA]
    return size if n is None or n % size == 0 else 1


def share_of_starts() -> int | None:
    """Among how many the mesh in context shares out runs: 1 if it does not; None where there is no mesh at all."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        return None
    return 1 if STARTS not in context.axis_names or STARTS in context.manual_axes else context.shape[STARTS]


def axes_of_starts() -> set[str]:
    """The axes along which each device minds its own runs: ``starts``, and ``data`` where no rows are shared out."""
    return {STARTS} if parts() > 1 else set(jax.sharding.get_abstract_mesh().axis_names)


def keep_rows(tree: Any, axis: int = 0) -> Any:
    """The same arrays, of which this axis, of parts or of rows, stays laid out over ``data``. Within a program.

    Within what is shared out over ``starts``, arrays from outside have to go through here before they are indexed.
    """
    if not {STARTS, DATA} & set(jax.sharding.get_abstract_mesh().axis_names):
        return tree
    over = lambda n: DATA if parts() > 1 and parts(n) > 1 else None
    spec = lambda a: PartitionSpec(*[None] * axis, over(a.shape[axis]))
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, spec(a)), tree)


def each_part(fn: Callable[..., tuple[Any, Any]], *arrays: Any, rows: tuple[int, ...]) -> tuple[Any, Any]:
    """``fn(*arrays)`` on each device along ``data`` with its own rows: for what the compiler cannot share out itself,
    such as a kernel. Differentiable.

    Args:
      fn: gives sums over its rows, which are summed over the devices, and results with a row for each.
      *arrays: pytrees.
      rows: which of them have rows.
    """
    if parts(jax.tree.leaves(arrays[rows[0]])[0].shape[0]) == 1:
        return fn(*arrays)

    def mine(*arrays: Any) -> tuple[Any, Any]:
        sums, of_rows = fn(*arrays)
        return jax.lax.psum(sums, DATA), of_rows

    over, everywhere = PartitionSpec(DATA), PartitionSpec()
    specs = tuple(over if i in rows else everywhere for i in range(len(arrays)))
    each = jax.shard_map(mine, in_specs=specs, out_specs=(everywhere, over), axis_names={DATA}, check_vma=False)
    return each(*arrays)


def _over_data() -> NamedSharding:
    return NamedSharding(jax.sharding.get_mesh(), PartitionSpec(DATA))


def _without_data() -> bool:
    return DATA not in jax.sharding.get_abstract_mesh().axis_names


def _check_rows(tree: Any, shares: int, of: str) -> None:
    lengths = sorted({np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(tree)})
    if len(lengths) > 1:
        raise ValueError(f"arrays must have one row for each sample, got lengths {lengths}")
    if any(n % shares for n in lengths):
        raise ValueError(
            f"rows must be a multiple of {shares}, {of}: leave some out, or add some of weight 0; got {lengths}"
        )
