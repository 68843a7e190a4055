"""DataParallel: one copy of the state per device, and one program mapped over the devices."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from flaxfit.strategies._compilation import can_call
from flaxfit.strategies._copy import copied, placed_copy, unaliased
from flaxfit.strategies._devices import given_devices, local_devices
from flaxfit.strategies._mapped import Implementation, by_axis, chosen, is_unsplit, mapped
from flaxfit.strategies._replica import REPLICA, check_axis_name, only_replica, without_axis
from flaxfit.tree import Array, Device, Function, PyTree

# For several devices XLA runs common subexpression elimination once more, before other passes.
# Without that pass, a replica has the same arithmetic on one device and on several.
_AS_ON_ONE_DEVICE = {"xla_disable_hlo_passes": "cse"}


class DataParallel:
    """Replicates the state and splits each batch over the devices.

    The state goes in and out of the mapped function with axis `None`: it carries no device
    axis, which is faster than the stacked form and reads back without a gather.

    >>> DataParallel(jax.local_devices()[:1]).n_devices
    1

    With `virtual_replicas` a batch is divided among that many replicas, and each device computes
    several of them one after the other. The order of summation does not depend on the devices. So
    training on 1, 2, 4, ... devices, in one process or several, gives bitwise equal parameters and
    metrics, and can resume on any of these numbers of devices.

    >>> DataParallel(jax.local_devices()[:2], virtual_replicas=8)
    DataParallel(2 cpu devices, virtual_replicas=8)

    Args:
      devices: the devices to use; None: all devices, of all processes.
      virtual_replicas: a power of two that is a multiple of the number of devices.
      axis_name: what models call the axis of the replicas, as in `nn.BatchNorm(axis_name="batch")`.
        It exists on a single device too, but not with virtual replicas.
      implementation: "pmap", or "shard_map" for `jax.jit` of `jax.shard_map`, on which JAX 0.8 and
        later build `jax.pmap`. Both give the same results: states, metrics and checkpoints have
        the same bits and layout, and a run can resume with the other. "auto": "shard_map" in one
        process, where JAX keeps all that "pmap" has mapped for good; "pmap" in several, where it
        passes the state to the program faster.

    Raises:
      ValueError: there are no devices, the processes have different numbers of them, the virtual
        replicas cannot be divided over them, or are given along with the name of an axis; or the
        implementation is unknown.
    """

    shardings: None = None
    """None: each device holds the whole state, so it may be created anywhere."""
    runs_eagerly = False
    text: str = ""
    """The latest lowered program, for comparing processes; only with several processes."""

    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        *,
        virtual_replicas: int | None = None,
        axis_name: str = REPLICA,
        implementation: Implementation | Literal["auto"] = "auto",
    ):
        self.devices: tuple[Device, ...] = given_devices(devices)
        self.virtual_replicas = virtual_replicas
        if virtual_replicas is not None:
            _check_divides(virtual_replicas, len(self.devices))
            _check_default(axis_name)
        # With virtual replicas, models cannot name the axis.
        self._axis = check_axis_name(axis_name) if virtual_replicas is None else "device"
        self._local = local_devices(self.devices)
        self.n_processes: int = len(self.devices) // len(self._local)
        self.implementation: Implementation = chosen(implementation, self.n_processes)
        """How the function of a step is mapped: "pmap" or "shard_map"."""
        self._everywhere = Mesh(np.array(self.devices), (self._axis,))
        here = Mesh(np.array(self._local), (self._axis,))
        self._whole = NamedSharding(here, PartitionSpec())
        self._parts = NamedSharding(here, PartitionSpec(self._axis))
        self._first = SingleDeviceSharding(self._local[0])
        self._is_unsplit = is_unsplit(self._everywhere, self.implementation)
        self._narrowed: dict[int, DataParallel] = {}

    def __repr__(self) -> str:
        more = ""
        if self.virtual_replicas is not None:
            more = f", virtual_replicas={self.virtual_replicas}"
        elif self._axis != REPLICA:
            more = f", axis_name={self._axis!r}"
        if self.implementation != chosen("auto", self.n_processes):
            more += f", implementation={self.implementation!r}"
        n, kind = len(self.devices), self.devices[0].platform
        return f"DataParallel({n} {kind} {'device' if n == 1 else 'devices'}{more})"

    @property
    def axis_name(self) -> str | None:
        """The mapped axis; None on a single device."""
        # None, as a reduction over one replica is not free: 10 to 15 % of a small step.
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
        """Replicates a tree; unlike `place`, does not copy arrays that a device already holds."""
        return jax.device_put(tree, self._whole)

    def collect(self, tree: PyTree) -> PyTree:
        """Copies a replicated tree to the first device."""
        first, *others = self._local
        if others:  # Reading one local shard is free; `x[0]` would gather.
            tree = jax.tree.map(lambda x: x.addressable_data(0), tree)
        return copied(tree, SingleDeviceSharding(first))

    def split(self, batch: PyTree, n_stacked: int = 0) -> PyTree:
        """Reshapes leaves `(n, ...)` to `(devices, n / devices, ...)`; NumPy stays on the host.

        The devices are this process's. Without `jax.pmap`, a single device takes the leaves
        unchanged: adding an axis would take as long as dispatching a step.
        """
        if isinstance(batch, np.ndarray):
            return self._split_leaf(batch, n_stacked)
        # Not `jax.tree.map`, which takes twice as long at each step.
        leaves, structure = jax.tree.flatten(batch)
        return structure.unflatten([self._split_leaf(leaf, n_stacked) for leaf in leaves])

    def _split_leaf(self, x: Array, n_stacked: int) -> Array:
        # Not `isinstance(x, jax.Array)`, which would take as long as all the rest.
        is_host = isinstance(x, np.ndarray)
        x = x if n_stacked else unaliased(x)
        if self._is_unsplit:
            is_usable = isinstance(x, np.ndarray) or x.sharding == self._first
            return x if is_usable else jax.device_put(x, self._whole)
        n = len(self._local)
        if n_stacked:
            parts = (n, x.shape[1] // n, *x.shape[2:]) if n > 1 else (1, *x.shape[1:])
            x = x.reshape(n_stacked, *parts).swapaxes(0, 1)
        else:
            x = x.reshape(n, x.shape[0] // n, *x.shape[1:]) if n > 1 else x.reshape(1, *x.shape)
        return x if is_host else jax.device_put(x, self._parts)

    def join(self, outputs: PyTree) -> PyTree:
        """Returns NumPy arrays of all examples in order, from outputs of a split batch."""
        is_on_cpu = self.devices[0].platform == "cpu"  # NumPy reads a CPU's memory in place.
        host = outputs if is_on_cpu else jax.device_get(outputs)
        leaves, structure = jax.tree.flatten(host)
        rows = structure.unflatten([np.asarray(x).reshape(-1, *x.shape[2:]) for x in leaves])
        return multihost_utils.process_allgather(rows, tiled=True) if self.n_processes > 1 else rows

    def narrow(self, n_examples: int) -> "DataParallel":
        """Returns the strategy with the largest number of devices that divides `n_examples`.

        Every process takes part, with equally many devices. Virtual replicas become fewer, too, and
        each process computes all of them.
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
            make = functools.partial(DataParallel, implementation=self.implementation)
            if self.virtual_replicas is not None:
                narrowed = make(self._local[:n], virtual_replicas=n)
            else:
                of_each, kept = len(self._local), n // n_processes
                devices = [d for i, d in enumerate(self.devices) if i % of_each < kept]
                narrowed = make(devices, axis_name=self._axis)
            self._narrowed[n] = narrowed
        return self._narrowed[n]

    def bind(self, function: Function) -> Function:
        """Makes the function a single replica, so that models may name the axis of replicas."""
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

        With `has_rows` the function returns a pair; the second part keeps the device axis.
        """
        out_axes = (None, 0) if has_rows else None
        options = None if self.virtual_replicas is None else _AS_ON_ONE_DEVICE
        return self._compile(function, arguments, out_axes, n_donated, options)

    def compile_split(self, function: Function, arguments: tuple[PyTree, ...]) -> Function:
        """Compiles `function(state, ..., batch)` whose results keep the device axis."""
        return self._compile(function, arguments, 0)

    def _compile(
        self,
        function: Function,
        arguments: tuple[PyTree, ...],
        out_axes: PyTree,
        n_donated: int = 0,
        options: Mapping[str, str] | None = None,
    ) -> Function:
        is_pmap = self.implementation == "pmap"
        program = mapped(
            function,
            self._everywhere,
            len(arguments),
            out_axes,
            n_donated=n_donated,
            implementation=self.implementation,
        )
        # Do not compile ahead: only a call of pmap itself converts host-local arrays.
        if is_pmap and self.n_processes > 1 and options is None:
            self.text = program.lower(*arguments).as_text()
            return program
        if can_call(arguments, options):
            lowered = program.lower(*(arguments if is_pmap else self._share_with_all(arguments)))
            self.text = lowered.as_text() if self.n_processes > 1 else ""
            program = lowered.compile(dict(options) if options else None)
        return program if self.n_processes == 1 else self._on_all(program, out_axes)

    def _on_all(self, program: Function, out_axes: PyTree) -> Function:
        """Wraps a program over all processes to take, and return, this process's arrays."""
        n = len(self._local)

        def own(results: PyTree, axis: int | None) -> PyTree:
            def own_leaf(x: jax.Array) -> jax.Array:
                if axis is None:
                    return _assemble(x.shape, self._whole, x)
                return _assemble((n, *x.shape[1:]), self._parts, x)

            return jax.tree.map(own_leaf, results)

        def call(*arguments: PyTree) -> PyTree:
            return by_axis(own, program(*self._share_with_all(arguments)), out_axes)

        return call

    def _share_with_all(self, arguments: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Converts this process's arguments to global arrays of all processes."""
        if self.n_processes == 1:
            return arguments

        def share(tree: PyTree, here: NamedSharding, n: int) -> PyTree:
            there = NamedSharding(self._everywhere, here.spec)

            def share_leaf(x: jax.Array) -> jax.Array:
                return _assemble((x.shape[0] * n, *x.shape[1:]) if n else x.shape, there, x)

            return jax.tree.map(share_leaf, jax.device_put(tree, here))

        *whole, batch = arguments
        batch = share(batch, self._parts, self.n_processes)
        return (*share(whole, self._whole, 0), batch)


def _assemble(shape: tuple[int, ...], sharding: NamedSharding, array: jax.Array) -> jax.Array:
    """Makes an array from this process's shards of another array."""
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
