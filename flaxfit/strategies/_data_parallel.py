"""DataParallel: one copy of the state per device, through `jax.pmap` (this file alone uses it)."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxfit.strategies._local import local_devices
from flaxfit.strategies._replica import REPLICA, alone

_copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


class DataParallel:
    """Replicates the state and splits each batch over the devices.

    The state goes in and out of the mapped function with axis `None`: it carries no device
    axis, which is faster than the stacked form and reads back without a gather.

    >>> DataParallel(jax.local_devices()[:1]).n_devices
    1

    Args:
      devices: the devices to use; None: all devices, of all processes.

    Raises:
      ValueError: there are no devices, or the processes have different numbers of them.
    """

    def __init__(self, devices: Sequence[Any] | None = None):
        self.devices = tuple(jax.devices() if devices is None else devices)
        if not self.devices:
            raise ValueError("DataParallel needs at least one device, got an empty sequence.")
        self._local = local_devices(self.devices)
        mesh = Mesh(np.array(self._local), (REPLICA,))
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._parts = NamedSharding(mesh, PartitionSpec(REPLICA))
        self._narrowed: dict[int, DataParallel] = {}

    def __repr__(self) -> str:
        return f"DataParallel({len(self.devices)} {self.devices[0].platform} devices)"

    @property
    def axis_name(self) -> str | None:
        """ "replica", or None on a single device, where there is nothing to reduce over."""
        # A reduction over one replica is not free: 10 to 15 % of a small step.
        return REPLICA if self.n_devices > 1 else None

    @property
    def n_devices(self) -> int:
        """The number of replicas."""
        return len(self.devices)

    @property
    def n_processes(self) -> int:
        """How many processes the replicas belong to."""
        return self.n_devices // len(self._local)

    def rows(self, n_examples: int) -> slice:
        """The rows of a batch of all processes that this one works at."""
        per_device = n_examples // self.n_devices
        start = self.devices.index(self._local[0]) * per_device
        return slice(start, start + len(self._local) * per_device)

    def place(self, tree: Any) -> Any:
        """Replicates a tree, as a copy: the original outlives the donation of the replicas."""
        # device_put shares the buffer of a device that holds the array already.
        return _copy(self.share(tree))

    def share(self, tree: Any) -> Any:
        """As `place`, but without a copy of what a device holds already."""
        return jax.device_put(tree, self._whole)

    def collect(self, tree: Any) -> Any:
        """A copy of a replicated tree on the first device."""
        # Reading one local shard is free; `x[0]` would gather over the devices.
        return _copy(jax.tree.map(lambda x: x.addressable_data(0), tree))

    def split(self, batch: Any, n_stacked: int = 0) -> Any:
        """Reshapes leaves `(n, ...)` to `(devices, n / devices, ...)`, NumPy without a copy.

        The devices are those of this process.
        """
        n = len(self._local)

        def split_leaf(x: Any) -> Any:
            if not n_stacked:
                x = x.reshape(n, x.shape[0] // n, *x.shape[1:])
            else:
                x = x.reshape(n_stacked, n, x.shape[1] // n, *x.shape[2:]).swapaxes(0, 1)
            return jax.device_put(x, self._parts) if isinstance(x, jax.Array) else x

        # Not `jax.tree.map`, whose generality a small step would notice.
        leaves, structure = jax.tree.flatten(batch)
        return structure.unflatten([split_leaf(leaf) for leaf in leaves])

    def join(self, outputs: Any) -> Any:
        """NumPy arrays of all examples in order, from outputs of a split batch."""
        host = jax.device_get(outputs)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), host)
        return multihost_utils.process_allgather(rows, tiled=True) if self.n_processes > 1 else rows

    def narrow(self, n_examples: int) -> "DataParallel":
        """The same on the largest number of devices that divides `n_examples`.

        Of several processes each takes part, with as many devices as the others.
        """
        n_processes = self.n_processes
        counts = range(self.n_devices, 0, -n_processes)
        n = next((n for n in counts if n_examples % n == 0), 0)
        if n == self.n_devices:
            return self
        if not n:
            raise ValueError(
                f"Cannot split the last {n_examples} examples over {n_processes} processes: make "
                "the data divide by them, or leave them out (drop_remainder=True)."
            )
        if n not in self._narrowed:
            taken = Counter()
            devices = []
            for device in self.devices:
                taken[device.process_index] += 1
                if taken[device.process_index] <= n // n_processes:
                    devices.append(device)
            self._narrowed[n] = DataParallel(devices)
        return self._narrowed[n]

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a single replica, so that a model may name the axis "replica"."""
        return alone(function)

    def compile(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], *, n_donated: int = 0
    ) -> Callable[..., Any]:
        """Compiles `function(state, ..., batch)`; every result must agree between replicas."""
        return self._compile(function, arguments, None, tuple(range(n_donated)))

    def compile_split(
        self, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """Compiles `function(state, ..., batch)` whose results keep the device axis."""
        return self._compile(function, arguments, 0, ())

    def _compile(
        self, function: Any, arguments: tuple[Any, ...], out_axes: Any, donated: tuple[int, ...]
    ) -> Callable[..., Any]:
        mapped = jax.pmap(
            function,
            axis_name=REPLICA,
            in_axes=(None,) * (len(arguments) - 1) + (0,),
            out_axes=out_axes,
            devices=self.devices,
            donate_argnums=donated,
        )
        if self.n_processes > 1:
            # The compiled object skips the conversion of host-local arrays that pmap does.
            return mapped
        return mapped.lower(*arguments).compile()
