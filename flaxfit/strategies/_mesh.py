"""A named mesh of devices: the sizes of its axes, and how a function is traced within it."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flaxfit.tree._paths import Rules
from flaxfit.tree._types import PyTree


def axis_sizes(mesh_shape: Mapping[str, int], n_devices: int) -> dict[str, int]:
    """The sizes of the axes of a mesh, -1 replaced by the number of remaining devices.

    >>> axis_sizes({"data": -1, "model": 2}, 8)
    {'data': 4, 'model': 2}

    Raises:
      ValueError: the devices cannot be arranged so.
    """
    sizes = dict(mesh_shape)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    given = math.prod(size for size in sizes.values() if size != -1)
    fits = given > 0 and len(open_axes) <= 1 and n_devices % given == 0
    if not sizes or not fits or (not open_axes and given != n_devices):
        raise ValueError(
            f"Cannot arrange {n_devices} devices in a mesh {sizes}: the sizes must multiply to "
            f"{n_devices} (one of them may be -1, what is left). Change them, or pass devices=."
        )
    return {axis: n_devices // given if size == -1 else size for axis, size in sizes.items()}


def fsdp_axis(fsdp: bool | str, sizes: Mapping[str, int]) -> str | None:
    """The axis over which arrays are split that no rule splits; None: they stay whole.

    >>> fsdp_axis(True, {"data": 4}), fsdp_axis("model", {"data": 2, "model": 2})
    ('data', 'model')

    Raises:
      ValueError: the mesh does not have it.
    """
    if fsdp is False:
        return None
    options = ("fsdp", "data") if fsdp is True else (fsdp,)
    axis = next((axis for axis in options if axis in sizes), None)
    if axis is None:
        raise ValueError(
            f"fsdp={fsdp!r} needs an axis {' or '.join(map(repr, options))}, and the mesh has "
            f"{', '.join(map(repr, sizes))}. Name one of them: fsdp={next(iter(sizes))!r}."
        )
    return axis


@contextmanager
def within(
    mesh: Mesh, rules: Rules, batch_axes: tuple[str, ...], dropped: Collection[str]
) -> Iterator[None]:
    """Has flax see the mesh and the rules for names of dimensions, while a function is traced.

    Args:
      mesh: the mesh.
      rules: as of `Sharded`; those of patterns are no names, and "batch" comes from `batch_axes`.
      batch_axes: over which batches are split.
      dropped: axes that dimensions of their own names are not split over.
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


def _without_mesh(call: Any, arguments: PyTree, options: Any, context: Any) -> Any:
    """Calls a `DenseGeneral` without the mesh, all other modules as they are.

    It initialises its kernel as a matrix, for which the names of the kernel's dimensions are too
    many where a mesh makes them count; this even when it is applied, as shapes are then checked.
    """
    if not isinstance(context.module, nn.DenseGeneral):
        return call(*arguments, **options)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return call(*arguments, **options)
