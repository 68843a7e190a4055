"""ArrayStream: batches of arrays, in an order that depends on the seed and the epoch only."""

import copy
from typing import Any, Self

import jax
import numpy as np

from flaxfit.data._columns import Column, common_length
from flaxfit.data._position import check_description
from flaxfit.data._sample_weights import check_weights_shape
from flaxfit.distributed._processes import process_count, process_index
from flaxfit.tree._checks import whole_number
from flaxfit.tree._types import Json, PyTree

_RESIDENT_BYTES = 2**28


class ArrayStream:
    """Streams batches `(x, y)` or `(x, y, w)` of arrays; `(x, ())` without targets.

    The order of an epoch is `np.random.default_rng((seed, epoch)).permutation(n)`, so a position
    is two integers and any of them is reached at once. The data is not copied: batches of
    unshuffled data are views. 64-bit arrays are narrowed once, quietly, memory-mapped ones batch
    by batch.

    With several processes, give the same data to all of them. Each takes its own part of every
    batch: process p of n takes the p-th of n slices. The order does not depend on their number.

    >>> stream = ArrayStream(np.arange(5.0), batch_size=2, epochs=1)
    >>> [x.tolist() for x, _ in stream]
    [[0.0, 1.0], [2.0, 3.0], [4.0]]

    Attributes:
      n_examples: how many examples the data holds.
      batch_size: examples in a batch; the last of an epoch may be smaller.
      epoch: how many passes are complete.
    """

    shared = False

    def __init__(
        self,
        x: Any,
        y: Any = None,
        w: Any = None,
        *,
        batch_size: int = 32,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = None,
        drop_remainder: bool = False,
        resident: bool | None = None,
    ):
        """Checks the data.

        Args:
          x: the inputs: an array, or a (nested) tuple or mapping of arrays.
          y: the targets, in the same forms; None for none.
          w: one weight per example.
          batch_size: examples in a batch.
          shuffle: whether each epoch has its own random order.
          seed: of the random orders.
          epochs: how many passes to make; None repeats for ever.
          drop_remainder: whether to leave out a smaller last batch.
          resident: whether `TrainLoop` puts the arrays on the devices once, each of which then
            holds them all, and gathers batches there; None: if they take at most 256 MiB and are
            not mapped from a file.
        """
        self.batch_size = whole_number("batch_size", batch_size)
        self.epochs = None if epochs is None else whole_number("epochs", epochs)
        self.shuffle = bool(shuffle)
        self.seed = whole_number("seed", seed, least=0)
        self.drop_remainder = bool(drop_remainder)
        parts = (x, () if y is None else y) + (() if w is None else (w,))
        self.n_examples = common_length(parts)
        if w is not None:
            check_weights_shape(w, "weights")
        leaves, self._structure = jax.tree.flatten(parts)
        self._columns = [Column(leaf) for leaf in leaves]
        if len(self) == 0:
            raise ValueError(
                f"{self.n_examples:,} rows make no batch of {self.batch_size} when the remainder "
                "is dropped: use a smaller batch_size or drop_remainder=False."
            )
        n_bytes = sum(column.nbytes for column in self._columns)
        is_mapped = any(column.is_mapped for column in self._columns)
        is_small = n_bytes <= _RESIDENT_BYTES and not is_mapped
        self.resident = is_small if resident is None else resident
        """Whether a training loop keeps the arrays on the devices and gathers batches there."""
        self._stored: Any = None
        self._rewind()

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        rows = self.n_examples if self.drop_remainder else self.n_examples + self.batch_size - 1
        return rows // self.batch_size

    @property
    def is_even(self) -> bool:
        """Whether every batch has `batch_size` examples."""
        return self.drop_remainder or self.n_examples % self.batch_size == 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        order = self._ordered() if self.shuffle else None
        rows = _own_slice(self._advance())
        return self.pick(rows if order is None else order[rows])

    def next_rows(self) -> np.ndarray:
        """Moves on by a batch, and gives the indices of its examples instead of the examples.

        They are those of all processes, and not to be written to.
        """
        # Not by `_advance`: each step on resident data takes this, and small ones notice a call.
        order = self._order
        if order is None:
            order = self._ordered()
        start = self._batch * self.batch_size
        self._batch += 1
        if self._batch == self._n_batches:
            self._end_epoch()
        return order[start : start + self.batch_size]

    def pick(self, rows: Any) -> Any:
        """The examples at a slice or at an array of indices, as a batch."""
        return self._structure.unflatten([column.pick(rows) for column in self._columns])

    def _advance(self) -> slice:
        """Moves on by a batch; returns where its rows are in the order of the epoch."""
        if self._is_over():
            raise StopIteration
        start = self._batch * self.batch_size
        self._batch += 1
        if self._batch == self._n_batches:
            self._end_epoch()
        return slice(start, min(start + self.batch_size, self.n_examples))

    def _is_over(self) -> bool:
        return self.epochs is not None and self.epoch >= self.epochs

    def _end_epoch(self) -> None:
        self.epoch, self._batch, self._order = self.epoch + 1, 0, None

    def one_epoch(self) -> "ArrayStream":
        """A fresh stream of one pass over the same arrays, in their stored order."""
        fresh = copy.copy(self)
        fresh.shuffle, fresh.epochs = False, 1
        fresh._rewind()
        return fresh

    def whole(self) -> PyTree:
        """All examples as one batch; None if the data is mapped from a file."""
        if any(column.is_mapped for column in self._columns):
            return None
        return self.pick(slice(None))

    def get_state(self) -> dict[str, Json]:
        """The position after the last delivered batch, with a description of the data."""
        return {"epoch": self.epoch, "batch": self._batch, "data": self._description}

    def set_state(self, state: dict[str, Json]) -> None:
        """Moves to a position that `get_state` gave.

        Raises:
          ValueError: the position belongs to other data, or to other batches of it.
        """
        check_description(state.get("data", state), self._description)
        self.epoch, self._batch, self._order = state["epoch"], state["batch"], None

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self._description.items())
        return f"ArrayStream({settings}, epochs={self.epochs}, epoch={self.epoch})"

    def _rewind(self) -> None:
        self.epoch, self._batch, self._n_batches = 0, 0, len(self)
        self._order: Any = None
        """The indices of all rows in the order of the epoch, once they are asked for."""
        # Made once, as a loop may read the position at each step.
        self._description = {
            "length": self.n_examples,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_remainder": self.drop_remainder,
        }

    def _ordered(self) -> Any:
        """The indices of all rows in the order of this epoch."""
        if self._is_over():
            raise StopIteration
        if self._order is None:
            self._order = self._permutation() if self.shuffle else self._as_stored()
            if isinstance(self._order, np.ndarray):
                self._order.flags.writeable = False  # What is given out are views of it.
        return self._order

    def _permutation(self) -> np.ndarray:
        # Shuffling 32-bit rows in place makes the same draws as `permutation(n)`, in half the
        # memory.
        order = np.arange(self.n_examples, dtype=_row_dtype(self.n_examples))
        np.random.default_rng((self.seed, self.epoch)).shuffle(order)
        return order

    def _as_stored(self) -> Any:
        if self._stored is None:
            stored = _AsStored(self.n_examples)
            # Kept if each step takes some; for data that may be huge they take no memory.
            self._stored = stored[:] if self.resident else stored
        return self._stored


def _own_slice(rows: slice) -> slice:
    """The part of a batch that this process takes.

    Raises:
      ValueError: the batch does not divide evenly among the processes.
    """
    n, size = process_count(), rows.stop - rows.start
    if size % n:
        raise ValueError(
            f"Cannot divide a batch of {size} examples evenly among {n} processes. Pass the "
            "ArrayStream to the loop without prefetching, which pads the batch; or use "
            "drop_remainder=True and a batch size that is a multiple of the number of processes."
        )
    start = rows.start + process_index() * size // n
    return slice(start, start + size // n)


def _row_dtype(n: int) -> Any:
    return np.int32 if n <= np.iinfo(np.int32).max else np.int64


class _AsStored:
    """The indices of `n` rows in their stored order, of which only slices are made."""

    def __init__(self, n: int):
        self._n = n

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.arange(*rows.indices(self._n), dtype=_row_dtype(self._n))
