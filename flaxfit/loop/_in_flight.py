"""InFlight: bounds the dispatches that the devices have not finished."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flaxfit.tree._types import Array, PyTree

# On a CPU with several devices, unbounded dispatch of collectives aborts the process; a single
# device holds the batches of the steps that wait.
_MOST = 2
# With resident data no batch waits, so that the host may run further ahead: each eighth dispatch
# waits for the one 24 before it.
_MOST_RESIDENT, _EVERY_RESIDENT = 3, 8
# An accelerator must not wait for the host; but its memory holds the batches of the steps that
# wait, and an interrupt or a watcher comes that much too early.
_MOST_BYTES, _MOST_SECONDS = 2**28, 0.3


def is_too_far(platform: str, n_bytes: int, seconds: float) -> bool:
    """Whether the host is to wait for the oldest of more than a few unfinished dispatches.

    >>> is_too_far("cpu", 0, 0.0), is_too_far("gpu", 2**20, 0.01)
    (True, False)
    >>> is_too_far("gpu", 2**20, 0.5), is_too_far("gpu", 2**30, 0.01)
    (True, True)

    Args:
      platform: of the devices, as JAX names it.
      n_bytes: the bytes of their batches.
      seconds: how long ago the oldest was dispatched, which is how far the host is ahead.
    """
    return platform == "cpu" or n_bytes > _MOST_BYTES or seconds > _MOST_SECONDS


class _Dispatch(NamedTuple):
    """A result of a dispatch, the bytes of its batches, and when it was dispatched."""

    result: Any
    n_bytes: int
    time: float


class InFlight:
    """Waits for earlier dispatches where too many have not finished.

    >>> in_flight = InFlight("cpu")
    >>> for i in range(4):
    ...     in_flight.add({"float32": jax.numpy.ones(2)}, [])
    >>> len([*in_flight])
    2

    Args:
      platform: of the devices, as JAX names it.
      clock: returns the time in seconds.
    """

    def __init__(self, platform: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._platform, self._clock = platform, clock
        self._dispatches: deque[_Dispatch] = deque()
        self._n_added = self._n_bytes = self._n_expected = 0
        self.set_resident(False)

    def set_resident(self, is_resident: bool) -> None:
        """Sets whether dispatches gather their batches from resident data."""
        is_rare = is_resident and self._platform == "cpu"
        self._most, self._every = (_MOST_RESIDENT, _EVERY_RESIDENT) if is_rare else (_MOST, 1)

    def expect(self, batches: PyTree) -> None:
        """Notes the bytes of the batches of the next dispatch, where they matter."""
        if self._platform != "cpu":
            self._n_expected = sum(leaf.nbytes for leaf in jax.tree.leaves(batches))

    def add(self, totals: Mapping[str, Array], leaves: Sequence[Array]) -> None:
        """Adds what a dispatch returned: totals, which stay, and leaves, which the next uses up."""
        self._n_added += 1
        if self._n_added % self._every:
            return
        total = next(iter(totals.values()), None)
        if total is None:  # A step of the user's own that reports nothing.
            jax.block_until_ready(leaves)
            return
        dispatches, now = self._dispatches, self._clock()
        dispatches.append(_Dispatch(total, self._n_expected, now))
        self._n_bytes += self._n_expected
        if self._platform != "cpu":
            while len(dispatches) > 1 and dispatches[0].result.is_ready():
                self._wait()
        while len(dispatches) > self._most and is_too_far(
            self._platform, self._n_bytes, now - dispatches[0].time
        ):
            self._wait()

    def _wait(self) -> None:
        oldest = self._dispatches.popleft()
        self._n_bytes -= oldest.n_bytes
        # Not `jax.block_until_ready`, which takes some microseconds of Python.
        oldest.result.block_until_ready()

    def __iter__(self) -> Iterator[Array]:
        return (dispatch.result for dispatch in self._dispatches)
