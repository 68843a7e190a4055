"""InFlight: bounds the dispatches that the devices have not finished."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from flaxfit.tree._types import Array

_LEAST, _MOST = 2, 24
# What the batches of unfinished dispatches may take of the memory of the devices.
_MOST_BYTES = 2**27
# How far the host may be ahead, so that a bar or an interrupt is never far from what was computed.
_MOST_SECONDS = 0.5


class InFlight:
    """Waits for the oldest dispatches where the host is too far ahead of the devices.

    Too far is 24 dispatches, 128 MiB of batches or half a second, but never less than 2 dispatches.
    On a CPU with several devices it is 2: collectives that pile up abort the process.

    >>> in_flight = InFlight(platform="cpu", n_devices=2)
    >>> for i in range(4):
    ...     in_flight.add({"float32": jax.numpy.ones(2)}, [])
    >>> len([*in_flight])
    2

    Args:
      platform: that of the devices, as JAX names it.
      n_devices: their number.
      clock: returns the time in seconds.
    """

    def __init__(
        self, platform: str, n_devices: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._most = _LEAST if platform == "cpu" and n_devices > 1 else _MOST
        self._clock = clock
        self._results: deque[tuple[Any, float]] = deque()

    def expect(self, n_bytes: int) -> None:
        """Expects dispatches whose batches take that many bytes on a device."""
        self._most = max(_LEAST, min(self._most, _MOST_BYTES // max(n_bytes, 1)))

    def add(self, totals: Mapping[str, Array], leaves: Sequence[Array]) -> None:
        """Adds what a dispatch returned: totals, which stay, and leaves, which the next uses up."""
        total = next(iter(totals.values()), None)
        if total is None:  # A step of the user's own that reports nothing.
            jax.block_until_ready(leaves)
            return
        results, now = self._results, self._clock()
        results.append((total, now))
        latest = None
        if len(results) > self._most:
            # Several at once, as each wait takes a microsecond.
            while len(results) > max(_LEAST, self._most * 3 // 4):
                latest, _ = results.popleft()
        while len(results) > _LEAST and now - results[0][1] > _MOST_SECONDS:
            latest, _ = results.popleft()
        if latest is not None:
            latest.block_until_ready()  # `jax.block_until_ready` takes some microseconds more.

    def __iter__(self) -> Iterator[Array]:
        return (total for total, _ in self._results)
