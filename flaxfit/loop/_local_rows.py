"""The rows of each batch that belong to this process."""

import contextlib
from collections.abc import Callable, Iterator

import jax
import numpy as np

from flaxfit.data import ArrayStream
from flaxfit.data._batch import Batch, n_examples, normalize
from flaxfit.data._roles import NO_ROLES
from flaxfit.data._sample_weights import times
from flaxfit.data._stream import is_shared
from flaxfit.distributed._processes import process_count
from flaxfit.loop._assembly import Assembler, Loaded
from flaxfit.loop._padding import Padder, Portion, signature_of
from flaxfit.strategies import Strategy
from flaxfit.tree._types import Data, PyTree


def knows_rows(stream: Data) -> bool:
    """Whether several processes divide each batch of a stream by row numbers, as in `ArrayStream`.

    Other streams give each process its own share of each batch.
    """
    return process_count() > 1 and hasattr(stream, "next_rows")


def check_divided(stream: Data, strategy: Strategy) -> None:
    """Raises if a stream may give all processes of a strategy the same rows."""
    if strategy.n_processes > 1 and is_shared(stream):
        name = getattr(stream, "name", type(stream).__name__)
        raise ValueError(
            f"Cannot divide the batches of a {name} among {strategy.n_processes} processes, all of "
            "which would compute with the same rows. Pass arrays or an ArrayStream, which flaxfit "
            "divides. Or divide the data yourself: pass a Grain DataLoader with "
            "shard_options=grain.sharding.ShardByJaxProcess(), or any iterable "
            "that yields other rows in each process as "
            "flaxfit.data.as_stream(data, shared=False)."
        )


def local_rows(portion: Portion) -> Portion:
    """Returns the rows of a padded portion that belong to the devices of this process."""
    if portion.strategy.n_processes == 1:
        return portion
    rows = portion.strategy.rows(n_examples(portion.batch))
    batch = jax.tree.map(lambda x: x[rows], portion.batch)
    signature = signature_of(portion.strategy, batch, portion.is_weighted)
    return portion._replace(batch=batch, signature=signature)


def local_examples(portion: Portion, pick: Callable[[PyTree], PyTree]) -> Portion:
    """Returns the examples of this process, from a portion with the row numbers of all."""
    own = local_rows(portion)
    (rows,) = own.batch.inputs
    batch = normalize(pick(rows))
    has_weights = batch.weights is not None
    if own.batch.weights is not None:
        batch = batch._replace(weights=times(batch.weights, own.batch.weights))
    signature = signature_of(own.strategy, batch, has_weights)
    return own._replace(batch=batch, is_weighted=has_weights, signature=signature)


class LocalBatches:
    """The share of this process in each batch of one pass over a stream, for evaluation.

    `form` brings an item with columns into the form of a batch.
    """

    def __init__(
        self,
        stream: Data,
        strategy: Strategy,
        form: Callable[[PyTree], PyTree] = NO_ROLES,
        *,
        is_whole: bool = False,
    ):
        self._form = form
        self.is_whole = is_whole
        """Whether a batch may be any pytree."""
        check_divided(stream, strategy)
        self._stream = stream
        self._strategy = strategy
        self._takes_rows = knows_rows(stream)
        self._assemble = Assembler()
        self.is_own = strategy.n_processes > 1 and not self._takes_rows
        """Whether the stream gives this process its own share of each batch."""
        self.batch_size = 0 if self.is_own else getattr(stream, "batch_size", 0)
        """The size of a regular batch; 0 if it is not known."""

    def __iter__(self) -> Iterator[PyTree]:
        """Iterates over items: batches, or the row numbers of batches."""
        return (item for _, item in self.pairs())

    def _rows(self) -> Iterator[PyTree]:
        with contextlib.suppress(StopIteration):
            while True:
                yield self._stream.next_rows()

    def pairs(self) -> Iterator[tuple[PyTree, PyTree]]:
        """Iterates over items as the stream gives them, each with the item in its form."""
        if self._takes_rows:
            return ((rows, rows) for rows in self._rows())
        return ((item, self._form(item)) for item in self._stream)

    def examples(self, item: PyTree) -> Batch:
        """Returns the batch of an item; that of all processes, if they divide it."""
        item = self._pick(item) if self._takes_rows else item
        return normalize(item, is_whole=self.is_whole)

    def given(self, item: PyTree) -> PyTree:
        """Returns an item of the stream, whose row numbers are known if processes divide it."""
        return self._stream.pick(item) if self._takes_rows else item

    def whole(self) -> PyTree:
        """Returns all examples as one batch, or None if the stream cannot."""
        whole = self._stream.whole() if hasattr(self._stream, "whole") else None
        return None if whole is None else self._form(whole)

    def may_be_uneven(self, n: int) -> bool:
        """Whether a batch may differ in size from the first, of `n` examples, or not divide."""
        is_even = type(self._stream) is ArrayStream and self._stream.is_even
        return not is_even or n != self.batch_size or n % self._strategy.n_devices > 0

    def padder(self, *, pad: bool = True, why_not: str = "") -> Padder:
        """Returns a padder of the batches, made with these arguments."""
        return Padder(
            self._strategy,
            pad=pad,
            why_not=why_not,
            size=self.batch_size,
            is_own=self.is_own,
            is_whole=self.is_whole,
        )

    def load(self, item: PyTree, feed: Padder) -> Loaded:
        """Returns the batch of an item, padded by `feed` and split over the devices."""
        return self._assemble([item], lambda item: self._portion(item, feed))

    def _portion(self, item: PyTree, feed: Padder) -> Portion:
        if not self._takes_rows:
            return feed(item)
        return local_examples(feed(Batch((item,))), self._pick)

    def _pick(self, rows: PyTree) -> PyTree:
        return self._form(self._stream.pick(rows))

    def without_padding(self, outputs: PyTree, n: int) -> PyTree:
        """Returns `n` rows of the joined outputs, or `n` of each process if `is_own`."""
        if not self.is_own:
            return jax.tree.map(lambda rows: rows[:n], outputs)
        n_devices = self._strategy.n_devices
        parts = n_devices // len(range(n_devices)[self._strategy.rows(n_devices)])

        def cut(rows: np.ndarray) -> np.ndarray:
            each = rows.reshape(parts, -1, *rows.shape[1:])[:, :n]
            return each.reshape(-1, *rows.shape[1:])

        return jax.tree.map(cut, outputs)
