"""What this process works at of a batch whose rows are known to every process."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from flaxfit.data._batch import Batch, is_weighted, n_examples, normalize
from flaxfit.distributed._processes import process_count
from flaxfit.loop._padding import Feed, Portion, signature_of
from flaxfit.strategies import Strategy


def knows_rows(stream: Any) -> bool:
    """Whether there are several processes, and they share the rows of a stream and their order.

    Other streams give each process batches of its own.

    >>> from flaxfit import ArrayStream
    >>> knows_rows(ArrayStream(np.zeros(8)))
    False
    """
    return process_count() > 1 and hasattr(stream, "next_rows")


def own_rows(portion: Portion) -> Portion:
    """The part of a portion, which is padded already, that the devices of this process get."""
    if portion.strategy.n_processes == 1:
        return portion
    rows = portion.strategy.rows(n_examples(portion.batch))
    batch = jax.tree.map(lambda x: x[rows], portion.batch)
    signature = signature_of(portion.strategy, batch, portion.is_weighted)
    return portion._replace(batch=batch, signature=signature)


def own_examples(portion: Portion, pick: Callable[[Any], Any]) -> Portion:
    """The examples of this process, of a portion whose only input are the rows of all."""
    own = own_rows(portion)
    (rows,) = own.batch.inputs
    batch = normalize(pick(rows))
    has_weights = is_weighted(batch)
    if own.batch.weights is not None:
        weights = own.batch.weights
        weights = weights if batch.weights is None else weights * batch.weights
        batch = batch._replace(weights=weights)
    signature = signature_of(own.strategy, batch, has_weights)
    return own._replace(batch=batch, is_weighted=has_weights, signature=signature, key=None)


class OwnBatches:
    """The batches of one pass over a stream, of each of which this process works at its part.

    >>> from flaxfit import ArrayStream, DataParallel
    >>> batches = OwnBatches(ArrayStream(np.zeros(8), batch_size=4, epochs=1), DataParallel())
    >>> [batches.examples(item).inputs[0].shape for item in batches]
    [(4,), (4,)]
    """

    def __init__(self, stream: Any, strategy: Strategy):
        self._stream = stream
        self._strategy = strategy
        self._takes_rows = knows_rows(stream)
        self.is_own = strategy.n_processes > 1 and not self._takes_rows
        """Whether this process brings batches that others do not know."""
        self.batch_size = 0 if self.is_own else getattr(stream, "batch_size", 0)
        """The size of the regular batches, where it is known; else 0."""

    def __iter__(self) -> Iterator[Any]:
        if not self._takes_rows:
            yield from self._stream
            return
        while True:
            try:
                rows = self._stream.next_rows()
            except StopIteration:
                return
            yield rows

    def examples(self, item: Any) -> Batch:
        """The batch: that of all processes, where they share the rows."""
        return normalize(self._stream.pick(item) if self._takes_rows else item)

    def whole(self) -> Any:
        """All examples as one batch, where the stream can give them; else None."""
        return self._stream.whole() if hasattr(self._stream, "whole") else None

    def portion(self, feed: Feed, item: Any) -> Portion:
        """The batch of this process, ready for a compiled step."""
        if not self._takes_rows:
            return feed(item)
        return own_examples(feed(Batch((item,))), self._stream.pick)

    def without_padding(self, outputs: Any, n: int) -> Any:
        """The rows of `n` examples among joined outputs; where batches are own ones, of each."""
        if not self.is_own:
            return jax.tree.map(lambda rows: rows[:n], outputs)
        n_devices = self._strategy.n_devices
        parts = n_devices // len(range(n_devices)[self._strategy.rows(n_devices)])

        def cut(rows: np.ndarray) -> np.ndarray:
            each = rows.reshape(parts, -1, *rows.shape[1:])[:, :n]
            return each.reshape(-1, *rows.shape[1:])

        return jax.tree.map(cut, outputs)
