"""Sharded: one program over a mesh of devices, which hold parts of the state (`jax.jit`)."""

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flaxfit.state._optimizer_axes import specs_by_parameter
from flaxfit.strategies._copy import copied, unaliased
from flaxfit.strategies._free_memory import give_back_free_memory
from flaxfit.strategies._gather import gather
from flaxfit.strategies._layout import Layout, layout
from flaxfit.strategies._local import given_devices
from flaxfit.strategies._mesh import axis_sizes, fsdp_axis, within
from flaxfit.strategies._replica import REPLICA, check_axis_name, only_replica
from flaxfit.strategies._specs import STANDARD_RULES, axes_of, state_specs
from flaxfit.strategies._sub_byte import check_sub_byte
from flaxfit.tree._jax_debugging import check_jit
from flaxfit.tree._paths import Rules, path_of
from flaxfit.tree._put import put
from flaxfit.tree._types import ArrayLike, Function, PyTree


class Sharded:
    """Splits the state and the batches over a named mesh; the compiler does the communication.

    The state is born in parts and stays so: `gather` makes whole arrays of it. Batches are split
    over the axes "data" and "fsdp" of the mesh, or those of the rule "batch". Parameters are split
    by the names of their dimensions (`nn.with_logical_partitioning`, `nnx.with_partitioning`),
    which rules map to axes of the mesh, or by patterns of their paths; the optimizer's state is
    split like them. The first rule of a name whose axes are free counts. A name without a rule is
    an axis itself, where the mesh has it; else that dimension stays whole.

    A step sees the whole batch: losses, BatchNorm and random streams are those of one device.

    >>> strategy = Sharded({"data": 2, "model": 2}, fsdp=True)
    >>> strategy
    Sharded(data=2, model=2, fsdp='data')
    >>> state = {"params": {"w": jax.ShapeDtypeStruct((512, 64), "float32")}}
    >>> from flaxfit import InferenceState
    >>> state = InferenceState(0, state["params"], {})
    >>> strategy.describe(state).arrays["params/w"].spec == PartitionSpec("data", None)
    True

    Args:
      mesh_shape: axis names and their sizes, one of which may be -1 (the remaining devices);
        None: all devices on the axis "data".
      rules: pairs of a logical name and an axis (or a tuple of axes, or None), or of a pattern of
        parameter paths ("encoder/.*/kernel") and a `PartitionSpec`. None: the usual names of a
        transformer's dimensions ("vocab", "heads", "mlp") over the axis "model".
      fsdp: whether to split what the rules leave whole, each array but small ones at its largest
        dimension that divides: over the axis "fsdp" where the mesh has it, else "data", or over
        the axis of this name.
      devices: the devices to use; None: all devices, of all processes.
      axis_name: what models call the axis of replicas, as in `nn.BatchNorm(axis_name="batch")`:
        here the whole batch is one replica. It is none of the mesh, whose axes models do not name.
    """

    axis_name: str | None = None
    """There is none: a step is written for the whole batch."""
    virtual_replicas: int | None = None

    def __init__(
        self,
        mesh_shape: Mapping[str, int] | None = None,
        *,
        rules: Rules | Mapping[str, Any] | None = None,
        fsdp: bool | str = False,
        devices: Sequence[Any] | None = None,
        axis_name: str = REPLICA,
    ):
        self.devices = given_devices(devices)
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
        self.rules = tuple(rules.items() if isinstance(rules, Mapping) else rules)
        batch = [axes_of(value) for name, value in self.rules if name == "batch"]
        batch = batch[0] if batch else [name for name in ("data", "fsdp") if name in sizes]
        self._batch_axes = tuple(axis for axis in batch if axis in sizes)
        self._fsdp_axis = fsdp_axis(fsdp, sizes)
        self._is_alone = jax.process_count() == 1
        self._narrowed: dict[tuple[str, ...], Sharded] = {self._batch_axes: self}

    @classmethod
    def fsdp(cls, devices: Sequence[Any] | None = None) -> "Sharded":
        """Fully sharded data parallelism: each device holds a part of every array of any model.

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
        rules: Rules | Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
    ) -> "Sharded":
        """Splits the arrays of a model with named dimensions over `size` devices.

        The other devices share the batch. With `fsdp` they share the rest of the arrays, too.

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
        """The number of parts that a batch is split into: the size of the axes of the batch."""
        return math.prod(self._sizes[axis] for axis in self._batch_axes)

    @property
    def n_processes(self) -> int:
        """How many processes the devices belong to."""
        return len({device.process_index for device in self.devices})

    def rows(self, n_examples: int) -> slice:
        """The rows of a batch of all processes that this one's devices get."""
        parts = self._split(False).addressable_devices_indices_map((n_examples,))
        bounds = [part[0].indices(n_examples) for part in parts.values() if part]
        return slice(min(start for start, *_ in bounds), max(stop for _, stop, _ in bounds))

    def describe(self, state: PyTree) -> Layout:
        """How a state would lie on the devices, a table when printed; nothing is allocated.

        >>> import jax.numpy as jnp, optax
        >>> from flaxfit import init_state
        >>> init = lambda rngs, x: {"params": {"w": jnp.ones((4096, 4))}}
        >>> abstract = jax.eval_shape(lambda: init_state(init, optax.sgd(0.1), 0, (jnp.ones(1),)))
        >>> Sharded.fsdp(jax.devices()[:4]).describe(abstract).arrays["params/w"].bytes_per_device
        16384

        Args:
          state: a `TrainState` or `InferenceState`, of arrays or of `jax.ShapeDtypeStruct`s.

        Raises:
          ValueError: every rule and array that do not fit together.
        """
        return layout(state, self._specs(state), self._sizes, self._batch_axes)

    def shardings(self, state: PyTree) -> Any:
        """The shardings of a state, one for each array.

        Raises:
          ValueError: every rule and array that do not fit together.
        """
        specs = self._specs(state)
        at = jax.tree_util.tree_map_with_path
        return at(lambda path, _: NamedSharding(self.mesh, specs[path_of(path)]), state)

    def place(self, tree: PyTree) -> PyTree:
        """Spreads a tree over the mesh, as a copy; what is no part of a state is replicated."""
        return copied(self.share(tree))

    def share(self, tree: PyTree) -> PyTree:
        """As `place`, without a copy of arrays that are placed already."""
        placements = self._placements(tree)
        if self.n_processes == 1:
            return jax.device_put(tree, placements)
        return jax.tree.map(put, tree, placements)

    def collect(self, tree: PyTree) -> PyTree:
        """A copy of a placed tree that is spread in the same way."""
        return copied(tree)

    def split(self, batch: PyTree, n_stacked: int = 0) -> PyTree:
        """The leaves `(n, ...)` of a batch, or `(n_stacked, n, ...)`, over the axes of the batch.

        NumPy arrays stay on the host: the compiled function moves each part to its device.
        """
        if self._is_alone and isinstance(batch, np.ndarray) and not n_stacked:  # At each step.
            return unaliased(batch)
        sharding = self._split(bool(n_stacked))
        if not self._is_alone:
            make = jax.make_array_from_process_local_data
            return jax.tree.map(lambda x: make(sharding, x), batch)
        is_moved = bool(n_stacked)  # `compile` takes an array on the host for a single batch.

        def split_leaf(x: ArrayLike) -> Any:
            if is_moved or isinstance(x, jax.Array):
                return jax.device_put(x, sharding)
            return unaliased(x) if isinstance(x, np.ndarray) else x

        return jax.tree.map(split_leaf, batch)

    def join(self, outputs: PyTree) -> PyTree:
        """NumPy arrays of all examples in order, from outputs of a split batch."""
        return gather(outputs)

    def narrow(self, n_examples: int) -> "Sharded":
        """The same, with batches split over those of their axes that divide `n_examples`.

        Over the other axes the devices do the same work: the state stays where it is.
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
        """The function within the mesh and the rules, so that `nn.with_logical_constraint` acts."""

        def bound(*arguments: PyTree) -> Any:
            with self._context():
                return only_replica(function, self, self._replica)(*arguments)

        return bound

    def constrain(self, results: PyTree, state: PyTree) -> PyTree:
        """Has results of a traced function spread as `place` does it, gradients as parameters."""
        return jax.lax.with_sharding_constraint(results, self._placements(results, state))

    def compile(
        self, function: Function, arguments: tuple[PyTree, ...], *, n_donated: int = 0
    ) -> Function:
        """Compiles `function(state, ..., batch)`, whose results are where `constrain` has them."""
        return self._compile(self.bind(function), arguments, tuple(range(n_donated)))

    def compile_split(self, function: Function, arguments: tuple[PyTree, ...]) -> Function:
        """Compiles `function(state, ..., batch)` whose results are split as the batch is."""

        def split(*arguments: PyTree) -> PyTree:
            results = self.bind(function)(*arguments)
            whole = NamedSharding(self.mesh, PartitionSpec())
            parts = jax.tree.map(lambda x: self._split(False) if x.ndim else whole, results)
            return jax.lax.with_sharding_constraint(results, parts)

        return self._compile(split, arguments, ())

    def _compile(
        self, function: Any, arguments: tuple[PyTree, ...], donated: tuple[int, ...]
    ) -> Function:
        check_jit()
        check_sub_byte(arguments)
        *states, batch = arguments

        def place_of(x: ArrayLike) -> Any:
            return x.sharding if isinstance(x, jax.Array) else self._split(False)

        # Lists of the arrays of a state do not tell where `place` has put them: these do.
        def stay(x: ArrayLike, place: NamedSharding) -> Any:
            is_on_mesh = isinstance(x, jax.Array) and getattr(x.sharding, "mesh", None) == self.mesh
            return x.sharding if is_on_mesh else place

        places = [jax.tree.map(stay, state, self._placements(state)) for state in states]
        shardings = (*places, jax.tree.map(place_of, batch))
        compiled = jax.jit(function, in_shardings=shardings, donate_argnums=donated)
        program = compiled.lower(*arguments).compile()
        give_back_free_memory()
        return program

    def _split(self, is_stacked: bool) -> NamedSharding:
        spec = (None, self._batch_axes) if is_stacked else (self._batch_axes,)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _specs(self, state: PyTree) -> dict[str, PartitionSpec]:
        rules = [rule for rule in self.rules if rule[0] != "batch"]
        return state_specs(state, self._sizes, rules, self._fsdp_axis)

    def _placements(self, tree: PyTree, state: PyTree = None) -> Any:
        """The sharding of every array of a tree: states are spread, all else is replicated.

        With a state, so are trees like its parameters, such as their gradients.
        """
        specs = {}
        if _is_state(state) and not hasattr(state.params, "shape"):
            of_params = {p: spec for p, spec in self._specs(state).items() if p[:7] == "params/"}
            specs = specs_by_parameter({"tree": tree}, {"params": state.params}, of_params)

        def placement(path: Any, part: PyTree) -> Any:
            if _is_state(part):
                return self.shardings(part)
            spec = specs.get(f"tree/{path_of(path)}", PartitionSpec())
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(placement, tree, is_leaf=_is_state)

    def _context(self) -> AbstractContextManager[None]:
        """The mesh and the rules, while a function is traced."""
        given = next(iter(self._narrowed))
        dropped = {axis for axis in given if axis not in self._batch_axes}
        return within(self.mesh, self.rules, self._batch_axes, dropped)


def _is_state(tree: PyTree) -> bool:
    return hasattr(tree, "params") and hasattr(tree, "model_state")
