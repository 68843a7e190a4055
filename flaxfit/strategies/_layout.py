"""Layout: a table of a state's layout over a mesh, with bytes per device."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from flaxfit.display import size
from flaxfit.strategies._specs import axes_of, n_parts
from flaxfit.tree import PyTree, flat


class Placed(NamedTuple):
    """One array of a state."""

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    """The axes of the mesh that each dimension is split over."""
    n_parts: int
    """The number of different parts; 1 if every device holds the whole array."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the part that a device holds."""
        return self.n_bytes // self.n_parts


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describes how a state is laid out over a mesh; `Sharded.describe` returns it.

    >>> array = Placed((8, 2), np.dtype("float32"), PartitionSpec("data"), 4)
    >>> Layout({"data": 4}, ("data",), {"params/w": array}).bytes_per_device
    16

    Args:
      mesh: the axes of the mesh and their sizes.
      batch_axes: the axes that batches are split over.
      arrays: the arrays of the state by path.
    """

    mesh: Mapping[str, int]
    batch_axes: tuple[str, ...]
    arrays: Mapping[str, Placed]

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole state, held once."""
        return sum(array.n_bytes for array in self.arrays.values())

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the state on each device."""
        return sum(array.bytes_per_device for array in self.arrays.values())

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the arrays that every device holds whole."""
        return sum(array.n_bytes for array in self.arrays.values() if array.n_parts == 1)

    def __repr__(self) -> str:
        n_devices = math.prod(self.mesh.values())
        mesh = ", ".join(f"{axis}={n}" for axis, n in self.mesh.items())
        rows = [
            (path, f"{a.dtype}{list(a.shape)}", _show(a.spec), size(a.bytes_per_device))
            for path, a in self.arrays.items()
        ]
        rows = [("array", "shape", "split over", "per device"), *rows]
        w, x, y, z = (max(map(len, column)) for column in zip(*rows, strict=True))
        table = [f"{a:{w}}  {b:{x}}  {c:{y}}  {d:>{z}}" for a, b, c, d in rows]
        used = {axis for a in self.arrays.values() for entry in a.spec for axis in axes_of(entry)}
        used |= {*self.batch_axes}
        idle = [axis for axis, n in self.mesh.items() if n > 1 and axis not in used]
        notes = [f"nothing is split over {axis}: its devices all do the same" for axis in idle]
        return "\n".join(
            [
                f"mesh {mesh}: {n_devices} devices, batches split over "
                f"{' and '.join(self.batch_axes) or 'none'}",
                *table,
                f"state {size(self.n_bytes)}, on each device {size(self.bytes_per_device)}, "
                f"of these {size(self.replicated_bytes)} in arrays that every device holds whole",
                *notes,
            ]
        )


def layout(
    state: PyTree,
    specs: Mapping[str, PartitionSpec],
    mesh: Mapping[str, int],
    batch_axes: tuple[str, ...],
) -> Layout:
    """Returns the layout of a state whose arrays have these specs."""
    arrays = {}
    for path, leaf in flat(state).items():
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        arrays[path] = Placed(leaf.shape, leaf.dtype, specs[path], n_parts(specs[path], mesh))
    return Layout(dict(mesh), batch_axes, arrays)


def _show(spec: PartitionSpec) -> str:
    if not any(spec):
        return "whole"
    return "(" + ", ".join("*".join(axes_of(entry)) or "-" for entry in spec) + ")"
