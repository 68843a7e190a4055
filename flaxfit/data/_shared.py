"""SharedStream: batches that all processes are given alike, each of which works at its rows."""

import weakref
import zlib
from typing import Any

import jax
import numpy as np

from flaxfit.data._batch import n_examples, normalize
from flaxfit.data._iterables import IterableStream
from flaxfit.distributed._processes import agree, process_count, process_index

_SECONDS = 600.0


class SharedStream(IterableStream):
    """Streams the batches of an iterable that is the same in every process, as `ArrayStream` does.

    Process p of n works at the p-th of n slices of each batch, so that neither the batches nor the
    position depend on the number of processes. The first batch is compared between them.

    >>> stream = SharedStream(lambda epoch: iter([np.arange(4)]))
    >>> rows = stream.next_rows()
    >>> stream.pick(rows[2:])
    array([2, 3])
    """

    def __next__(self) -> Any:
        batch = self._advance()
        if process_count() == 1:
            return batch
        return _rows_of(batch, own_slice(slice(0, n_examples(normalize(batch)))))

    def next_rows(self) -> np.ndarray:
        """Moves on by a batch, and gives what stands for its rows, for `pick`.

        That is the number of the batch and the index in it, for each of them. The batch is kept
        as long as this array is.
        """
        batch = self._advance()
        n, number = n_examples(normalize(batch)), self._n_kept % 2**31
        self._n_kept += 1
        rows = np.stack([np.full(n, number), np.arange(n)], axis=1).astype(np.int32)
        self._kept[number] = batch
        weakref.finalize(rows, self._kept.pop, number).atexit = False
        return rows

    def pick(self, rows: np.ndarray) -> Any:
        """The examples at some rows of a batch that is kept, as a batch."""
        return _rows_of(self._kept[int(rows[0, 0])], rows[:, 1])

    def _advance(self) -> Any:
        batch = super()._advance()
        if not self._is_compared and process_count() > 1:
            _compare(batch)
        self._is_compared = True
        return batch

    def _rewind(self) -> None:
        super()._rewind()
        self._is_compared = False
        self._n_kept, self._kept = 0, dict[int, Any]()


def own_slice(rows: slice) -> slice:
    """The part of the rows of a batch that a process works at.

    >>> own_slice(slice(8, 16))
    slice(8, 16, None)

    Raises:
      ValueError: they cannot be parted evenly between the processes.
    """
    n, size = process_count(), rows.stop - rows.start
    if size % n:
        raise ValueError(
            f"Cannot part a batch of {size} examples evenly between {n} processes. A loop that is "
            "given the stream itself, not prefetched, can; else leave out smaller last batches "
            "and use a batch size that divides."
        )
    start = rows.start + process_index() * size // n
    return slice(start, start + size // n)


def _rows_of(batch: Any, rows: Any) -> Any:
    return jax.tree.map(lambda x: x[rows], batch)


def _compare(batch: Any) -> None:
    """Checks that all processes were given this batch.

    Raises:
      ValueError: they were not; all of them raise it.
    """
    total, shapes = 0, []
    for leaf in map(np.asarray, jax.tree.leaves(batch)):
        total = zlib.crc32(leaf.tobytes(), total)
        shapes.append(f"{leaf.dtype}{list(leaf.shape)}")
    said = (
        f"batches that all processes are given, the first with {', '.join(shapes)} and the "
        f"checksum {total:08x}"
    )
    try:
        agree("what comes next", said, seconds=_SECONDS)
    except ValueError as error:
        raise ValueError(
            f"{error}\nIf each process reads a share of its own, say "
            "as_stream(data, shared=False). If all read the same, say shared=True, and see to it "
            "that they do: in one order and with one seed."
        ) from None
