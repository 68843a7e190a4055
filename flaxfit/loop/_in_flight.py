"""InFlight: bounds the dispatches that the devices have not finished."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from flaxfit.tree._types import Array

# On a CPU with several devices, unbounded dispatch of collectives aborts the process; a single
# device holds the batches of the steps that wait.
_MOST = 2
# With resident data no batch waits, so that the host may run further ahead: each eighth dispatch
# waits for the one 24 before it.
_MOST_RESIDENT, _EVERY_RESIDENT = 3, 8


class InFlight:
    """Waits for earlier dispatches where too many have not finished.

    >>> in_flight = InFlight()
    >>> for i in range(4):
    ...     in_flight.add({"float32": jax.numpy.ones(2)}, [])
    >>> len([*in_flight])
    2
    """

    def __init__(self) -> None:
        self._results: deque[Any] = deque()
        self._n_added = 0
        self.set_resident(False)

    def set_resident(self, is_resident: bool) -> None:
        """Sets whether dispatches gather their batches from resident data."""
        self._most, self._every = (_MOST_RESIDENT, _EVERY_RESIDENT) if is_resident else (_MOST, 1)

    def add(self, totals: Mapping[str, Array], leaves: Sequence[Array]) -> None:
        """Adds what a dispatch returned: totals, which stay, and leaves, which the next uses up."""
        self._n_added += 1
        if self._n_added % self._every:
            return
        total = next(iter(totals.values()), None)
        if total is None:  # A step of the user's own that reports nothing.
            jax.block_until_ready(leaves)
            return
        self._results.append(total)
        if len(self._results) > self._most:
            # Not `jax.block_until_ready`, which takes some microseconds of Python.
            self._results.popleft().block_until_ready()

    def __iter__(self) -> Iterator[Array]:
        return iter(self._results)
