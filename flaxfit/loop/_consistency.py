"""Consistency: checks that the processes of a run agree; otherwise all fail with one message."""

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping

import jax
import numpy as np

from flaxfit.data._batch import Batch
from flaxfit.data._position import position_text
from flaxfit.display import plural
from flaxfit.distributed import agree, exchange
from flaxfit.strategies import Strategy
from flaxfit.tree import Array, Json, PyTree, digests_or_sources, flat, is_key

_SLOW_SECONDS = 600.0
_MOST_NAMED = 3


class Consistency:
    """Compares the next action of all processes on the host, before their first collective.

    Processes that disagree would deadlock in a collective, or reduce unrelated arrays. A step with
    a cached program exchanges nothing, and neither does a single process.
    """

    def __init__(self, strategy: Strategy):
        self.is_needed = strategy.n_processes > 1
        self._stepped = 0

    def state(self, step: int, state: PyTree) -> None:
        """Checks that all processes continue from the same state, by its addressable arrays."""
        self._stepped = 0
        if self.is_needed:
            self._say(f"the state of step {step:,}", True)
            self.whole("the state", state)

    def whole(self, topic: str, tree: PyTree) -> None:
        """Checks that all processes hold the same arrays, before they are sharded."""
        if self.is_needed:
            held = {path: _words(x) for path, x in flat(tree).items() if _is_held(x)}
            self._compare(topic, {path: _crc(np.asarray(x)) for path, x in held.items()})

    def data(self, position: Json) -> None:
        """Checks that all processes are at the same position of the same data."""
        if self.is_needed:
            self._say(f"data at {position_text(position)}", True)

    def program(self, step: int, batch: Batch, *, is_weighted: bool = False) -> None:
        """Checks that all processes are about to compile for batches of these shapes."""
        if self.is_needed:
            parts = batch._asdict() | ({} if is_weighted else {"weights": None})
            shapes = [f"{path} {x.dtype}{list(x.shape)}" for path, x in flat(parts).items()]
            self._say(f"step {step:,} as the first with {', '.join(shapes)}", True)

    def stepped(self, program: Hashable) -> None:
        """Adds the program of a step to the checksum that the next checkpoint compares."""
        if self.is_needed:
            self._stepped = zlib.crc32(repr(program).encode(), self._stepped)

    def compiled(self, step: int, text: str) -> None:
        """Checks that all processes have compiled the same program, by its lowered text."""
        if self.is_needed:
            # A callback to Python is identified by a number that may be its address.
            lines = [line for line in text.splitlines() if "callback" not in line]
            named = {
                f"line {n} of the program from step {step:,} on": x for n, x in enumerate(lines)
            }
            self._compare("the program of a step", named)

    def checkpoint(self, step: int, read_state: Callable[[], PyTree]) -> None:
        """Checks that all processes reached this checkpoint by the same programs, in one state."""
        if self.is_needed:
            self._say(f"a checkpoint at step {step:,}, by programs of the sum {self._stepped:08x}")
            sums = _sums(read_state())
            self._compare("the state", {f"{x} after step {step:,}": sums[x] for x in sums})

    def stop(self, wanted: bool) -> bool:
        """Returns whether any process wants to end the run."""
        return any(exchange("whether to stop", wanted)) if self.is_needed else wanted

    def end(self, what: str, n: int, in_flight: Iterable[PyTree]) -> None:
        """Checks that the data of all processes ends here."""
        if self.is_needed:
            # Its collectives finish only once every process has joined them: nobody is far behind.
            jax.block_until_ready([*in_flight])
            self._say(f"the end of the {what} data after {n:,}")

    def _compare(self, topic: str, parts: Mapping[str, str]) -> None:
        """Checks that all processes have the same parts; the error names some that differ."""
        sums = {name: zlib.crc32(part.encode()) for name, part in parts.items()}
        total = zlib.crc32(repr(sums).encode())
        if len({*exchange(topic, total, seconds=_SLOW_SECONDS)}) == 1:
            return
        found = exchange(topic, sums, seconds=_SLOW_SECONDS)
        names = dict.fromkeys(name for each in found for name in each)
        other = [name for name in names if len({each.get(name) for each in found}) > 1]
        own = [f"{name}: {parts.get(name, 'none').strip():.200}" for name in other[:_MOST_NAMED]]
        agree(topic, f"checksum {total:08x}, {plural(len(other), 'difference')}, {'; '.join(own)}")

    def _say(self, what: str, is_slow: bool = False) -> None:
        agree("what comes next", what, seconds=_SLOW_SECONDS if is_slow else None)


def agreed_shardings(strategy: Strategy) -> Callable[[PyTree], PyTree] | None:
    """Returns `strategy.shardings`, preceded by a check that all processes hold the same state."""
    find = strategy.shardings
    if find is None:
        return None

    def shardings(state: PyTree) -> PyTree:
        Consistency(strategy).whole("the initial state", state)
        return find(state)

    return shardings


def _sums(state: PyTree) -> dict[str, str]:
    """Returns the checksums of the fully replicated arrays of a state, by path."""
    own = {path: x.addressable_data(0) for path, x in flat(state).items() if x.is_fully_replicated}
    found = digests_or_sources({path: _words(x) for path, x in own.items()})
    # On a CPU `found` holds the arrays themselves, so that no program is compiled for digests.
    return {path: x if isinstance(x, str) else _crc(x) for path, x in found.items()}


def _crc(array: np.ndarray) -> str:
    return f"{zlib.crc32(array.tobytes()):08x}"


def _words(leaf: Array) -> Array:
    """Returns a leaf as numbers; for a typed random key, its key data."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _is_held(leaf: Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether a leaf is an array, not a shape, and this process can address all of it."""
    return getattr(leaf, "is_fully_addressable", not isinstance(leaf, jax.ShapeDtypeStruct))
