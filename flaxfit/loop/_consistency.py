"""Consistency: the processes of a run do the same, or all of them fail with what differs."""

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.data._batch import Batch
from flaxfit.data._position import position_text
from flaxfit.display import plural
from flaxfit.distributed import agree, exchange
from flaxfit.strategies import Strategy
from flaxfit.tree import Array, Json, PyTree, digests_or_sources, flat

_SLOW_SECONDS = 600.0
_MOST_NAMED = 3


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

    def whole(self, topic: str, tree: PyTree) -> None:
        """Checks that all hold the same arrays, before devices get parts of them."""
        if self.is_needed:
            held = {path: _words(x) for path, x in flat(tree).items() if _is_held(x)}
            self._compare(topic, {path: _crc(np.asarray(x)) for path, x in held.items()})

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

    def compiled(self, step: int, text: str) -> None:
        """Checks that all have compiled the same program, from its lowered text."""
        if self.is_needed:
            # The number of a function that calls back to Python may be its address.
            lines = [line for line in text.splitlines() if "callback" not in line]
            named = {
                f"line {n} of the program from step {step:,} on": x for n, x in enumerate(lines)
            }
            self._compare("the program of a step", named)

    def checkpoint(self, step: int, state: PyTree) -> None:
        """Checks that all are at the same checkpoint, by the same programs, in the same state."""
        if self.is_needed:
            self._say(f"a checkpoint at step {step:,}, by programs of the sum {self._stepped:08x}")
            sums = _sums(state)
            self._compare("the state", {f"{x} after step {step:,}": sums[x] for x in sums})

    def stop(self, wanted: bool) -> bool:
        """Returns whether one of the processes has ended the run."""
        return any(exchange("whether to stop", wanted)) if self.is_needed else wanted

    def end(self, what: str, n: int, in_flight: Iterable[PyTree]) -> None:
        """Checks that all are at the end of their data."""
        if self.is_needed:
            jax.block_until_ready([*in_flight])  # The others have then come this far, too.
            self._say(f"the end of the {what} data after {n:,}")

    def _compare(self, topic: str, parts: Mapping[str, str]) -> None:
        """Checks that all have the same parts; names some that differ."""
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
    """Returns `strategy.shardings`, which first compares a state that each process holds whole."""
    find = strategy.shardings
    if find is None:
        return None

    def shardings(state: PyTree) -> PyTree:
        Consistency(strategy).whole("the initial state", state)
        return find(state)

    return shardings


def _sums(state: PyTree) -> dict[str, str]:
    """Checksums of the arrays of a state of which each process has a copy, by path."""
    own = {path: x.addressable_data(0) for path, x in flat(state).items() if x.is_fully_replicated}
    found = digests_or_sources({path: _words(x) for path, x in own.items()})
    # On a CPU that is their memory, for which no program is compiled.
    return {path: x if isinstance(x, str) else _crc(x) for path, x in found.items()}


def _crc(array: np.ndarray) -> str:
    return f"{zlib.crc32(array.tobytes()):08x}"


def _words(leaf: Array) -> Array:
    """A leaf as numbers, of which a typed random key is made."""
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _is_held(leaf: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether this process has the whole content of a leaf, which may be a shape alone."""
    return getattr(leaf, "is_fully_addressable", not isinstance(leaf, jax.ShapeDtypeStruct))


def _checksum(state: PyTree) -> int:
    total = 0
    for leaf in jax.tree.leaves(state):
        if _is_held(leaf):
            total = zlib.crc32(np.asarray(_words(leaf)).tobytes(), total)
    return total
