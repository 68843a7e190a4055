"""Maps a function over devices: by `jax.pmap`, or by `jax.jit` of `jax.shard_map`."""

from typing import Literal, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxfit.tree import Function, PyTree

Implementation: TypeAlias = Literal["pmap", "shard_map"]


def mapped(
    function: Function,
    mesh: Mesh,
    n_arguments: int,
    out_axes: PyTree,
    *,
    n_donated: int = 0,
    implementation: Implementation,
) -> jax.stages.Wrapped:
    """Maps `function(whole, ..., part)` over the devices of a mesh with one axis.

    Each device receives the first arguments whole, and its element of the leaves `(devices, ...)`
    of the last argument, or the unchanged leaves if `is_unsplit`. The programs of both
    implementations differ only in that.

    `out_axes` is 0 for results that keep the device axis, None for results equal on all devices; a
    tuple of these for a function that returns a tuple.
    """
    axis, donated = mesh.axis_names[0], tuple(range(n_donated))
    if implementation == "pmap":
        return jax.pmap(
            function,
            axis_name=axis,
            in_axes=(None,) * (n_arguments - 1) + (0,),
            out_axes=out_axes,
            devices=tuple(mesh.devices.flat),
            donate_argnums=donated,
        )

    is_one = is_unsplit(mesh, implementation)

    def replica(*arguments: PyTree) -> PyTree:
        *whole, part = arguments
        if not is_one:
            part = jax.tree.map(lambda x: jax.lax.squeeze(x, [0]), part)
        return by_axis(_expand, function(*whole, part), out_axes)

    whole, parts = PartitionSpec(), PartitionSpec(axis)
    specs = (
        (whole,) * (n_arguments - 1) + (whole if is_one else parts,),
        by_axis(lambda _, axis: whole if axis is None else parts, out_axes, out_axes),
    )
    in_shardings, out_shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    # check_vma=False: not every reduction can prove that its results agree (nor does `pmap` check).
    each = jax.shard_map(replica, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    return jax.jit(
        each, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donated
    )


def is_unsplit(mesh: Mesh, implementation: Implementation) -> bool:
    """Returns whether a mapped function takes a batch without a device axis: on one device."""
    return mesh.size == 1 and implementation == "shard_map"


def by_axis(function: Function, results: PyTree, out_axes: PyTree) -> PyTree:
    """Calls `function(results, axis)`, or maps it over two tuples."""
    if isinstance(out_axes, tuple):
        return tuple(map(function, results, out_axes))
    return function(results, out_axes)


def chosen(given: Implementation | Literal["auto"], n_processes: int) -> Implementation:
    """Returns the given implementation, or resolves "auto" by the number of processes."""
    if given == "auto":
        return "shard_map" if n_processes == 1 else "pmap"
    if given == "pmap" or given == "shard_map":
        return given
    raise ValueError(
        f'implementation must be "auto", "pmap" or "shard_map", got {given!r:.60}: all give the '
        "same results."
    )


def _expand(results: PyTree, axis: int | None) -> PyTree:
    if axis is None:
        return results
    return jax.tree.map(lambda x: jax.lax.expand_dims(x, [0]), results)
