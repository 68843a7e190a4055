"""Sharded: one program (`jax.jit`) over a mesh of devices that hold parts of the state."""

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flaxfit.state import specs_by_parameter
from flaxfit.strategies._compilation import can_call
from flaxfit.strategies._copy import copied, placed_copy, unaliased
from flaxfit.strategies._devices import given_devices
from flaxfit.strategies._gather import gather
from flaxfit.strategies._layout import Layout, layout
from flaxfit.strategies._mesh import axis_sizes, fsdp_axis, within
from flaxfit.strategies._replica import REPLICA, check_axis_name, only_replica
from flaxfit.strategies._specs import STANDARD_RULES, MeshAxes, axes_of, state_specs
from flaxfit.tree import Array, Device, Function, PyTree, Rules, path_of, put


class Sharded:
    """Splits the state and the batches over a named mesh; the compiler adds the communication.

    The state is created and kept in parts: `gather` returns whole arrays. Batches are split over
    the axes "data" and "fsdp" of the mesh, or the axes of the rule "batch". Parameters are split by
    the names of their dimensions (`nn.with_logical_partitioning`, `nnx.with_partitioning`), which
    rules map to axes of the mesh, or by patterns of their paths; the optimizer's state is split
    like them. For each name, the first rule whose axes are free applies. A name without a rule that
    is itself an axis of the mesh is split over it; else that dimension stays whole.

    A step sees the whole batch: losses, BatchNorm and random streams are as on one device.

    >>> strategy = Sharded({"data": 2, "model": 2}, fsdp=True)
    >>> strategy
    Sharded(data=2, model=2, fsdp='data')
    >>> from flaxfit import InferenceState
    >>> state = InferenceState(0, {"w": jax.ShapeDtypeStruct((512, 64), "float32")}, {})
    >>> strategy.describe(state).arrays["params/w"].spec == PartitionSpec("data", None)
    True

    Args:
      mesh_shape: axis names and their sizes, one of which may be -1 (the remaining devices);
        None: all devices on the axis "data".
      rules: pairs of a logical name and an axis (or a tuple of axes, or None), or of a pattern of
        parameter paths ("encoder/.*/kernel") and a `PartitionSpec`. None: the usual names of a
        transformer's dimensions ("vocab", "heads", "mlp") over the axis "model".
      fsdp: whether to split arrays further, except small ones, along the largest divisible
        dimension that the rules leave whole: over the axis "fsdp" if the mesh has it, else "data",
        or over the axis of this name.
      devices: the devices to use; None: all devices, of all processes.
      axis_name: what models call the axis of replicas, as in `nn.BatchNorm(axis_name="batch")`:
        here the whole batch is one replica. It is not an axis of the mesh.

    Raises:
      ValueError: the sizes do not multiply to the number of devices, or `fsdp` names no axis.
    """

    axis_name: str | None = None
    """None: the compiler reduces, as a step sees the whole batch."""
    runs_eagerly = False
    text: str = ""
    """The lowered text of the latest program that several processes compiled, to compare."""
    virtual_replicas: int | None = None

    def __init__(
        self,
        mesh_shape: Mapping[str, int] | None = None,
        *,
        rules: Rules | Mapping[str, MeshAxes] | None = None,
        fsdp: bool | str = False,
        devices: Sequence[Device] | None = None,
        axis_name: str = REPLICA,
    ):
        self.devices: tuple[Device, ...] = given_devices(devices)
        self.n_processes: int = len({device.process_index for device in self.devices})
        self._replica = check_axis_name(axis_name)
        sizes = axis_sizes({"data": -1} if mesh_shape is None else mesh_shape, len(self.devices))
        self.mesh: Mesh = jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            axis_types=(AxisType.Auto,) * len(sizes),
            devices=self.devices,
        )
        self._sizes = sizes
        if rules is None:
            rules = [rule for rule in STANDARD_RULES if {*axes_of(rule[1])} <= {*sizes}]
        self.rules: Rules = tuple(rules.items() if isinstance(rules, Mapping) else rules)
        batch = [axes_of(value) for name, value in self.rules if name == "batch"]
        batch = batch[0] if batch else [name for name in ("data", "fsdp") if name in sizes]
        self._batch_axes = tuple(axis for axis in batch if axis in sizes)
        self._fsdp_axis = fsdp_axis(fsdp, sizes)
        self._narrowed: dict[tuple[str, ...], Sharded] = {self._batch_axes: self}

    @classmethod
    def fsdp(cls, devices: Sequence[Device] | None = None) -> "Sharded":
        """Shards every large array over all devices: fully sharded data parallelism (FSDP).

        >>> Sharded.fsdp(jax.devices()[:2])
        Sharded(data=2, fsdp='data')
        """
        return cls(fsdp=True, devices=devices)

    @classmethod
    def tensor_parallel(
        cls,
        size: int = -1,
        *,
        fsdp: bool = False,
        rules: Rules | Mapping[str, MeshAxes] | None = None,
        devices: Sequence[Device] | None = None,
    ) -> "Sharded":
        """Splits the arrays of a model with named dimensions over `size` devices.

        The remaining devices split the batch, and with `fsdp` also the rest of the arrays.

        >>> Sharded.tensor_parallel(2, fsdp=True, devices=jax.devices()[:4])
        Sharded(data=2, model=2, fsdp='data')
        """
        sizes = {"data": 1, "model": -1} if size == -1 else {"data": -1, "model": size}
        return cls(sizes, rules=rules, fsdp=fsdp, devices=devices)

    def __repr__(self) -> str:
        parts = [f"{axis}={size}" for axis, size in self._sizes.items()]
        parts += [f"fsdp={self._fsdp_axis!r}"] if self._fsdp_axis else []
        parts += [f"axis_name={self._replica!r}"] if self._replica != REPLICA else []
        return f"Sharded({', '.join(parts)})"

    @property
    def n_devices(self) -> int:
        """The number of parts that a batch is split into."""
        return math.prod(self._sizes[axis] for axis in self._batch_axes)

    def rows(self, n_examples: int) -> slice:
        """Returns the rows of a batch of all processes that the devices of this process get."""
        parts = self._batch_sharding().addressable_devices_indices_map((n_examples,))
        bounds = [part[0].indices(n_examples) for part in parts.values() if part]
        return slice(min(start for start, *_ in bounds), max(stop for _, stop, _ in bounds))

    def describe(self, state: PyTree) -> Layout:
        """Describes how a state would be laid out, as a table when printed; allocates nothing.

        >>> import jax.numpy as jnp, optax
        >>> from flaxfit import init_state
        >>> init = lambda rngs, x: {"params": {"w": jnp.ones((4096, 4))}}
        >>> abstract = jax.eval_shape(lambda: init_state(init, optax.sgd(0.1), 0, (jnp.ones(1),)))
        >>> Sharded.fsdp(jax.devices()[:4]).describe(abstract).arrays["params/w"].bytes_per_device
        16384

        Args:
          state: a `TrainState` or `InferenceState`, of arrays or of `jax.ShapeDtypeStruct`s.

        Raises:
          ValueError: rules and arrays do not match; it lists every case.
        """
        return layout(state, self._specs(state), self._sizes, self._batch_axes)

    def shardings(self, state: PyTree) -> PyTree:
        """Returns a sharding for each array of a state.

        Raises:
          ValueError: rules and arrays do not match; it lists every case.
        """
        specs = self._specs(state)
        at = jax.tree_util.tree_map_with_path
        return at(lambda path, _: NamedSharding(self.mesh, specs[path_of(path)]), state)

    def place(self, tree: PyTree) -> PyTree:
        """Spreads a copy of a tree over the mesh; replicates arrays outside states."""
        return placed_copy(tree, self.share)

    def share(self, tree: PyTree) -> PyTree:
        """Like `place`, without a copy of arrays that are already placed."""
        placements = self._placements(tree)
        if self.n_processes == 1:
            return jax.device_put(tree, placements)
        return jax.tree.map(put, tree, placements)

    def collect(self, tree: PyTree) -> PyTree:
        """Copies a placed tree with its shardings."""
        return copied(tree)

    def split(self, batch: PyTree, n_stacked: int = 0) -> PyTree:
        """Splits the leaves `(n, ...)` of a batch, or `(n_stacked, n, ...)`, over the mesh.

        NumPy arrays stay on the host: the compiled function moves each part to its device.
        """
        if isinstance(batch, np.ndarray):
            return self._split_leaf(batch, n_stacked)
        # Not `jax.tree.map`, which takes twice as long at each step.
        leaves, structure = jax.tree.flatten(batch)
        return structure.unflatten([self._split_leaf(leaf, n_stacked) for leaf in leaves])

    def _split_leaf(self, x: Array, n_stacked: int) -> Array:
        x = x if n_stacked else unaliased(x)
        if self.n_processes > 1:
            return jax.make_array_from_process_local_data(self._split_as(x, n_stacked), x)
        # A compiled function takes host arrays for a single batch.
        is_placed = n_stacked or isinstance(x, jax.Array)
        return jax.device_put(x, self._split_as(x, n_stacked)) if is_placed else x

    def join(self, outputs: PyTree) -> PyTree:
        """Returns NumPy arrays of all examples in order, from outputs of a split batch."""
        return gather(outputs)

    def narrow(self, n_examples: int) -> "Sharded":
        """Returns the strategy with batches split only over axes that divide `n_examples`.

        Along the other axes the devices repeat the same work; the state does not move.
        """
        options = [
            axes
            for n in range(len(self._batch_axes) + 1)
            for axes in combinations(self._batch_axes, n)
            if n_examples % math.prod(self._sizes[axis] for axis in axes) == 0
        ]
        chosen = max(options, key=lambda axes: math.prod(self._sizes[axis] for axis in axes))
        if chosen not in self._narrowed:
            narrowed = copy.copy(self)
            narrowed._batch_axes = chosen
            self._narrowed[chosen] = narrowed
        return self._narrowed[chosen]

    def bind(self, function: Function) -> Function:
        """Traces the function with the mesh and the rules for `nn.with_logical_constraint`."""
        alone = only_replica(function, self, self._replica)
        given = next(iter(self._narrowed))
        dropped = {axis for axis in given if axis not in self._batch_axes}

        def bound(*arguments: PyTree) -> PyTree:
            with within(self.mesh, self.rules, self._batch_axes, dropped):
                return alone(*arguments)

        return bound

    def constrain(self, results: PyTree, state: PyTree) -> PyTree:
        """Constrains traced results to the shardings of `place`, gradients to the parameters'."""
        return jax.lax.with_sharding_constraint(results, self._placements(results, state))

    def compile(
        self,
        function: Function,
        arguments: tuple[PyTree, ...],
        *,
        n_donated: int = 0,
        has_rows: bool = False,
    ) -> Function:
        """Compiles `function(state, ..., batch)`, whose results are laid out by `constrain`.

        With `has_rows` the function returns a pair; the second part is split like the batch.
        """
        bound = self.bind(function)

        def placed(*arguments: PyTree) -> PyTree:
            results, rows = bound(*arguments)
            return results, self._split_rows(rows)

        function = placed if has_rows else bound
        return self._compile(function, arguments, n_donated, keeps_text=self.n_processes > 1)

    def compile_split(self, function: Function, arguments: tuple[PyTree, ...]) -> Function:
        """Compiles `function(state, ..., batch)` whose results are split like the batch."""
        bound = self.bind(function)

        def split(*arguments: PyTree) -> PyTree:
            return self._split_rows(bound(*arguments))

        return self._compile(split, arguments)

    def _split_rows(self, results: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(results, jax.tree.map(self._split_as, results))

    def _compile(
        self,
        function: Function,
        arguments: tuple[PyTree, ...],
        n_donated: int = 0,
        *,
        keeps_text: bool = False,
    ) -> Function:
        *states, batch = arguments

        def place_of(x: Array) -> jax.sharding.Sharding:
            return x.sharding if isinstance(x, jax.Array) else self._split_as(x)

        # A bare list of a state's arrays has no paths for the rules: keep their own shardings.
        def stay(x: PyTree, place: NamedSharding) -> jax.sharding.Sharding:
            is_on_mesh = isinstance(x, jax.Array) and getattr(x.sharding, "mesh", None) == self.mesh
            return x.sharding if is_on_mesh else place

        places = [jax.tree.map(stay, state, self._placements(state)) for state in states]
        shardings = (*places, jax.tree.map(place_of, batch))
        donated = tuple(range(n_donated))
        jitted = jax.jit(function, in_shardings=shardings, donate_argnums=donated)
        is_ahead = can_call(arguments)
        if not is_ahead and not keeps_text:
            return jitted
        lowered = jitted.lower(*arguments)
        if keeps_text:
            self.text = lowered.as_text()
        return lowered.compile() if is_ahead else jitted

    def _split_as(self, x: Array, n_stacked: int = 0) -> NamedSharding:
        """Returns the sharding of an array of a batch: split by rows; a number is whole."""
        is_number = x.ndim == bool(n_stacked)
        whole = NamedSharding(self.mesh, PartitionSpec())
        return whole if is_number else self._batch_sharding(n_stacked)

    def _batch_sharding(self, n_stacked: int = 0) -> NamedSharding:
        spec = (None, self._batch_axes) if n_stacked else (self._batch_axes,)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _specs(self, state: PyTree) -> dict[str, PartitionSpec]:
        rules = [rule for rule in self.rules if rule[0] != "batch"]
        return state_specs(state, self._sizes, rules, self._fsdp_axis)

    def _placements(self, tree: PyTree, state: PyTree = None) -> PyTree:
        """Returns the sharding of every array of a tree: by the rules in states, else replicated.

        If `state` is given, trees like its parameters, such as gradients, are spread like these.
        """
        specs = {}
        if _is_state(state) and not hasattr(state.params, "shape"):
            of_params = {p: spec for p, spec in self._specs(state).items() if p[:7] == "params/"}
            specs = specs_by_parameter({"tree": tree}, {"params": state.params}, of_params)

        def placement(path: jax.tree_util.KeyPath, part: PyTree) -> PyTree:
            if _is_state(part):
                return self.shardings(part)
            spec = specs.get(f"tree/{path_of(path)}", PartitionSpec())
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(placement, tree, is_leaf=_is_state)


def _is_state(tree: PyTree) -> bool:
    return hasattr(tree, "params") and hasattr(tree, "model_state")
