"""DataParallel: one copy of the state per device, through `jax.pmap` (this file alone uses it)."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from flaxfit.strategies._copy import copied, copy_to, unaliased
from flaxfit.strategies._free_memory import give_back_free_memory
from flaxfit.strategies._local import given_devices, local_devices
from flaxfit.strategies._replica import REPLICA, check_axis_name, only_replica, unmapped
from flaxfit.strategies._sub_byte import check_sub_byte
from flaxfit.tree._jax_debugging import check_jit
from flaxfit.tree._types import ArrayLike, Function, PyTree

# For several devices XLA looks for common expressions once more, before it rearranges anything.
# Where it looks for none, the arithmetic of a replica is the same on one device and on several.
_AS_ON_ONE_DEVICE = {"xla_disable_hlo_passes": "cse"}

# Numbers that a compiled function takes just as `jax.device_put` does, by NumPy's codes of them.
_NUMBERS = "?bBhHiIlLqQefd"


class DataParallel:
    """Replicates the state and splits each batch over the devices.

    The state goes in and out of the mapped function with axis `None`: it carries no device
    axis, which is faster than the stacked form and reads back without a gather.

    >>> DataParallel(jax.local_devices()[:1]).n_devices
    1

    With `virtual_replicas` a batch is divided among so many replicas on however many devices, and
    each device works at its share of them one after the other. What they find is added in an
    order that does not depend on the devices either: on 1, 2, 4, ... of them, in one process or
    several, training gives the same parameters and metrics to the bit, and continues from the
    checkpoints of any other number of them as if nothing had changed.

    >>> DataParallel(jax.local_devices()[:2], virtual_replicas=8)
    DataParallel(2 cpu devices, virtual_replicas=8)

    Args:
      devices: the devices to use; None: all devices, of all processes.
      virtual_replicas: a power of two, which the number of devices divides.
      axis_name: what models call the axis of the replicas, as in `nn.BatchNorm(axis_name="batch")`.
        It is there on a single device too, but not with virtual replicas.

    Raises:
      ValueError: there are no devices, the processes have different numbers of them, the virtual
        replicas cannot be divided over them, or are given along with the name of an axis.
    """

    shardings: None = None
    """A state may be created anywhere, as each device gets all of it."""

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        *,
        virtual_replicas: int | None = None,
        axis_name: str = REPLICA,
    ):
        self.devices = given_devices(devices)
        self.virtual_replicas = virtual_replicas
        if virtual_replicas is not None:
            _check_divides(virtual_replicas, len(self.devices))
            _check_default(axis_name)
        # A model cannot name the axis of virtual replicas: there is none.
        self._axis = check_axis_name(axis_name) if virtual_replicas is None else "device"
        self._local = local_devices(self.devices)
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
        """The mapped axis, or None on a single device, where there is nothing to reduce over."""
        # A reduction over one replica is not free: 10 to 15 % of a small step.
        return self._axis if len(self.devices) > 1 else None

    @property
    def n_devices(self) -> int:
        """The number of replicas."""
        return self.virtual_replicas or len(self.devices)

    @property
    def n_processes(self) -> int:
        """How many processes the replicas belong to."""
        return len(self.devices) // len(self._local)

    def rows(self, n_examples: int) -> slice:
        """The rows of a batch of all processes that this one works at."""
        per_device = n_examples // len(self.devices)
        start = self.devices.index(self._local[0]) * per_device
        return slice(start, start + len(self._local) * per_device)

    def place(self, tree: PyTree) -> PyTree:
        """Replicates a tree, as a copy: the original outlives the donation of the replicas."""
        if all(map(_is_plain, jax.tree.leaves(tree))):
            return copy_to(self._whole)(tree)
        # device_put shares the buffer of a device that holds the array already.
        return copied(self.share(tree))

    def share(self, tree: PyTree) -> PyTree:
        """As `place`, but without a copy of what a device holds already."""
        return jax.device_put(tree, self._whole)

    def collect(self, tree: PyTree) -> PyTree:
        """A copy of a replicated tree on the first device."""
        first, *others = self._local
        if others:  # Reading one local shard is free; `x[0]` would gather.
            tree = jax.tree.map(lambda x: x.addressable_data(0), tree)
        return copied(tree, SingleDeviceSharding(first))

    def split(self, batch: PyTree, n_stacked: int = 0) -> PyTree:
        """Reshapes leaves `(n, ...)` to `(devices, n / devices, ...)`; NumPy stays on the host.

        The devices are those of this process.
        """
        n = len(self._local)
        if isinstance(batch, np.ndarray) and not n_stacked:  # The rows of a batch, at each step.
            batch = unaliased(batch)
            return batch[None] if n == 1 else batch.reshape(n, len(batch) // n, *batch.shape[1:])

        def split_leaf(x: ArrayLike) -> Any:
            if not n_stacked:
                x = unaliased(x) if isinstance(x, np.ndarray) else x
                x = x.reshape(n, x.shape[0] // n, *x.shape[1:])
            else:
                x = x.reshape(n_stacked, n, x.shape[1] // n, *x.shape[2:]).swapaxes(0, 1)
            return jax.device_put(x, self._parts) if isinstance(x, jax.Array) else x

        # Not `jax.tree.map`, whose generality a small step would notice.
        leaves, structure = jax.tree.flatten(batch)
        return structure.unflatten([split_leaf(leaf) for leaf in leaves])

    def join(self, outputs: PyTree) -> PyTree:
        """NumPy arrays of all examples in order, from outputs of a split batch."""
        host = jax.device_get(outputs)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), host)
        return multihost_utils.process_allgather(rows, tiled=True) if self.n_processes > 1 else rows

    def narrow(self, n_examples: int) -> "DataParallel":
        """The same on the largest number of devices that divides `n_examples`.

        Of several processes each takes part, with as many devices as the others. Of virtual
        replicas there are fewer, too; each process works at all of them.
        """
        if self.virtual_replicas is not None:
            return self._fewer(math.gcd(n_examples, self.virtual_replicas))
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
            self._narrowed[n] = DataParallel(devices, axis_name=self._axis)
        return self._narrowed[n]

    def _fewer(self, n: int) -> "DataParallel":
        """The same with `n` virtual replicas, on devices of this process."""
        if n == self.virtual_replicas:
            return self
        if n not in self._narrowed:
            self._narrowed[n] = DataParallel(self._local[:n], virtual_replicas=n)
        return self._narrowed[n]

    def bind(self, function: Function) -> Function:
        """The function as a single replica, so that a model may name the axis of replicas."""
        if self.virtual_replicas is not None:
            return unmapped(function)
        return only_replica(function, self, self._axis)

    def constrain(self, results: PyTree, state: PyTree) -> PyTree:
        """The results as they are: each replica has all of them."""
        return results

    def compile(
        self, function: Function, arguments: tuple[PyTree, ...], *, n_donated: int = 0
    ) -> Function:
        """Compiles `function(state, ..., batch)`; every result must agree between replicas."""
        check_sub_byte(arguments)
        mapped = self._map(function, len(arguments), None, tuple(range(n_donated)))
        if self.virtual_replicas is None:
            return self._compile(mapped, arguments)
        program = mapped.lower(*arguments).compile(compiler_options=_AS_ON_ONE_DEVICE)
        give_back_free_memory()
        return program if self.n_processes == 1 else self._on_all(program)

    def compile_split(self, function: Function, arguments: tuple[PyTree, ...]) -> Function:
        """Compiles `function(state, ..., batch)` whose results keep the device axis."""
        check_sub_byte(arguments)
        return self._compile(self._map(function, len(arguments), 0, ()), arguments)

    def _map(self, function: Any, n_arguments: int, out_axes: Any, donated: tuple[int, ...]) -> Any:
        check_jit()
        return jax.pmap(
            function,
            axis_name=self._axis,
            in_axes=(None,) * (n_arguments - 1) + (0,),
            out_axes=out_axes,
            devices=self.devices,
            donate_argnums=donated,
        )

    def _compile(self, mapped: Any, arguments: tuple[PyTree, ...]) -> Function:
        if self.n_processes > 1:
            # The compiled object skips the conversion of host-local arrays that pmap does.
            return mapped
        program = mapped.lower(*arguments).compile()
        give_back_free_memory()
        return program

    def _on_all(self, program: Function) -> Function:
        """A program for the devices of all processes, called with the arrays of this one."""
        everywhere = Mesh(np.array(self.devices), (self._axis,))

        def share(tree: PyTree, here: NamedSharding, n: int) -> PyTree:
            def share_leaf(x: ArrayLike) -> Any:
                there = NamedSharding(everywhere, here.spec)
                return _assemble((x.shape[0] * n, *x.shape[1:]) if n else x.shape, there, x)

            return jax.tree.map(share_leaf, jax.device_put(tree, here))

        def call(*arguments: PyTree) -> Any:
            *whole, batch = arguments
            whole, batch = share(whole, self._whole, 0), share(batch, self._parts, self.n_processes)
            return jax.tree.map(
                lambda x: _assemble(x.shape, self._whole, x), program(*whole, batch)
            )

        return call


def _is_plain(x: ArrayLike) -> bool:
    """Whether it is an array of NumPy, of numbers in this machine's order of bytes."""
    return type(x) is np.ndarray and x.dtype.isnative and x.dtype.char in _NUMBERS


def _assemble(shape: tuple[int, ...], sharding: NamedSharding, array: jax.Array) -> jax.Array:
    """The array of this shape of which another one holds this process's parts."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _check_default(axis_name: str) -> None:
    if axis_name != REPLICA:
        raise ValueError(
            f"Cannot name an axis (axis_name={axis_name!r}) with virtual_replicas: a device works "
            "at its replicas one after the other, so that models cannot reduce over them. Leave "
            "one of the two out."
        )


def _check_divides(virtual_replicas: int, n_devices: int) -> None:
    if virtual_replicas < 1 or virtual_replicas & (virtual_replicas - 1):
        raise ValueError(
            f"virtual_replicas must be a power of two, such as 8, got {virtual_replicas}: what "
            "the replicas find is added in pairs."
        )
    if virtual_replicas % n_devices:
        n = math.gcd(virtual_replicas, 1 << (n_devices.bit_length() - 1))
        raise ValueError(
            f"Cannot divide {virtual_replicas} virtual replicas over {n_devices} devices: "
            f"{virtual_replicas} % {n_devices} = {virtual_replicas % n_devices}. Pass "
            f"devices=jax.devices()[:{n}], or another number of virtual replicas."
        )
