"""InFlight: bounds the dispatches that the devices have not finished."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from flaxfit.tree._types import Array

_MOST = 24
# What the batches of unfinished dispatches may take of the memory of the devices.
_MOST_BYTES = 2**27
# How far the host may be ahead, so that a bar or an interrupt is never far from what was computed.
_MOST_SECONDS = 0.5
_MARKS = 3


class InFlight:
    """Waits for earlier dispatches where the host is too far ahead of the devices.

    Too far is 24 dispatches, 128 MiB of batches or half a second, but never less than 2 dispatches.
    On a CPU with several devices it is 2: collectives that pile up abort the process.

    To keep what every dispatch returned, or to wait for each, would slow small steps down: every
    so often one is marked, and the third mark waits for the first.

    >>> in_flight = InFlight(platform="cpu", n_devices=2)
    >>> in_flight.add({"float32": jax.numpy.ones(2)}, [])

    Args:
      platform: that of the devices, as JAX names it.
      n_devices: their number.
      clock: returns the time in seconds.
    """

    def __init__(
        self, platform: str, n_devices: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._most = 2 if platform == "cpu" and n_devices > 1 else _MOST
        self._clock = clock
        self._marked: deque[Any] = deque()
        self._n_since, self._marked_at = _MOST, 0.0  # The first one is marked.
        self.expect(0)

    def expect(self, n_bytes: int) -> None:
        """Expects dispatches whose batches take that many bytes on a device."""
        self._most = min(self._most, _MOST_BYTES // max(n_bytes, 1))
        self._spacing = max(1, self._most // _MARKS)

    def add(self, totals: Mapping[str, Array], leaves: Sequence[Array]) -> None:
        """Adds what a dispatch returned: totals, which stay, and leaves, which the next uses up."""
        if not totals:  # A step of the user's own that reports nothing.
            jax.block_until_ready(leaves)
            return
        now, self._n_since = self._clock(), self._n_since + 1
        if self._n_since < self._spacing and now - self._marked_at < _MOST_SECONDS / _MARKS:
            return
        self._n_since, self._marked_at = 0, now
        self._marked.append(next(iter(totals.values())))
        if len(self._marked) == _MARKS:
            # `jax.block_until_ready` takes some microseconds more.
            self._marked.popleft().block_until_ready()
