"""DeviceLoader: brings the batches of a stream onto the devices, as compiled steps take them."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flaxfit.data import ArrayStream
from flaxfit.data._batch import Batch, has_rows, n_examples, normalize
from flaxfit.loop._assembly import Assembler, Loaded
from flaxfit.loop._consistency import Consistency
from flaxfit.loop._cursor import Cursor
from flaxfit.loop._local_rows import check_divided, knows_rows, local_examples, local_rows
from flaxfit.loop._padding import Padder, Portion
from flaxfit.step._validate import check_weights_of
from flaxfit.strategies import Strategy
from flaxfit.tree._shapes import shapes_of
from flaxfit.tree._types import PyTree

_MOST_TO_COPY = 2**28  # Bytes.
Inspect = Callable[[Batch, Batch | None, bool], str]
"""Validates the first batch, given all data if available, and whether it may have to be padded.

Returns why that is unsafe, or ""."""


class DeviceLoader:
    """Pads, stacks and splits the batches of a stream, and batches that are given instead.

    The first batch is inspected, which decides how all are padded or split. Resident data is placed
    on the devices then. A device computes its share of a batch in `parts`. Batches may differ in
    structure if `is_mixed`, and be any pytrees if `is_whole`.
    """

    def __init__(
        self,
        strategy: Strategy,
        consistency: Consistency,
        say: Callable[[str], None],
        *,
        parts: int,
        is_mixed: bool,
        is_whole: bool = False,
    ):
        self.shapes: Batch | None = None
        """Shapes and dtypes of the latest first batch; None before there is one."""
        self.seconds = 0.0
        """The duration of inspections of first batches."""
        self.is_inspecting = False
        """Whether an inspection is running, which may take long."""
        self._strategy, self._consistency, self._say = strategy, consistency, say
        self._parts, self._is_mixed, self._is_whole = parts, is_mixed, is_whole

    def take_from(self, cursor: Cursor) -> None:
        """Continues with another cursor."""
        if cursor.has_data:
            check_divided(cursor.stream, self._strategy)
        self.cursor = cursor
        self.batch_size = 0
        """The number of examples in a regular batch; 0 if it is not known yet."""
        self.resident: Batch | None = None
        """The data on the devices, if the update gathers its batches there."""
        self._resident_shapes = ""
        self.forget()

    @property
    def has_inspected(self) -> bool:
        """Whether the first batch was inspected."""
        return self._feed is not None

    def forget(self) -> None:
        """Forgets the first batch; the next one is inspected."""
        self._feed: Padder | None = None
        self._given_feed: Padder | None = None
        self._assemble, self._assemble_given = Assembler(), Assembler()

    def first_batch(self) -> PyTree:
        """Returns the next batch, which stays to be trained on; raises if there is none."""
        fetched = self.cursor.peek()
        if not fetched:
            raise ValueError("The data holds no batches: there is nothing to train on.")
        return self.cursor.examples(fetched[0])

    # `inspect` is not kept: it would keep its owner, and with it a state, from being freed.

    def load(self, items: Sequence[PyTree], inspect: Inspect) -> Loaded:
        """Returns the batches of fetched items; only the first if their programs differ."""
        return self._assemble(items, lambda item: self.portion(item, inspect))

    def load_given(self, batch: PyTree, inspect: Inspect) -> Loaded:
        """Returns a batch that is not of the stream, on the devices."""
        if self._feed is None:
            fetched = self.cursor.peek() if self.cursor.has_data else []
            self._inspect_first(self.cursor.examples(fetched[0]) if fetched else batch, inspect)
        return self._assemble_given([batch], lambda item: self._given_portion(item, inspect))

    def _given_portion(self, item: PyTree, inspect: Inspect) -> Portion:
        batch, shapes = normalize(item, is_whole=self._is_whole), self.shapes
        is_by_output = shapes is not None and isinstance(shapes.weights, Mapping)
        if isinstance(batch.weights, Mapping) != is_by_output:
            raise ValueError(
                "Cannot train on this batch: either it or the earlier batches have weights by "
                "output. Pass weights of 1 where there are none."
            )
        if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch.weights)):
            check_weights_of(batch, "This batch")  # To read others would wait for the devices.
        if self._given_feed is None:
            # These may have any size: they are padded no further than to divide, or narrowed.
            why_not = self._why_not if self._may_pad else inspect(batch, None, True)
            self._given_feed = self._make(
                why_not, size=sys.maxsize if why_not else 1, is_own=self._strategy.n_processes > 1
            )
        return self._given_feed(batch)

    def example(self, n: int | None, inspect: Inspect) -> Batch:
        """Returns a batch of zeros of `n` examples, or of the next multiple of `parts`.

        None stands for the regular size. The memory of zeros is allocated only when written to.
        """
        if self._feed is None:
            self.first_batch()
            self.portion(self.cursor.peek()[0], inspect)
        size = n or self.batch_size
        size += -size % self._parts
        shapes: Any = self.shapes
        if not has_rows(shapes):
            if n is not None:
                raise ValueError(
                    "The arrays of a batch have different lengths: there is no batch of another "
                    "size that resembles it."
                )
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        return jax.tree.map(lambda x: np.zeros((size, *x.shape[1:])[: x.ndim], x.dtype), shapes)

    def as_regular(self, batch: Batch) -> Portion:
        """Prepares a batch for the update as if it had the regular size."""
        feed = Padder(
            self._strategy,
            pad=self._feed is not None and self._feed.pad,
            why_not="the task or its loss does not allow it",
            parts=self._parts,
            is_whole=self._is_whole,
        )
        return feed(batch)

    def portion(self, item: PyTree, inspect: Inspect) -> Portion:
        """Returns the batch of a fetched item, of a size that can be split."""
        feed = self._feed or self._inspect_first(self.cursor.examples(item), inspect)
        if not self.cursor.takes_rows:
            return feed(item)
        portion = feed(Batch((item,)))
        if self.resident is not None and portion.strategy is self._strategy:
            portion = local_rows(portion._replace(is_weighted=self.resident.weights is not None))
            signature = (portion.signature, self._resident_shapes)
            return portion._replace(signature=signature, data=(self.resident,))
        if knows_rows(self.cursor.stream):
            return local_examples(portion, self.cursor.examples)
        # On fewer devices than hold the data.
        return self._remainder_feed(self.cursor.examples(item))

    def _inspect_first(self, item: PyTree, inspect: Inspect) -> Padder:
        """Inspects the first batch, timed."""
        began, self.is_inspecting = time.perf_counter(), True
        try:
            self._feed = feed = self._feed_for(item, inspect)
        finally:
            self.is_inspecting = False
        self.seconds += time.perf_counter() - began
        return feed

    def _feed_for(self, item: PyTree, inspect: Inspect) -> Padder:
        """Makes the padder for batches like this first one."""
        batch = normalize(item, is_whole=self._is_whole)
        self.shapes = shapes_of(batch)
        cursor, stream = self.cursor, self.cursor.stream
        is_own = self._strategy.n_processes > 1 and not cursor.takes_rows
        if not is_own:
            self._consistency.data(cursor.stream_position())
        whole = cursor.whole()
        data = None if whole is None else normalize(whole)
        self._place(_rounded(data, stream.batch_size) if cursor.gathers and data else None)
        # A first batch that is smaller than those of the stream is a remainder already.
        size = n_examples(batch)
        if not is_own:
            size = max(size, getattr(stream, "batch_size", 0))
        n = self.batch_size = self.batch_size or size
        # If no batch can differ from the first one, all do without weights of 1. A subclass of the
        # user's own may change the arrays.
        is_plain = type(stream) is ArrayStream
        is_even = is_plain and stream.is_even and n == stream.batch_size
        n_shares = self._strategy.n_devices * self._parts
        self._may_pad = not is_even or n % n_shares > 0
        why_not = self._why_not = inspect(batch, data, self._may_pad)
        self._may_pad |= bool(why_not)  # It is known already why not.
        self._remainder_feed = self._make(why_not or "it is a remainder", size=n)
        return self._make(why_not, size=n, is_own=is_own, is_even=is_even, say=self._say)

    def _make(self, why_not: str, **options: Any) -> Padder:
        return Padder(
            self._strategy,
            pad=not why_not,
            why_not=why_not,
            parts=self._parts,
            is_mixed=self._is_mixed,
            is_whole=self._is_whole,
            **options,
        )

    def _place(self, data: Batch | None) -> None:
        """Places the data that batches are gathered from on the devices."""
        self.resident = None if data is None else self._strategy.place(data)
        leaves, structure = jax.tree.flatten(self.resident)
        # A text, as a key of programs, since a text keeps its hash.
        self._resident_shapes = repr((structure, *((leaf.shape, leaf.dtype) for leaf in leaves)))


def _rounded(data: Batch, batch_size: int) -> Batch:
    """Adds rows, which no batch takes, so that data of a few rows more or less shares programs."""
    leaves, n_more = jax.tree.leaves(data), -n_examples(data) % batch_size
    is_on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    if not n_more or not is_on_host or sum(leaf.nbytes for leaf in leaves) > _MOST_TO_COPY:
        return data
    return jax.tree.map(
        lambda x: np.concatenate([x, np.zeros((n_more, *x.shape[1:]), x.dtype)]), data
    )
