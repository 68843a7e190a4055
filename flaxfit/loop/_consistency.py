"""Consistency: the processes of a run do the same, or all of them fail with what differs."""

import zlib
from collections.abc import Hashable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.data._batch import Batch
from flaxfit.data._position import position_text
from flaxfit.distributed._processes import agree, exchange
from flaxfit.strategies import Strategy
from flaxfit.tree._paths import flat
from flaxfit.tree._types import Json, PyTree

_SLOW_SECONDS = 600.0


class Consistency:
    """Compares what the processes are about to do before they wait for each other on the devices.

    On the devices they would wait forever, or add up arrays that do not belong together. A step
    whose program is known exchanges nothing, and neither does a single process.
    """

    def __init__(self, strategy: Strategy):
        self.is_needed = strategy.n_processes > 1
        self._stepped = 0

    def state(self, step: int, state: PyTree) -> None:
        """Checks that all continue from the same state, as far as each holds it."""
        self._stepped = 0
        if self.is_needed:
            self._say(f"step {step:,} of a state with the checksum {_checksum(state):08x}", True)

    def data(self, position: Json) -> None:
        """Checks that all are at the same position of the same data."""
        if self.is_needed:
            self._say(f"data at {position_text(position)}", True)

    def program(self, step: int, batch: Batch, *, is_weighted: bool = False) -> None:
        """Checks that all are about to take the first step with batches of these shapes."""
        if self.is_needed:
            parts = batch._asdict() | ({} if is_weighted else {"weights": None})
            shapes = [f"{path} {x.dtype}{list(x.shape)}" for path, x in flat(parts).items()]
            self._say(f"step {step:,} as the first with {', '.join(shapes)}", True)

    def stepped(self, program: Hashable) -> None:
        """Records the program of a step, for the next checkpoint."""
        if self.is_needed:
            self._stepped = zlib.crc32(repr(program).encode(), self._stepped)

    def checkpoint(self, step: int) -> None:
        """Checks that all are at the same checkpoint, by steps of the same programs."""
        if self.is_needed:
            self._say(f"a checkpoint at step {step:,}, by programs of the sum {self._stepped:08x}")

    def stop(self, wanted: bool) -> bool:
        """Returns whether one of the processes has ended the run."""
        return any(exchange("whether to stop", wanted)) if self.is_needed else wanted

    def end(self, what: str, n: int, in_flight: Iterable[PyTree]) -> None:
        """Checks that all are at the end of their data."""
        if self.is_needed:
            jax.block_until_ready([*in_flight])  # The others have then come this far, too.
            self._say(f"the end of the {what} data after {n:,}")

    def _say(self, what: str, is_slow: bool = False) -> None:
        agree("what comes next", what, seconds=_SLOW_SECONDS if is_slow else None)


def _checksum(state: PyTree) -> int:
    total = 0
    for leaf in jax.tree.leaves(state):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
            array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
            total = zlib.crc32(array.tobytes(), total)
    return total
