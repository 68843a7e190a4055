"""A named mesh of devices: axis sizes, and the context to trace a function in."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import jax
from flax import linen as nn
from flax.linen.module import InterceptorContext
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flaxfit.tree import Function, PyTree, Rules


def axis_sizes(mesh_shape: Mapping[str, int], n_devices: int) -> dict[str, int]:
    """Replaces a size of -1 by the number of remaining devices."""
    if not isinstance(mesh_shape, Mapping):
        raise TypeError(
            "mesh_shape must map the names of axes to their sizes, such as "
            f"{{'data': -1, 'model': 2}}, got {mesh_shape!r}."
        )
    sizes = dict(mesh_shape)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    given = math.prod(size for size in sizes.values() if size != -1)
    fits = given > 0 and len(open_axes) <= 1 and n_devices % given == 0
    if not sizes or not fits or (not open_axes and given != n_devices):
        raise ValueError(
            f"Cannot arrange {n_devices} devices in a mesh {sizes}: the sizes must multiply to "
            f"{n_devices} (one of them may be -1, the rest). Change them, or pass devices=."
        )
    return {axis: n_devices // given if size == -1 else size for axis, size in sizes.items()}


def fsdp_axis(fsdp: bool | str, sizes: Mapping[str, int]) -> str | None:
    """Returns the axis that splits arrays without a rule; None: they stay whole."""
    if fsdp is False:
        return None
    options = ("fsdp", "data") if fsdp is True else (fsdp,)
    axis = next((axis for axis in options if axis in sizes), None)
    if axis is None:
        raise ValueError(
            f"fsdp={fsdp!r} needs an axis {' or '.join(map(repr, options))}, but the mesh has "
            f"{', '.join(map(repr, sizes))}. Name one of them: fsdp={next(iter(sizes))!r}."
        )
    return axis


@contextmanager
def within(
    mesh: Mesh, rules: Rules, batch_axes: tuple[str, ...], dropped: Collection[str]
) -> Iterator[None]:
    """Sets the mesh and the rules for dimension names, for Flax, while a function is traced.

    `batch_axes` is the rule for "batch". A mesh axis maps to itself, unless `dropped`.
    """
    rules = [rule for rule in rules if not isinstance(rule[1], PartitionSpec)]
    rules = [("batch", batch_axes), *(rule for rule in rules if rule[0] != "batch")]
    named = {name for name, _ in rules}
    itself = [(axis, None if axis in dropped else axis) for axis in mesh.axis_names]
    rules += [rule for rule in itself if rule[0] not in named]
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        nn.logical_axis_rules(rules),
        nn.intercept_methods(_without_mesh),
    ):
        yield


def _without_mesh(
    call: Function,
    arguments: tuple[PyTree, ...],
    options: dict[str, PyTree],
    context: InterceptorContext,
) -> PyTree:
    """Calls a `DenseGeneral` without the mesh, and all other modules unchanged.

    `DenseGeneral` initializes its kernel as a matrix, with fewer dimensions than names. Within a
    mesh that is an error, also in the shape check when the module is applied.
    """
    if not isinstance(context.module, nn.DenseGeneral):
        return call(*arguments, **options)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return call(*arguments, **options)
