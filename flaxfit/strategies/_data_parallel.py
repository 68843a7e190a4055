"""DataParallel: one copy of the state per device, through `jax.pmap` (this file alone uses it)."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from flaxfit.strategies._compilation import can_call, compiled
from flaxfit.strategies._copy import copied, placed_copy, unaliased
from flaxfit.strategies._devices import given_devices, local_devices
from flaxfit.strategies._replica import REPLICA, check_axis_name, only_replica, without_axis
from flaxfit.tree._types import Array, Device, Function, PyTree

# For several devices XLA eliminates common subexpressions once more, before it rearranges anything.
# Without that pass the arithmetic of a replica is the same on one device and on several.
_AS_ON_ONE_DEVICE = {"xla_disable_hlo_passes": "cse"}


class DataParallel:
    """Replicates the state and splits each batch over the devices.

    The state goes in and out of the mapped function with axis `None`: it carries no device
    axis, which is faster than the stacked form and reads back without a gather.

    >>> DataParallel(jax.local_devices()[:1]).n_devices
    1

    With `virtual_replicas` a batch is divided among that many replicas, and each device computes
    its share of them one after the other. Their results are added in an order that does not depend
    on the devices: on 1, 2, 4, ... of them, in one process or several, training gives the same
    parameters and metrics to the bit, and resumes from checkpoints of any other number of devices
    without a difference.

    >>> DataParallel(jax.local_devices()[:2], virtual_replicas=8)
    DataParallel(2 cpu devices, virtual_replicas=8)

    Args:
      devices: the devices to use; None: all devices, of all processes.
      virtual_replicas: a power of two, which the number of devices divides.
      axis_name: what models call the axis of the replicas, as in `nn.BatchNorm(axis_name="batch")`.
        It exists on a single device too, but not with virtual replicas.

    Raises:
      ValueError: there are no devices, the processes have different numbers of them, the virtual
        replicas cannot be divided over them, or are given along with the name of an axis.
    """

    shardings: None = None
    """A state may be created anywhere, as each device gets all of it."""

    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        *,
        virtual_replicas: int | None = None,
        axis_name: str = REPLICA,
    ):
        self.devices = given_devices(devices)
        self.virtual_replicas = virtual_replicas
        if virtual_replicas is not None:
            _check_divides(virtual_replicas, len(self.devices))
            _check_default(axis_name)
        # With virtual replicas there is no axis that a model could name.
        self._axis = check_axis_name(axis_name) if virtual_replicas is None else "device"
        self._local = local_devices(self.devices)
        self.n_processes = len(self.devices) // len(self._local)
        mesh = Mesh(np.array(self._local), (self._axis,))
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._parts = NamedSharding(mesh, PartitionSpec(self._axis))
        self._narrowed: dict[int, DataParallel] = {}

    def __repr__(self) -> str:
        more = ""
        if self.virtual_replicas is not None:
            more = f", virtual_replicas={self.virtual_replicas}"
        elif self._axis != REPLICA:
            more = f", axis_name={self._axis!r}"
        return f"DataParallel({len(self.devices)} {self.devices[0].platform} devices{more})"

    @property
    def axis_name(self) -> str | None:
        """The mapped axis; None on a single device, where there is nothing to reduce over."""
        # A reduction over one replica is not free: 10 to 15 % of a small step.
        return self._axis if len(self.devices) > 1 else None

    @property
    def n_devices(self) -> int:
        """The number of replicas."""
        return self.virtual_replicas or len(self.devices)

    def rows(self, n_examples: int) -> slice:
        """Returns the rows of a batch of all processes that this process computes."""
        per_device = n_examples // len(self.devices)
        start = self.devices.index(self._local[0]) * per_device
        return slice(start, start + len(self._local) * per_device)

    def place(self, tree: PyTree) -> PyTree:
        """Replicates a copy of a tree: the original outlives the donation of the replicas."""
        return placed_copy(tree, self.share)

    def share(self, tree: PyTree) -> PyTree:
        """Replicates a tree; unlike `place`, without a copy of what a device already holds."""
        return jax.device_put(tree, self._whole)

    def collect(self, tree: PyTree) -> PyTree:
        """Copies a replicated tree to the first device."""
        first, *others = self._local
        if others:  # Reading one local shard is free; `x[0]` would gather.
            tree = jax.tree.map(lambda x: x.addressable_data(0), tree)
        return copied(tree, SingleDeviceSharding(first))

    def split(self, batch: PyTree, n_stacked: int = 0) -> PyTree:
        """Reshapes leaves `(n, ...)` to `(devices, n / devices, ...)`; NumPy stays on the host.

        The devices are those of this process.
        """
        if isinstance(batch, np.ndarray):
            return self._split_leaf(batch, n_stacked)
        # Not `jax.tree.map`, which takes twice as long at each step.
        leaves, structure = jax.tree.flatten(batch)
        return structure.unflatten([self._split_leaf(leaf, n_stacked) for leaf in leaves])

    def _split_leaf(self, x: Array, n_stacked: int) -> Array:
        n = len(self._local)
        if n_stacked:
            parts = (n, x.shape[1] // n, *x.shape[2:]) if n > 1 else (1, *x.shape[1:])
            x = x.reshape(n_stacked, *parts).swapaxes(0, 1)
        else:
            is_host = isinstance(x, np.ndarray)
            x = unaliased(x) if is_host else x
            # An index is faster in NumPy, and slower in JAX.
            if n == 1:
                x = x[None] if is_host else x.reshape(1, *x.shape)
            else:
                x = x.reshape(n, x.shape[0] // n, *x.shape[1:])
        # To ask whether it is a `jax.Array` would take as long as all the rest.
        return x if isinstance(x, np.ndarray) else jax.device_put(x, self._parts)

    def join(self, outputs: PyTree) -> PyTree:
        """Returns NumPy arrays of all examples in order, from outputs of a split batch."""
        host = jax.device_get(outputs)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), host)
        return multihost_utils.process_allgather(rows, tiled=True) if self.n_processes > 1 else rows

    def narrow(self, n_examples: int) -> "DataParallel":
        """Returns the strategy with the largest number of devices that divides `n_examples`.

        Each of several processes takes part, with as many devices as the others. Virtual replicas
        become fewer too, and each process computes all of them.
        """
        n_processes = self.n_processes
        if self.virtual_replicas is not None:
            n = math.gcd(n_examples, self.virtual_replicas)
        else:
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
            if self.virtual_replicas is not None:
                narrowed = DataParallel(self._local[:n], virtual_replicas=n)
            else:
                of_each, kept = len(self._local), n // n_processes
                devices = [d for i, d in enumerate(self.devices) if i % of_each < kept]
                narrowed = DataParallel(devices, axis_name=self._axis)
            self._narrowed[n] = narrowed
        return self._narrowed[n]

    def bind(self, function: Function) -> Function:
        """Makes the function a single replica, in which a model may name the axis of replicas."""
        if self.virtual_replicas is not None:
            return without_axis(function)
        return only_replica(function, self, self._axis)

    def constrain(self, results: PyTree, state: PyTree) -> PyTree:
        """Returns the results unchanged: each replica has all of them."""
        return results

    def compile(
        self,
        function: Function,
        arguments: tuple[PyTree, ...],
        *,
        n_donated: int = 0,
        has_rows: bool = False,
    ) -> Function:
        """Compiles `function(state, ..., batch)`; every result must agree between replicas.

        With `has_rows` it returns a pair, of which the second part keeps the device axis.
        """
        out_axes = (None, 0) if has_rows else None
        mapped = self._map(function, len(arguments), out_axes, n_donated)
        options = None if self.virtual_replicas is None else _AS_ON_ONE_DEVICE
        # The compiled object skips the conversion of host-local arrays that pmap does.
        if (options is None and self.n_processes > 1) or not can_call(arguments, options):
            return mapped
        program = compiled(mapped.lower(*arguments), options)
        if options is None:
            return program
        return program if self.n_processes == 1 else self._on_all(program, has_rows)

    def compile_split(self, function: Function, arguments: tuple[PyTree, ...]) -> Function:
        """Compiles `function(state, ..., batch)` whose results keep the device axis."""
        mapped = self._map(function, len(arguments), 0, 0)
        if self.n_processes > 1 or not can_call(arguments):
            return mapped
        return compiled(mapped.lower(*arguments))

    def _map(
        self, function: Function, n_arguments: int, out_axes: PyTree, n_donated: int
    ) -> jax.stages.Wrapped:
        return jax.pmap(
            function,
            axis_name=self._axis,
            in_axes=(None,) * (n_arguments - 1) + (0,),
            out_axes=out_axes,
            devices=self.devices,
            donate_argnums=tuple(range(n_donated)),
        )

    def _on_all(self, program: Function, has_rows: bool) -> Function:
        """Makes a program for the devices of all processes take the arrays of this one."""
        everywhere = Mesh(np.array(self.devices), (self._axis,))

        def share(tree: PyTree, here: NamedSharding, n: int) -> PyTree:
            there = NamedSharding(everywhere, here.spec)

            def share_leaf(x: jax.Array) -> jax.Array:
                return _assemble((x.shape[0] * n, *x.shape[1:]) if n else x.shape, there, x)

            return jax.tree.map(share_leaf, jax.device_put(tree, here))

        def own(x: jax.Array) -> jax.Array:
            return _assemble((len(self._local), *x.shape[1:]), self._parts, x)

        def call(*arguments: PyTree) -> PyTree:
            *whole, batch = arguments
            whole, batch = share(whole, self._whole, 0), share(batch, self._parts, self.n_processes)
            results, rows = program(*whole, batch) if has_rows else (program(*whole, batch), ())
            results = jax.tree.map(lambda x: _assemble(x.shape, self._whole, x), results)
            return (results, jax.tree.map(own, rows)) if has_rows else results

        return call


def _assemble(shape: tuple[int, ...], sharding: NamedSharding, array: jax.Array) -> jax.Array:
    """Makes an array of the parts of another that this process holds."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _check_default(axis_name: str) -> None:
    if axis_name != REPLICA:
        raise ValueError(
            f"Cannot name an axis (axis_name={axis_name!r}) with virtual_replicas: a device "
            "computes its replicas one after the other, so that models cannot reduce over them. "
            "Leave one of the two out."
        )


def _check_divides(virtual_replicas: int, n_devices: int) -> None:
    if virtual_replicas < 1 or virtual_replicas & (virtual_replicas - 1):
        raise ValueError(
            f"virtual_replicas must be a power of two, such as 8, got {virtual_replicas}: the "
            "results of the replicas are added in pairs."
        )
    if virtual_replicas % n_devices:
        n = math.gcd(virtual_replicas, 1 << (n_devices.bit_length() - 1))
        raise ValueError(
            f"Cannot divide {virtual_replicas} virtual replicas over {n_devices} devices: "
            f"{virtual_replicas} % {n_devices} = {virtual_replicas % n_devices}. Pass "
            f"devices=jax.devices()[:{n}], or another number of virtual replicas."
        )
