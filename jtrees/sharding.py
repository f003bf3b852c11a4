"""Many devices: a mesh with the axes ``starts`` and ``data``, and rows sharded over ``data``.

If such a mesh is in context (``with jax.set_mesh(sharding.mesh(...))``), the functions of this library shard runs over
``starts`` and rows over ``data``. The compiler partitions all code except loops over samples and kernels, for which
this module has functions. A loop over blocks of sharded rows must process a block of each shard at once. Kernels must
be partitioned explicitly.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from jtrees import processes
from jtrees.validation import check_count, quoted, quoted_list

__all__ = ["join_rows", "mesh", "put_rows"]

STARTS, DATA = "starts", "data"
_AUTOMATIC = AxisType.Auto, AxisType.Auto


def mesh(starts: int = 1, data: int | None = None) -> Mesh:
    """Returns a mesh of all devices of all processes.

    Args:
      starts: number of groups of devices. Each group works on other runs: seeds, configurations, or trees of a forest.
      data: number of devices in each group, over which rows are sharded. None: the number of devices divided by
        ``starts``.

    Raises:
      ValueError: if starts x data is not the number of devices.
    """
    count, starts = jax.device_count(), check_count("starts", starts)
    if data is None and count % starts:
        raise ValueError(f"starts must divide the number of devices, {count}, got {quoted(starts)}")
    data = count // starts if data is None else check_count("data", data)
    if starts * data != count:
        got = f"starts={quoted(starts)}, data={quoted(data)}"
        raise ValueError(f"starts x data must be the number of devices, {count}, got {got}")
    return jax.make_mesh((starts, data), (STARTS, DATA), axis_types=_AUTOMATIC)


def of_devices(devices: Sequence[Any]) -> Mesh:
    """Returns a mesh of some devices, all along ``data``."""
    return Mesh(np.array(devices)[None], (STARTS, DATA), axis_types=_AUTOMATIC)


def put_rows(tree: Any) -> Any:
    """Puts arrays ``(n, ...)`` that are equal in all processes on devices, with their rows sharded over ``data``.

    If no mesh is in context, the arrays are put on the default device.

    Raises:
      ValueError: if n is not a multiple of the size of ``data``.
    """
    if _without_data():
        return jax.device_put(tree)
    _check_rows(tree, parts(), "the size of the axis data")
    return jax.device_put(tree, _over_data())


def from_host(array: Any, dtype: Any = None) -> Any:
    """Returns a NumPy array on the default device, and a JAX array unchanged. The NumPy array must not change later."""
    # In a forked process that has no XLA, a NumPy array remains on the host. `jnp.asarray` would compile a program for
    # each shape and dtype.
    if isinstance(array, jax.Array) and dtype in (None, array.dtype):
        return array
    if processes.lost_xla():
        return np.asarray(array, dtype)
    return jax.device_put(np.asarray(array, dtype))


def join_rows(tree: Any) -> Any:
    """Joins the rows ``(m, ...)`` of each process into one array ``(processes x m, ...)`` sharded over ``data``.

    The rows are in the order of the devices of the mesh. If ``starts`` spans processes, rows move between processes.

    Raises:
      ValueError: if no mesh is in context, or if the rows cannot be sharded evenly over the devices of the process.
    """
    if _without_data():
        raise ValueError("a mesh with the axis data must be in context: with jax.set_mesh(sharding.mesh()), got none")
    _check_rows(tree, jax.local_device_count(), "the devices of a process")
    mesh = jax.sharding.get_mesh()
    along = mesh.axis_names.index(DATA)
    places, process = np.ndenumerate(mesh.devices), jax.process_index()
    mine = {place[along] for place, device in places if device.process_index == process}
    put = jax.make_array_from_process_local_data
    joined = lambda sharding: jax.tree.map(lambda a: put(sharding, np.asarray(a)), tree)
    if len(mine) * jax.process_count() == mesh.shape[DATA]:
        return joined(_over_data())
    # Several processes need the same rows. Each device first gets its own rows, and a program then moves them.
    return jax.jit(same, out_shardings=_over_data())(joined(NamedSharding(mesh, PartitionSpec(mesh.axis_names))))


def same(tree: Any) -> Any:
    """Returns its argument. A compiled program of this function moves arrays to another sharding."""
    return tree


def parts(n: int | None = None) -> int:
    """Returns the number of shards of rows: the size of ``data`` in the mesh in context, or 1 if there is no mesh."""
    # If n is not a multiple of this size, the result is 1, because the n rows are not sharded.
    context = jax.sharding.get_abstract_mesh()
    if DATA not in context.axis_names or DATA in context.manual_axes:
        return 1
    if DATA in context.explicit_axes:
        raise ValueError(f"the axis data must be automatic, as jtrees.sharding.mesh makes it, got {quoted(context)}")
    size = context.shape[DATA]
    return size if n is None or n % size == 0 else 1


def share_of_starts() -> int | None:
    """Returns the number of shards of runs in the mesh in context (1 if runs are not sharded). None: no mesh."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        return None
    return 1 if STARTS not in context.axis_names or STARTS in context.manual_axes else context.shape[STARTS]


def keep_rows(tree: Any) -> Any:
    """Constrains rows, or the leading axis of row shards, to be sharded over ``data``, within a program."""
    # In code sharded over `starts`, arrays from outside must be constrained before they are indexed.
    context = jax.sharding.get_abstract_mesh()
    if not {STARTS, DATA} & set(context.axis_names):
        return tree
    if set(context.manual_axes) == set(context.axis_names):
        return jax.tree.map(_within_device, tree)
    spec = lambda a: PartitionSpec(DATA if parts(a.shape[0]) > 1 else None)
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, spec(a)), tree)


@jax.custom_batching.custom_vmap
def _within_device(a: jax.Array) -> jax.Array:
    """Constrains an array that is local to a device."""
    return jax.lax.with_sharding_constraint(a, PartitionSpec())


@_within_device.def_vmap
def _many_within_device(size: int, batched: list[bool], a: jax.Array) -> tuple[jax.Array, bool]:
    return _within_device(a), batched[0]  # the default rule leaves the new axis to the compiler, which has no axis here


def each_part(fn: Callable[..., tuple[Any, Any]], *arrays: Any, rows: tuple[int, ...]) -> tuple[Any, Any]:
    """Runs ``fn(*arrays)`` on each device along ``data`` with its own rows. Differentiable."""
    # This is for functions that the compiler cannot partition, such as kernels. `fn` returns sums over its rows, which
    # are added up over the devices, and results by row. `rows` are the indices of the arrays that have rows.
    if parts(jax.tree.leaves(arrays[rows[0]])[0].shape[0]) == 1:
        return fn(*arrays)

    def shard(*arrays: Any) -> tuple[Any, Any]:
        sums, row_results = fn(*arrays)
        return jax.lax.psum(sums, DATA), row_results

    over, everywhere = PartitionSpec(DATA), PartitionSpec()
    specs = tuple(over if i in rows else everywhere for i in range(len(arrays)))
    sharded = jax.shard_map(shard, in_specs=specs, out_specs=(everywhere, over), axis_names={DATA}, check_vma=False)
    return sharded(*arrays)


def _over_data() -> NamedSharding:
    return NamedSharding(jax.sharding.get_mesh(), PartitionSpec(DATA))


def _without_data() -> bool:
    return DATA not in jax.sharding.get_abstract_mesh().axis_names


def _check_rows(tree: Any, shares: int, owners: str) -> None:
    lengths = sorted({np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(tree)})
    if len(lengths) > 1:
        raise ValueError(f"arrays must have one row for each sample, got lengths {quoted_list(lengths)}")
    if any(n % shares for n in lengths):
        raise ValueError(
            f"number of rows must be a multiple of {shares}, {owners}: leave rows out, or add rows of weight 0; "
            f"got {quoted_list(lengths)}"
        )
