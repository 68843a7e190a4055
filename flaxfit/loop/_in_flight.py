"""InFlight: bounds the dispatches that the devices have not finished."""

from collections import deque
from collections.abc import Iterator

import jax

from flaxfit.tree._types import PyTree

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
    ...     in_flight.add(jax.numpy.ones(()))
    >>> len([*in_flight])
    2
    """

    def __init__(self) -> None:
        self.is_resident = False
        """Whether dispatches hold no batch of their own."""
        self._results: deque[PyTree] = deque()
        self._n_added = 0

    def add(self, results: PyTree, *, is_kept: bool = True) -> None:
        """Adds the results of a dispatch; waits for them if a later one will use them up."""
        self._n_added += 1
        most, every = (_MOST_RESIDENT, _EVERY_RESIDENT) if self.is_resident else (_MOST, 1)
        if self._n_added % every:
            return
        if not is_kept:
            jax.block_until_ready(results)
            return
        self._results.append(results)
        if len(self._results) > most:
            jax.block_until_ready(self._results.popleft())

    def __iter__(self) -> Iterator[PyTree]:
        return iter(self._results)
