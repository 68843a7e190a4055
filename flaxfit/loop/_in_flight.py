"""InFlight: bounds the number of dispatches that the devices have not finished."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from flaxfit.tree import Array

_MOST = 24
# Device memory for the batches of unfinished dispatches.
_MOST_BYTES = 2**27
# The lead of the host, bounded so that progress bars and interrupts stay close to the computation.
_MOST_SECONDS = 0.5
_N_TRACKED = 3


class InFlight:
    """Waits for earlier dispatches if the host is too far ahead of the devices.

    The bound is 24 dispatches, 128 MiB of batches or half a second, but at least 2 dispatches. On a
    CPU with several devices it is 2: queued collectives would abort the process.

    Only one dispatch in several is tracked, since tracking all would slow small steps down. The
    third tracked one waits for the first, and the time of the wait determines their spacing.

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
        """Results of tracked dispatches, with the number of dispatches since the previous one."""
        self._n_since, self._spacing = 0, 1

    def expect(self, n_bytes: int) -> None:
        """Adapts the bound to batches of `n_bytes` per device."""
        self._most = min(self._most, _MOST_BYTES // max(n_bytes, 1))
        self._spacing = 1

    def add(self, totals: Mapping[str, Array], leaves: Sequence[Array]) -> None:
        """Adds the results of a dispatch: totals, and leaves that the next dispatch donates.

        Only totals can be waited for later: waiting for donated arrays is an error.
        """
        if not totals:  # A custom step without sums leaves only the donated leaves: wait now.
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
            result.block_until_ready()  # `jax.block_until_ready` costs some microseconds more.
            seconds = max((self._clock() - began) / n, 1e-9)
            most = min(self._most, int(_MOST_SECONDS / seconds))
            self._spacing = max(1, most // _N_TRACKED)
