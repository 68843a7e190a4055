"""Finds the largest batch whose step fits the memory of a device, as the compiler reports it."""

import jax

from flaxfit.loop import TrainLoop

_USABLE = 0.9
"""The usable fraction of device memory; the rest is for prefetched batches and fragmentation."""


def find_batch_size(loop: TrainLoop, *, limit: float | None, largest: int) -> int:
    """Compiles steps, doubling the batch size until one exceeds the limit; runs none."""
    limit = _memory_of_a_device() if limit is None else limit
    n = loop.strategy.n_devices * loop.task.accumulate
    needed = loop.step_memory(n)
    if needed > limit:
        raise ValueError(
            f"Not even a step of {n} examples fits: it needs {needed / 1e9:.3g} GB on each device, "
            f"the limit is {limit / 1e9:.3g} GB. Lower the precision (precision='bfloat16'), split "
            "the state (strategy=Sharded.fsdp()), or make the model smaller."
        )
    while 2 * n <= largest and loop.step_memory(2 * n) <= limit:
        n *= 2
    return n


def _memory_of_a_device() -> float:
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    known = [each["bytes_limit"] for each in stats if each.get("bytes_limit")]
    if not known:
        raise ValueError(
            f"The backend {jax.default_backend()!r} does not report how much memory a device has: "
            "pass limit=, in bytes."
        )
    return _USABLE * min(known)
