"""ArrayStream: batches of arrays, in an order that depends only on the seed and the epoch."""

import copy
from collections.abc import Iterator
from typing import Self

import jax
import numpy as np

from flaxfit.data._columns import Column, common_length
from flaxfit.data._position import check_description
from flaxfit.data._sample_weights import check_weights_shape, without_masked
from flaxfit.display import short_errors
from flaxfit.distributed import process_count, process_index
from flaxfit.tree import ArrayLike, Json, PyTree, whole_number

_RESIDENT_BYTES = 2**28


class ArrayStream:
    """Streams batches `(x, y)` or `(x, y, w)` of arrays; `(x, ())` without targets.

    The order of an epoch is `np.random.default_rng((seed, epoch)).permutation(n)`, so a
    position is two integers and is restored at once. The data is not copied: batches of unshuffled
    data are views. 64-bit arrays are narrowed once, memory-mapped ones batch by batch.

    With several processes, give the same data to all of them. Process p of n takes the p-th of n
    slices of every batch. The order does not depend on the number of processes.

    >>> stream = ArrayStream(np.arange(5.0), batch_size=2, epochs=1)
    >>> [x.tolist() for x, _ in stream]
    [[0.0, 1.0], [2.0, 3.0], [4.0]]

    Args:
      x: the inputs: an array `(n, ...)`, or a (nested) tuple or mapping of arrays.
      y: the targets, in the same forms; None if there are none.
      w: weights `(n,)` or `(n, tokens)`, or a mapping from outputs to weights; see `Batch`.
      batch_size: the number of examples in a batch.
      shuffle: whether each epoch has its own random order.
      seed: the seed of the random orders.
      epochs: the number of passes; None repeats forever.
      drop_remainder: whether to leave out a smaller last batch.
      resident: whether `TrainLoop` puts all arrays on each device once and gathers batches
        there; "auto": if they take at most 256 MiB and are not mapped from a file.

    Attributes:
      n_examples: the number of examples in the data.
      batch_size: the number of examples in a batch; the last of an epoch may be smaller.
      epoch: the number of complete passes.
      resident: whether a training loop keeps the arrays on the devices and gathers batches there.

    Raises:
      ValueError: the lengths differ, there is no example, or an option is out of range.
      TypeError: an array is not numeric.
    """

    shared = False

    @short_errors
    def __init__(
        self,
        x: PyTree,
        y: PyTree = None,
        w: ArrayLike | None = None,
        *,
        batch_size: int = 32,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = None,
        drop_remainder: bool = False,
        resident: bool | str = "auto",
    ):
        self.batch_size: int = whole_number("batch_size", batch_size)
        self.epochs: int | None = None if epochs is None else whole_number("epochs", epochs)
        self.shuffle: bool = bool(shuffle)
        self.seed: int = whole_number("seed", seed, least=0)
        self.drop_remainder: bool = bool(drop_remainder)
        y, w = without_masked(y, w)
        parts = (x, () if y is None else y) + (() if w is None else (w,))
        self.n_examples: int = common_length(parts)
        if w is not None:
            check_weights_shape(w, "weights")
        leaves, self._structure = jax.tree.flatten(parts)
        self._columns = [Column(leaf) for leaf in leaves]
        if len(self) == 0:
            raise ValueError(
                f"{self.n_examples:,} rows do not fill a batch of {self.batch_size}, and "
                "drop_remainder=True drops them: use a smaller batch_size or drop_remainder=False."
            )
        n_bytes = sum(column.nbytes for column in self._columns)
        is_mapped = any(column.is_mapped for column in self._columns)
        is_small = n_bytes <= _RESIDENT_BYTES and not is_mapped
        if resident not in (True, False, "auto"):
            raise ValueError(f"resident must be True, False or 'auto', got {resident!r}.")
        self.resident: bool = is_small if resident == "auto" else bool(resident)
        self._rewind()

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        rows = self.n_examples if self.drop_remainder else self.n_examples + self.batch_size - 1
        return rows // self.batch_size

    @property
    def is_even(self) -> bool:
        """Whether every batch has `batch_size` examples."""
        return self.drop_remainder or self.n_examples % self.batch_size == 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[PyTree, ...]:
        if self._is_over():
            raise StopIteration
        start = self._batch * self.batch_size
        rows = slice(start, min(start + self.batch_size, self.n_examples))
        if process_count() > 1:
            rows = _own_slice(rows)
        batch = self.pick(self._ordered()[rows] if self.shuffle else rows)
        self._advance()
        return batch

    def next_rows(self) -> np.ndarray:
        """Advances by a batch, and returns its row numbers (for all processes)."""
        start = self._batch * self.batch_size
        # Make no order of all rows: mapped data may have more row numbers than fit in memory.
        if not (self.shuffle or self.resident):
            if self._is_over():
                raise StopIteration
            self._advance()
            end = min(start + self.batch_size, self.n_examples)
            return np.arange(start, end, dtype=_row_dtype(self.n_examples))
        order = self._ordered() if self._order is None else self._order
        self._advance()
        return order[start : start + self.batch_size]

    def next_rows_of(self, n: int) -> list[tuple[np.ndarray, Json]]:
        """Advances by up to `n` batches, but not beyond the epoch.

        Returns the row numbers of each batch, and the position after it.
        """
        order, first, size = self._ordered(), self._batch, self.batch_size
        last = min(first + n, self._n_batches)
        rows = [order[i * size : (i + 1) * size] for i in range(first, last)]
        epoch, data = self.epoch, self._description
        positions: list[Json] = [
            {"epoch": epoch, "batch": i, "data": data} for i in range(first + 1, last + 1)
        ]
        self._batch = last - 1
        self._advance()
        positions[-1] = self.get_state()
        return [*zip(rows, positions, strict=True)]

    def order_ahead(self) -> None:
        """Shuffles the rows of the next epoch, if there is one, before its first batch."""
        if self._order is None and self.shuffle and not self._is_over():
            self._ordered()

    def pick(self, rows: slice | np.ndarray) -> tuple[PyTree, ...]:
        """Returns the rows of a slice or of an array of row numbers, as a batch."""
        return self._structure.unflatten([column.pick(rows) for column in self._columns])

    def one_epoch(self) -> "ArrayStream":
        """Returns a fresh stream of one pass over the same arrays, in their stored order.

        >>> len([*stream.one_epoch()])
        3
        """
        fresh = copy.copy(self)
        fresh.shuffle, fresh.epochs = False, 1
        fresh._rewind()
        return fresh

    def whole(self) -> tuple[PyTree, ...] | None:
        """Returns all examples as one batch, or None if the data is mapped from a file."""
        if any(column.is_mapped for column in self._columns):
            return None
        return self.pick(slice(None))

    def get_state(self) -> dict[str, Json]:
        """Returns the position after the last delivered batch, with a description of the data.

        >>> stream.get_state()["epoch"]
        1
        """
        return {"epoch": self.epoch, "batch": self._batch, "data": self._description}

    def set_state(self, state: dict[str, Json]) -> None:
        """Moves to a position that `get_state` gave.

        >>> stream.set_state(stream.get_state())

        Raises:
          ValueError: the position belongs to other data, or to other batches of it.
        """
        check_description(state.get("data", state), self._description)
        self.epoch, self._batch, self._order = state["epoch"], state["batch"], None

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self._description.items())
        return f"ArrayStream({settings}, epochs={self.epochs}, epoch={self.epoch})"

    def _rewind(self) -> None:
        self.epoch: int = 0
        self._batch, self._n_batches = 0, len(self)
        self._order: np.ndarray | None = None
        # Built once: a loop may read the position at each step.
        settings = ("batch_size", "shuffle", "seed", "drop_remainder")
        self._description = {name: getattr(self, name) for name in settings}
        self._description = {"length": self.n_examples, **self._description}

    def _ordered(self) -> np.ndarray:
        """Returns the row numbers in the order of this epoch."""
        if self._is_over():
            raise StopIteration
        if self._order is None:
            order = np.arange(self.n_examples, dtype=_row_dtype(self.n_examples))
            if self.shuffle:  # Draws as `permutation(n)` does, in half the memory.
                np.random.default_rng((self.seed, self.epoch)).shuffle(order)
            order.flags.writeable = False  # Callers get views of it.
            self._order = order
        return self._order

    def _advance(self) -> None:
        self._batch += 1
        if self._batch == self._n_batches:
            self.epoch, self._batch, self._order = self.epoch + 1, 0, None

    def _is_over(self) -> bool:
        return self.epochs is not None and self.epoch >= self.epochs


def rest_of_pass(stream: ArrayStream) -> Iterator[tuple[PyTree, ...]]:
    """Iterates over the rest of a single pass; full batches in order are read-only views."""
    if not (stream.shuffle or stream._is_over() or process_count() > 1):
        size, advance, unflatten = stream.batch_size, stream._advance, stream._structure.unflatten
        full = stream._batch, stream.n_examples // size
        columns = [column.batches(*full, size) for column in stream._columns]
        for leaves in zip(*columns, strict=True):
            advance()
            yield unflatten(leaves)
    yield from stream


def _own_slice(rows: slice) -> slice:
    """Returns the rows of a batch that this process takes."""
    n, size = process_count(), rows.stop - rows.start
    if size % n:
        raise ValueError(
            f"Cannot divide a batch of {size} examples evenly among {n} processes. Pass the "
            "ArrayStream to the loop without prefetching, which pads the batch; or use "
            "drop_remainder=True and a batch size that is a multiple of the number of processes."
        )
    start = rows.start + process_index() * size // n
    return slice(start, start + size // n)


def _row_dtype(n: int) -> type[np.signedinteger]:
    return np.int32 if n < 2**31 else np.int64
