"""Replicas: the parts that a batch is worked at in, and how what each of them finds becomes one."""

from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.step._metric_totals import pack, unpack
from flaxfit.tree._types import Function, PyTree


class Replicas:
    """One replica on each device of a mapped axis; or, without an axis, a single one.

    >>> Replicas(None).sum(Replicas(None).each(lambda index, part: part.sum(), jnp.ones(4)))
    Array(4., dtype=float32)
    """

    def __init__(self, axis_name: str | None):
        self._axis = axis_name

    @property
    def n(self) -> Any:
        """How many there are."""
        return 1 if self._axis is None else jax.lax.psum(1, self._axis)

    def each(self, function: Function, batch: PyTree) -> Any:
        """What `function(index, part)` finds, index counting the replicas; yet to be reduced."""
        return function(0 if self._axis is None else jax.lax.axis_index(self._axis), batch)

    def sum(self, found: Any) -> Any:
        """The sum of a tree over the replicas."""
        return self._reduce(jax.lax.psum, found)

    def mean(self, found: Any) -> Any:
        """The mean of a tree over the replicas."""
        return self._reduce(jax.lax.pmean, found)

    def least(self, found: Any) -> Any:
        """The least value of each leaf among the replicas."""
        return self._reduce(jax.lax.pmin, found)

    def average_state(self, states: PyTree) -> Any:
        """One model state: floats averaged, anything else of replica 0.

        A mean would turn counters and flags into floats, and cannot be taken of random keys.
        """
        if self._axis is None:
            return states
        axis_name = self._axis

        def average(x: jax.Array) -> jax.Array:
            if jnp.issubdtype(x.dtype, jnp.inexact):
                return jax.lax.pmean(x, axis_name)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                data = jax.lax.all_gather(jax.random.key_data(x), axis_name)[0]
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
            return jax.lax.all_gather(x, axis_name)[0]

        return jax.tree.map(average, states)

    def whole(self, part: PyTree, n: int) -> PyTree:
        """The parts of all replicas, joined along the axis of the `n` examples of this one.

        An array without that axis, such as a learned scale, is averaged. Gradients flow back to
        every replica: each adds up what the others derive from its part.
        """
        axis_name = self._axis

        def joined(x: jax.Array) -> jax.Array:
            if jnp.shape(x)[:1] == (n,):
                return jax.lax.all_gather(x, axis_name, tiled=True)
            return jax.lax.pmean(x, axis_name)

        return part if self.n == 1 else jax.tree.map(joined, part)

    def own(self, values: jax.Array, n: int) -> jax.Array:
        """The `n` rows of this replica, of the values `(batch, ...)` of the whole batch."""
        if self.n == 1 or self._axis is None:
            return values
        return jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index(self._axis) * n, n)

    def _reduce(self, reduce: Function, tree: PyTree) -> Any:
        if self._axis is None:
            return tree
        if jax.default_backend() != "cpu":
            return reduce(tree, self._axis)
        # One reduction of a long vector takes half the time of many short ones; XLA combines them
        # by itself elsewhere, but not on CPU.
        return unpack(reduce(pack(tree), self._axis), tree)


class VirtualReplicas:
    """A fixed number of replicas, whatever the number of devices, whose results are the same bits.

    Each device works at its replicas one after the other, all by one program for the size of a
    part. What they find is added in pairs, in the order of the replicas: ((0 + 1) + (2 + 3)) + ...,
    first on each device, then between them. As floats round, other orders have other sums.

    >>> replicas = VirtualReplicas(4, None, step=0)
    >>> replicas.each(lambda index, part: index + part.sum(), jnp.ones(8))
    Array([2., 3., 4., 5.], dtype=float32)

    Args:
      n: how many, a power of two.
      axis_name: the mapped axis of the devices; None: there is one device.
      step: the number of the step, which the compiler does not know.
    """

    def __init__(self, n: int, axis_name: str | None, step: Any):
        self.n = n
        self._step = step
        self._axis = axis_name
        self._devices = Replicas(axis_name)

    def each(self, function: Function, batch: PyTree) -> Any:
        """What `function(index, part)` finds for the replicas of this device, stacked."""
        n = self.n // self._devices.n
        numbers = n * self._devices.each(lambda index, _: index, ()) + jnp.arange(n)
        parts = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)
        return jax.lax.map(lambda one: self._apart(function, *one), (numbers, parts))

    def sum(self, found: Any) -> Any:
        """The sum of a tree over the replicas."""
        total = self._apart(lambda found: jax.tree.map(_in_pairs, found), found)
        if self._axis is None:
            return total
        vectors = pack(total)
        total = unpack({dtype: self._across(vectors[dtype]) for dtype in vectors}, total)
        return self._apart(lambda total: total, total)

    def mean(self, found: Any) -> Any:
        """The mean of a tree over the replicas."""
        return jax.tree.map(lambda x: x / self.n, self.sum(found))

    def least(self, found: Any) -> Any:
        """The least value of each leaf among the replicas."""
        return self._devices.least(jax.tree.map(lambda x: x.min(0), found))

    def average_state(self, states: PyTree) -> Any:
        """One model state: floats averaged, anything else of replica 0."""
        leaves, structure = jax.tree.flatten(states)
        is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        floats = [x for x, is_one in zip(leaves, is_float, strict=True) if is_one]
        others = [x[0] for x, is_one in zip(leaves, is_float, strict=True) if not is_one]
        means, firsts = iter(self.mean(floats)), iter(self._devices.average_state(others))
        return jax.tree.unflatten(structure, [next(means if f else firsts) for f in is_float])

    def _across(self, vector: jax.Array) -> jax.Array:
        """The sum of a vector over the devices: each adds up its share, and has those of others."""
        shares = jnp.pad(vector, (0, -vector.size % self._devices.n))
        shares = shares.reshape(self._devices.n, -1)
        shares = jax.lax.all_to_all(shares, self._axis, 0, 0, tiled=True)
        return jax.lax.all_gather(_in_pairs(shares), self._axis, tiled=True)[: vector.size]

    def _apart(self, function: Function, *arguments: PyTree) -> Any:
        """`function(*arguments)`, compiled as if it stood alone.

        Were it merged with what stands around it, which depends on the number of devices, it
        could round otherwise.
        """
        shapes = jax.eval_shape(function, *arguments)

        def found(*arguments: PyTree) -> Any:
            # Vectors, as matrices may be laid out in the way that suits what stands around.
            return jax.tree.map(jnp.ravel, function(*arguments))

        def never(*_: Any) -> Any:
            return jax.tree.map(lambda x: jax.lax.full((x.size,), 0, x.dtype), shapes)

        if jax.default_backend() != "cpu":
            vectors = found(*jax.lax.optimization_barrier(arguments))
            vectors = jax.lax.optimization_barrier(vectors)
        else:
            # On CPU barriers are gone before the compiler merges; a branch is compiled by itself.
            # The other one is never taken, but this only the number of the step tells.
            is_step = jnp.asarray(self._step) >= 0
            vectors = jax.lax.cond(is_step, found, never, *arguments)
        return jax.tree.map(lambda x, shape: x.reshape(shape.shape), vectors, shapes)


def _in_pairs(parts: jax.Array) -> jax.Array:
    """The sum over the first axis, of neighbours, then of neighbouring sums, and so on.

    >>> _in_pairs(jnp.array([1, 2, 4, 8]))
    Array(15, dtype=int32)
    """
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]
