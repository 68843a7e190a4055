"""Intake: brings the batches of a source into the form that the compiled update takes."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from flaxfit.data import ArrayStream
from flaxfit.data._batch import Batch, is_weighted, n_examples, normalize
from flaxfit.data._sample_weights import weights_by_output
from flaxfit.loop._consistency import Agreement
from flaxfit.loop._cursor import Source
from flaxfit.loop._local_rows import check_divided, knows_rows, own_examples, own_rows
from flaxfit.loop._padding import Feed, Portion
from flaxfit.step._validate import shapes_of
from flaxfit.strategies import Strategy

Inspect = Callable[[Batch, Batch | None], str]
"""Is told the first batch, and all data where that is at hand; returns why rows of weight 0 would
do harm, "" where they are harmless."""


class Intake:
    """Makes portions of what a source gives, and of batches that are given in its place.

    The first batch is looked at: what is found decides how all are padded or split. Data that is to
    lie on the devices is placed there then.

    Args:
      strategy: the devices to split them over.
      agreement: of the processes.
      say: is told what a user should know.
      parts: in how many parts a device works its share of a batch off.
      is_mixed: whether batches may differ in their structure.
    """

    def __init__(
        self,
        strategy: Strategy,
        agreement: Agreement,
        say: Callable[[str], None],
        *,
        parts: int,
        is_mixed: bool,
    ):
        self.shapes: Batch | None = None
        """Of the latest first batch; None before there is one."""
        self.seconds = 0.0
        """What looking at first batches took."""
        self.is_looking = False
        """Whether it is at that, which may take long."""
        self._strategy, self._agreement, self._say = strategy, agreement, say
        self._parts, self._is_mixed = parts, is_mixed

    def take_from(self, source: Source) -> None:
        """Goes on with another source."""
        if source.has_data:
            check_divided(source.stream, self._strategy)
        self.source = source
        self.batch_size = 0
        """Examples in a regular batch, once that is known."""
        self.resident: Batch | None = None
        """The data, where it lies on the devices: the update gathers its batches there."""
        self._resident_shapes = ""
        self._feed: Feed | None = None
        self._of_rows: dict[int, Portion] = {}
        """Portions of resident data that were made before, by the number of their rows."""

    @property
    def has_looked(self) -> bool:
        """Whether the first batch was looked at."""
        return self._feed is not None

    def forget(self) -> None:
        """Has the next batch be looked at as the first one was."""
        self._feed, self._of_rows = None, {}

    def first_batch(self) -> Any:
        """The batch to be trained on next, which stays.

        Raises:
          ValueError: there is none.
        """
        fetched = self.source.peek()
        if not fetched:
            raise ValueError("The data holds no batches: there is nothing to train on.")
        return self.source.examples(fetched[0])

    # The callback is not kept: it would keep its owner, and with it a state, from being freed.

    def portions(self, items: Sequence[Any], inspect: Inspect) -> list[Portion]:
        """What the source gave, ready for the update; the first alone if they share no program."""
        portions = [self._portion(item, inspect) for item in items]
        is_alike = all(each.signature == portions[0].signature for each in portions[1:])
        return portions if is_alike else portions[:1]

    def given(self, batch: Any, inspect: Inspect) -> Portion:
        """A batch that is none of the source's, ready for the update."""
        if self._feed is None:
            fetched = self.source.peek() if self.source.has_data else []
            self._look_at(self.source.examples(fetched[0]) if fetched else batch, inspect)
        batch = normalize(batch)
        if _has_weights_by_output(batch) != _has_weights_by_output(self.shapes):
            raise ValueError(
                "Cannot train on this batch: it has weights by output, and those before have not, "
                "or the other way round. Give weights of 1 where there are none."
            )
        return self._given_feed(batch)

    def example(self, n: int | None, inspect: Inspect) -> Batch:
        """A batch of `n` examples (None: of a regular batch's), or of the next multiple of `parts`.

        All are zeros, whose memory is taken only where it is written to.
        """
        if self._feed is None:
            self.first_batch()
            self._portion(self.source.peek()[0], inspect)
        size = n or self.batch_size
        size += -size % self._parts
        return jax.tree.map(lambda x: np.zeros((size, *x.shape[1:]), x.dtype), self.shapes)

    def as_regular(self, batch: Batch) -> Portion:
        """A batch, ready for the update, as if all were of its size."""
        feed = Feed(
            self._strategy,
            pad=self._feed is not None and self._feed.pad,
            why_not="the task or its loss does not allow it",
            size=n_examples(batch),
            parts=self._parts,
        )
        return feed(batch)

    def _portion(self, item: Any, inspect: Inspect) -> Portion:
        """What the source gave at once, ready for the update."""
        feed = self._feed or self._look_at(self.source.examples(item), inspect)
        if not self.source.takes_rows:
            return feed(item)
        known = self._of_rows.get(len(item))
        if known is not None:
            # Only the rows differ: nothing has to be looked at again for each step.
            return Portion(known.strategy, Batch((item,), (), known.batch.weights), *known[2:])
        portion = feed(Batch((item,)))
        if self.resident is not None and portion.strategy is self._strategy:
            portion = own_rows(portion._replace(is_weighted=is_weighted(self.resident)))
            signature = (portion.signature, self._resident_shapes)
            portion = portion._replace(signature=signature, data=(self.resident,))
            if n_examples(portion.batch) == len(item):
                self._of_rows[len(item)] = portion
            return portion
        if knows_rows(self.source.stream):
            return own_examples(portion, self.source.stream.pick)
        # On fewer devices than hold the data.
        return self._remainder_feed(self.source.examples(item))

    def _look_at(self, item: Any, inspect: Inspect) -> Feed:
        """Looks at the first batch."""
        began, self.is_looking = time.perf_counter(), True
        try:
            self._feed = feed = self._feed_for(item, inspect)
        finally:
            self.is_looking = False
        self.seconds += time.perf_counter() - began
        return feed

    def _feed_for(self, item: Any, inspect: Inspect) -> Feed:
        """What brings batches like this first one into form."""
        batch = normalize(item)
        self.shapes = shapes_of(batch)
        source, stream = self.source, self.source.stream
        is_own = self._strategy.n_processes > 1 and not source.takes_rows
        if not is_own:
            self._agreement.data(source.stream_position())
        whole = stream.whole() if hasattr(stream, "whole") else None
        data = None if whole is None else normalize(whole)
        self._place(data if source.gathers else None)
        why_not = inspect(batch, data)
        # A first batch that is smaller than those of the stream is a remainder already.
        size = n_examples(batch)
        if not is_own:
            size = max(size, getattr(stream, "batch_size", 0))
        n = self.batch_size = self.batch_size or size
        options: dict[str, Any] = {
            "why_not": why_not,
            "parts": self._parts,
            "is_mixed": self._is_mixed,
        }
        self._remainder_feed = Feed(self._strategy, pad=False, size=n, **options)
        # Given batches may have any size: they are padded no further than to divide, or narrowed.
        self._given_feed = Feed(
            self._strategy,
            pad=not why_not,
            size=sys.maxsize if why_not else 1,
            is_own=self._strategy.n_processes > 1,
            **options,
        )
        # Where no batch can be another than the first one, all do without weights of 1. A class of
        # the user's own may make of the arrays what it likes.
        is_plain = type(stream) is ArrayStream
        is_even = is_plain and stream.is_even and n == stream.batch_size
        return Feed(
            self._strategy,
            pad=not why_not,
            size=n,
            is_own=is_own,
            is_even=is_even,
            say=self._say,
            **options,
        )

    def _place(self, data: Batch | None) -> None:
        """Places the data that batches are to be gathered from on the devices."""
        self.resident = None if data is None else self._strategy.place(data)
        leaves, structure = jax.tree.flatten(self.resident)
        # As a text, since each step looks its program up by it and a text keeps its hash.
        self._resident_shapes = repr((structure, *((leaf.shape, leaf.dtype) for leaf in leaves)))


def _has_weights_by_output(batch: Any) -> bool:
    return bool(weights_by_output(batch.targets))
