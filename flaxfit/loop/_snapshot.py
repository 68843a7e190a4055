"""Snapshots: where the copy of a state lies that a checkpoint hands out."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.strategies import Strategy

# Up to here a copy of all on the host, which nobody looks at, takes less time than one by JAX.
_FEW_BYTES = 2**23


def snapshots(where: str, strategy: Strategy) -> Callable[..., Callable[[], Any]]:
    """The function that copies what the next step would use up: a tree of placed arrays.

    It copies at once, and returns a function that gives the copy, to be called but once: to make
    arrays of JAX takes longer than to copy them, and few users of a checkpoint look at its state.
    It takes whether `is_light` holds for the tree, too. It is to be called, as what it returns,
    outside any mesh and transfer guard.

    >>> from flaxfit import DataParallel
    >>> type(snapshots("host", DataParallel())({"w": jnp.ones(2)})()["w"]).__name__
    'ndarray'

    Args:
      where: "device", where a copy takes the least time, or "host", where it takes no memory of
        the devices: whole NumPy arrays, of which random keys alone stay keys.
      strategy: what the arrays were placed by.

    Raises:
      ValueError: there is no such place, or several processes hold the arrays.
    """
    if where not in ("device", "host"):
        raise ValueError(f'snapshot must be "device" or "host", got {where!r}.')
    if where == "host" and strategy.n_processes > 1:
        raise ValueError(
            'snapshot="host" needs all arrays in one process, and these are spread over '
            f'{strategy.n_processes}: use "device", and flaxfit.gather where whole arrays are '
            "needed."
        )

    def on_host(tree: Any, is_light: bool = False) -> Callable[[], Any]:
        def copied(x: Any) -> Any:
            return strategy.collect(x) if _is_key(x) else _copied(x)

        with jax.ensure_compile_time_eval():  # A function that JAX traces may ask for the copy.
            copy = jax.tree.map(copied, tree)
        return lambda: copy

    def on_device(tree: Any, is_light: bool = False) -> Callable[[], Any]:
        nonlocal kinds
        leaves, structure = jax.tree.flatten(tree)
        if is_light and put is not None:
            # Those of one compiled step are the same objects each time, so this takes no time.
            avals = [leaf.aval for leaf in leaves]
            known = kinds
            if avals != known.avals:
                kinds = known = _Kinds(avals)
            if not known.has_weak:
                copies = _copies(leaves, known)
                return lambda: structure.unflatten(put(copies()))
        with jax.ensure_compile_time_eval():
            copy = strategy.collect(tree)
        return lambda: copy

    kinds = _Kinds([])
    put: Any = getattr(strategy, "put_collected", None) if _has_one_cpu(strategy) else None
    return on_host if where == "host" else on_device


def is_light(leaves: Sequence[Any]) -> bool:
    """Whether arrays are copied in less time by NumPy, where it shares the memory of a device.

    >>> is_light([jnp.ones(2)])
    True
    """
    # Where those of 64 bits are switched off, JAX would narrow NumPy's.
    is_narrow = all(x.dtype.itemsize < 8 for x in leaves)
    return is_narrow and sum(x.nbytes for x in leaves) <= _FEW_BYTES


def _has_one_cpu(strategy: Strategy) -> bool:
    (device, *more) = strategy.devices
    return device.platform == "cpu" and not more


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


class _Kinds:
    """What arrays have in common with all that come from the same step: dtypes, shapes, size."""

    def __init__(self, avals: Sequence[Any]):
        self.avals = avals
        self.each = [(aval.dtype, aval.shape, math.prod(aval.shape)) for aval in avals]
        self.n_bytes = sum(dtype.itemsize * size for dtype, _, size in self.each)
        # NumPy does not keep that a type is weak.
        self.has_weak = any(aval.weak_type for aval in avals)


def _copies(arrays: Sequence[Any], kinds: _Kinds) -> Callable[[], list[np.ndarray]]:
    """Copies arrays in the memory of a CPU at once; the function makes NumPy arrays of that."""
    try:
        # They are buffers: one call copies all, where each one's own takes longer than its bytes.
        data = b"".join(arrays)
    except TypeError:  # Not those of a type that Python does not know, such as bfloat16.
        data = b""
    if len(data) != kinds.n_bytes:
        copies = [_copied(x) for x in arrays]
        return lambda: copies

    def parted() -> list[np.ndarray]:
        parts, start = [], 0
        for dtype, shape, size in kinds.each:
            part = np.frombuffer(data, dtype, size, start)
            parts.append(part.reshape(shape).copy())  # Where arrays of its type may begin.
            start += part.nbytes
        return parts

    return parted


def _copied(x: Any) -> np.ndarray:
    # Not `np.asarray`: on a CPU that may be the very memory that the next step writes to.
    return np.array(x)
