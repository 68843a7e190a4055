"""Replicas: the division of a batch among replicas, and reductions over them."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from flaxfit.step._metric_totals import pack, unpacker
from flaxfit.tree import ArrayLike, Function, PyTree, is_key


class Replicas:
    """One replica per device of a mapped axis; without an axis, a single replica."""

    def __init__(self, axis_name: str | None):
        self._axis = axis_name

    @property
    def n(self) -> int:
        """The number of replicas."""
        return 1 if self._axis is None else jax.lax.psum(1, self._axis)

    @property
    def index(self) -> jax.Array | int:
        """The number of this replica."""
        return 0 if self._axis is None else jax.lax.axis_index(self._axis)

    def each(self, function: Function) -> Callable[[PyTree], PyTree]:
        """Converts `function(index, part)` to a function of the batch, with unreduced results."""
        return functools.partial(function, self.index)

    def joined(self, rows: PyTree) -> PyTree:
        """Converts rows computed by `each` to rows of the batch."""
        return rows

    def sum(self, found: PyTree) -> PyTree:
        """Sums each leaf over the replicas."""
        return found if self._axis is None else jax.lax.psum(found, self._axis)

    def mean(self, found: PyTree) -> PyTree:
        """Averages each leaf over the replicas."""
        return found if self._axis is None else jax.lax.pmean(found, self._axis)

    def least(self, found: PyTree) -> PyTree:
        """Takes the minimum of each leaf over the replicas."""
        return found if self._axis is None else jax.lax.pmin(found, self._axis)

    def average_state(self, states: PyTree) -> PyTree:
        """Averages the floats of a model state, and takes all other arrays from replica 0.

        A mean would turn counters and flags into floats, and random keys have no mean.
        """
        if self._axis is None:
            return states
        axis_name = self._axis

        def average(x: jax.Array) -> jax.Array:
            if jnp.issubdtype(x.dtype, jnp.inexact):
                return jax.lax.pmean(x, axis_name)
            if is_key(x):
                data = jax.lax.all_gather(jax.random.key_data(x), axis_name)[0]
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
            return jax.lax.all_gather(x, axis_name)[0]

        return jax.tree.map(average, states)

    def whole(self, part: PyTree, n: int, has_rows: PyTree = None) -> PyTree:
        """Concatenates the parts of all replicas along the axis of examples, `n` of them here.

        A float array without that axis, such as a learned scale, is averaged. Gradients flow back
        to every replica, summed over all. `has_rows` is a mask of the arrays with the axis; None:
        those whose first axis has `n` elements.
        """
        axis_name = self._axis
        if has_rows is None:
            has_rows = jax.tree.map(lambda x: jnp.shape(x)[:1] == (n,), part)

        def joined(x: jax.Array, has_axis: bool) -> jax.Array:
            if has_axis:  # Its transpose is a reduce-scatter, which sums the gradients.
                return jax.lax.all_gather(x, axis_name, tiled=True)
            if jnp.issubdtype(x.dtype, jnp.inexact):
                return jax.lax.pmean(x, axis_name)
            return jax.lax.all_gather(x, axis_name)[0]

        return part if self.n == 1 else jax.tree.map(joined, part, has_rows)

    def own(self, values: jax.Array, n: int) -> jax.Array:
        """Slices the `n` rows of this replica from values `(batch, ...)` of the whole batch."""
        if self.n == 1:
            return values
        return jax.lax.dynamic_slice_in_dim(values, self.index * n, n)


class VirtualReplicas:
    """A fixed number of replicas, a power of two: the same bits on any number of devices.

    Each device computes its replicas one after the other, by one program for the size of a part.
    Results are added in pairs, in the order of the replicas, first within each device, then between
    devices: ((0 + 1) + (2 + 3)) + ... Float addition is not associative, so the order is fixed.
    """

    def __init__(self, n: int, axis_name: str | None, step: ArrayLike):
        self.n = n
        self._step = step
        self._axis = axis_name
        self._devices = Replicas(axis_name)

    def each(self, function: Function) -> Callable[[PyTree], PyTree]:
        """Like `Replicas.each`, with the results of this device's replicas stacked."""

        def mapped(batch: PyTree) -> PyTree:
            n = self.n // self._devices.n
            numbers = n * self._devices.index + jnp.arange(n)
            parts = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)
            return jax.lax.map(lambda one: self._isolated(function, *one), (numbers, parts))

        return mapped

    def joined(self, rows: PyTree) -> PyTree:
        """Converts rows computed by `each` to rows of the batch."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

    def sum(self, found: PyTree) -> PyTree:
        """Sums each leaf over the replicas."""
        total = self._isolated(lambda found: jax.tree.map(_in_pairs, found), found)
        if self._axis is None:
            return total
        vectors = pack(total)
        total = unpacker(total)({dtype: self._across(vectors[dtype]) for dtype in vectors})
        return self._isolated(lambda total: total, total)

    def mean(self, found: PyTree) -> PyTree:
        """Averages each leaf over the replicas."""
        return jax.tree.map(lambda x: x / self.n, self.sum(found))

    def least(self, found: PyTree) -> PyTree:
        """Takes the minimum of each leaf over the replicas."""
        return self._devices.least(jax.tree.map(lambda x: x.min(0), found))

    def average_state(self, states: PyTree) -> PyTree:
        """Averages the floats of a model state, and takes all other arrays from replica 0."""
        leaves, structure = jax.tree.flatten(states)
        is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        floats = [x for x, is_one in zip(leaves, is_float, strict=True) if is_one]
        others = [x[0] for x, is_one in zip(leaves, is_float, strict=True) if not is_one]
        means, firsts = iter(self.mean(floats)), iter(self._devices.average_state(others))
        return jax.tree.unflatten(structure, [next(means if f else firsts) for f in is_float])

    def _across(self, vector: jax.Array) -> jax.Array:
        """Sums a vector over the devices, in a fixed order: a reduce-scatter and an all-gather."""
        # Not `psum`, whose order of additions is up to the compiler and the number of devices.
        chunks = jnp.pad(vector, (0, -vector.size % self._devices.n))
        chunks = chunks.reshape(self._devices.n, -1)
        chunks = jax.lax.all_to_all(chunks, self._axis, 0, 0, tiled=True)
        return jax.lax.all_gather(_in_pairs(chunks), self._axis, tiled=True)[: vector.size]

    def _isolated(self, function: Function, *arguments: PyTree) -> PyTree:
        """Calls a function such that XLA compiles it separately from its surroundings.

        Fused with the code around it, which depends on the number of devices, it could round
        differently.
        """
        shapes = jax.eval_shape(function, *arguments)

        def found(*arguments: PyTree) -> PyTree:
            # As vectors: XLA may choose layouts of matrices by the surrounding code.
            return jax.tree.map(jnp.ravel, function(*arguments))

        def never(*_: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jax.lax.full((x.size,), 0, x.dtype), shapes)

        if jax.default_backend() != "cpu":
            vectors = found(*jax.lax.optimization_barrier(arguments))
            vectors = jax.lax.optimization_barrier(vectors)
        else:
            # On a CPU, XLA removes barriers before it fuses, but compiles a branch separately. The
            # other branch is never taken, which the compiler cannot know of a traced step.
            is_step = jnp.asarray(self._step) >= 0
            vectors = jax.lax.cond(is_step, found, never, *arguments)
        return jax.tree.map(lambda x, shape: x.reshape(shape.shape), vectors, shapes)


def _in_pairs(parts: jax.Array) -> jax.Array:
    """Sums over the first axis in pairs: neighbors, then neighboring sums, and so on."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


AnyReplicas: TypeAlias = Replicas | VirtualReplicas


def replicas_of(
    axis_name: str | None, virtual_replicas: int | None, step: ArrayLike
) -> AnyReplicas:
    """Returns the replicas of a step: one per device, or a fixed number of virtual ones."""
    if virtual_replicas is None:
        return Replicas(axis_name)
    return VirtualReplicas(virtual_replicas, axis_name, step)
