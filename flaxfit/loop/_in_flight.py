"""InFlight: bounds the dispatches that the devices have not finished."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from flaxfit.tree import Array

_MOST = 24
# What the batches of unfinished dispatches may take of the memory of the devices.
_MOST_BYTES = 2**27
# How far the host may be ahead, so that a bar or an interrupt is never far from what was computed.
_MOST_SECONDS = 0.5
_N_TRACKED = 3


class InFlight:
    """Waits for earlier dispatches where the host is too far ahead of the devices.

    Too far is 24 dispatches, 128 MiB of batches or half a second, but never less than 2 dispatches.
    On a CPU with several devices it is 2: collectives that pile up abort the process.

    It tracks one dispatch in several, since tracking each would slow small steps down. The third
    waits for the first, and the time that this takes says how far apart the next ones may be.

    >>> in_flight = InFlight(platform="cpu", n_devices=2)
    >>> in_flight.add({"float32": jax.numpy.ones(2)}, [])

    Args:
      platform: the platform of the devices, as JAX names it.
      n_devices: their number.
      clock: returns the time in seconds.
    """

    def __init__(
        self, platform: str, n_devices: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._most = 2 if platform == "cpu" and n_devices > 1 else _MOST
        self._clock = clock
        self._tracked: deque[tuple[Any, int]] = deque()
        """Results, each with the number of dispatches since the one before."""
        self._n_since, self._spacing = 0, 1

    def expect(self, n_bytes: int) -> None:
        """Expects dispatches whose batches take that many bytes on a device."""
        self._most = min(self._most, _MOST_BYTES // max(n_bytes, 1))
        self._spacing = 1

    def add(self, totals: Mapping[str, Array], leaves: Sequence[Array]) -> None:
        """Adds what a dispatch returned: totals, which stay, and leaves, which the next donates."""
        if not totals:  # A step of the user's own that reports nothing.
            jax.block_until_ready(leaves)
            return
        self._n_since += 1
        if self._n_since < self._spacing:
            return
        self._tracked.append((next(iter(totals.values())), self._n_since))
        self._n_since = 0
        if len(self._tracked) == _N_TRACKED:
            result, n = self._tracked.popleft()
            began = self._clock()
            result.block_until_ready()  # `jax.block_until_ready` takes some microseconds more.
            seconds = max((self._clock() - began) / n, 1e-9)
            most = min(self._most, int(_MOST_SECONDS / seconds))
            self._spacing = max(1, most // _N_TRACKED)
