"""Feed: turns the items of a stream into arguments of compiled programs, on the devices."""

import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flaxfit.data import ArrayStream, one_pass
from flaxfit.data._batch import Batch, has_rows, n_examples, normalize
from flaxfit.data._roles import NO_ROLES
from flaxfit.data._stream import pass_length
from flaxfit.loop._assembly import Assembler, Loaded
from flaxfit.loop._cursor import Cursor
from flaxfit.loop._local_rows import check_divided, knows_rows, local_examples, local_rows
from flaxfit.loop._padding import Padder, PreparedBatch, may_be_whole
from flaxfit.step import check_weights_of
from flaxfit.strategies import Strategy
from flaxfit.task import EvalTask
from flaxfit.tree import Data, PyTree, shapes_of

_MOST_TO_COPY = 2**28  # Bytes.


class Feed:
    """Pads, stacks and splits the batches of a stream, or single batches from the user.

    The owner calls `begin` with a first batch, validates that batch, and calls `decide` with the
    outcome, which fixes how all batches are padded or split.

    Args:
      strategy: the devices.
      form: converts an item with columns into a batch.
      parts: the number of parts that a device computes its rows of a batch in.
      is_mixed: whether batches may have different structures.
      is_whole: whether a batch may be any pytree; see `may_be_whole`.
      drops_weights: whether batches of equal size get no weights of 1, but a program without them.
      say: prints a notice.
    """

    def __init__(
        self,
        strategy: Strategy,
        form: Callable[[PyTree], PyTree] = NO_ROLES,
        *,
        parts: int = 1,
        is_mixed: bool = False,
        is_whole: bool = False,
        drops_weights: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.shapes: Batch | None = None
        """Shapes and dtypes of the latest first batch; None before `begin`."""
        self.is_whole = is_whole
        self._strategy, self._form, self._say = strategy, form, say
        self._parts, self._is_mixed, self._drops_weights = parts, is_mixed, drops_weights

    def take_from(self, cursor: Cursor) -> None:
        """Switches to another cursor."""
        if cursor.has_data:
            check_divided(cursor.stream, self._strategy)
        self.cursor = cursor
        self.is_process_local = self._strategy.n_processes > 1 and not cursor.takes_rows
        """Whether the stream yields only this process's rows of each batch."""
        self.batch_size = 0
        """The number of examples in a regular batch; 0: unknown."""
        self.resident: Batch | None = None
        """The data on the devices, if the update gathers batches from it."""
        self._resident_shapes = ""
        self.forget()

    def forget(self) -> None:
        """Forgets the first batch; the next one is validated."""
        self.is_decided = False
        """Whether `decide` was called."""
        self.is_decided_for_given = False
        """Whether `decide_given` was called."""
        self._assemble, self._assemble_given = Assembler(), Assembler()

    # The first batch.

    def first(self) -> list[PyTree]:
        """Returns the next batch without committing it; an empty list at the end of the data."""
        return [self.examples(item) for item in self.cursor.peek()]

    def whole(self) -> Batch | None:
        """Returns all examples as one batch; None if the stream cannot give them."""
        whole = self.cursor.whole()
        return None if whole is None else normalize(self._form(whole))

    def begin(self, item: PyTree, data: Batch | None = None) -> Batch:
        """Normalizes the first batch; later batches are expected to have its shapes.

        Args:
          item: the first batch.
          data: all data, if available, to place on the devices if the stream is resident.
        """
        batch, stream = normalize(item, is_whole=self.is_whole), self.cursor.stream
        self.shapes = shapes_of(batch)
        self._place(_rounded(data, stream.batch_size) if self.cursor.gathers and data else None)
        # A resumed stream may begin with the remainder of an epoch: do not take it for regular.
        size = n_examples(batch)
        if not self.is_process_local:
            size = max(size, getattr(stream, "batch_size", 0))
        n = self.batch_size = self.batch_size or size
        # If all batches have the size of the first, none needs weights of 1. A subclass of
        # `ArrayStream` may change the arrays.
        self._is_even = type(stream) is ArrayStream and stream.is_even and n == stream.batch_size
        n_parts = self._strategy.n_devices * self._parts
        self.may_pad = not self._is_even or n % n_parts > 0
        """Whether a batch may have to be padded."""
        return batch

    def decide(self, why_not: str, examine: Callable[[Batch], str] | None = None) -> None:
        """Fixes how batches are treated: padded, or only split if `why_not` gives a reason.

        `examine` returns the reason for a batch whose rows have other shapes, such as longer
        sequences: the model may mix these.
        """
        self.why_not, self._examine = why_not, examine
        self.may_pad |= bool(why_not)  # The reason then holds for given batches, too.
        n, is_even = self.batch_size, self._is_even and self._drops_weights
        self._remainder_padder = self._make(why_not or "it is a remainder", size=n)
        is_local = self.is_process_local
        options = {"is_process_local": is_local, "is_even": is_even, "say": self._say}
        self._padder = self._make(why_not, size=n, **options)
        self._padders = {_form_of(self.shapes): self._padder}
        self._make_padder = functools.partial(self._make, size=n, **options)
        self.is_decided = True

    # Batches of the stream.

    def batches(self, *, as_views: bool) -> Iterator[tuple[PyTree, Loaded]]:
        """Iterates over the items of one pass, each with its batch on the devices.

        `as_views` is that of `Cursor.remaining`.
        """
        form = NO_ROLES if self.cursor.takes_rows else self._form
        for item in self.cursor.remaining(as_views=as_views):
            yield item, self._assemble.one(form(item), self._prepare)

    def load(self, items: Sequence[PyTree]) -> Loaded:
        """Loads the batches of fetched items; only the first if they need different programs."""
        if not self.cursor.takes_rows:
            items = [self._form(item) for item in items]
        return self._assemble(items, self._prepare)

    def prepare(self, item: PyTree) -> PreparedBatch:
        """Pads or cuts the batch of a fetched item to a size that can be split."""
        return self._prepare(item if self.cursor.takes_rows else self._form(item))

    def padded(self, batch: Batch) -> Batch:
        """Pads a batch like those of the stream."""
        return self._padder(batch).batch

    def examples(self, item: PyTree) -> PyTree:
        """Returns the batch of a fetched item; the global batch if it holds row numbers."""
        return self._form(self.cursor.examples(item))

    def _prepare(self, item: PyTree) -> PreparedBatch:
        if not self.cursor.takes_rows:
            batch = normalize(item, is_whole=self.is_whole)
            return self._padder_of(batch, self._padders, self._make_padder)(batch)
        prepared = self._padder(Batch((item,)))
        if self.resident is not None and prepared.strategy is self._strategy:
            prepared = local_rows(prepared._replace(is_weighted=self.resident.weights is not None))
            signature = (prepared.signature, self._resident_shapes)
            return prepared._replace(signature=signature, data=(self.resident,))
        if knows_rows(self.cursor.stream):
            return local_examples(prepared, self.examples)
        # A remainder runs on fewer devices than the data is placed on, so it is gathered here.
        return self._remainder_padder(self.examples(item))

    def _padder_of(
        self, batch: Batch, known: dict[tuple[Hashable, ...], Padder], make: Callable[[str], Padder]
    ) -> Padder:
        """Returns the padder for batches whose rows have the shapes of this one's."""
        if (form := _form_of(batch)) not in known:
            first = next(iter(known.values()))
            if self._examine is None or form[0] != next(iter(known))[0]:
                return first  # It raises an error for another structure.
            why_not = self._examine(batch)
            alike = (each for each in known.values() if each.why_not == why_not)
            known[form] = next(alike, None) or make(why_not)
        return known[form]

    def without_padding(self, outputs: PyTree, n: int) -> PyTree:
        """Cuts joined outputs to `n` rows, or to `n` of each process if `is_process_local`."""
        if not self.is_process_local:
            return jax.tree.map(lambda rows: rows[:n], outputs)
        n_devices = self._strategy.n_devices
        parts = n_devices // len(range(n_devices)[self._strategy.rows(n_devices)])

        def cut(rows: np.ndarray) -> np.ndarray:
            each = rows.reshape(parts, -1, *rows.shape[1:])[:, :n]
            return each.reshape(-1, *rows.shape[1:])

        return jax.tree.map(cut, outputs)

    # Single batches from the user.

    def given(self, item: PyTree) -> Batch:
        """Normalizes a batch from outside the stream, and checks its weights."""
        batch, shapes = normalize(item, is_whole=self.is_whole), self.shapes
        is_by_output = shapes is not None and isinstance(shapes.weights, Mapping)
        if isinstance(batch.weights, Mapping) != is_by_output:
            raise ValueError(
                "Cannot train on this batch: either it or the earlier batches have weights by "
                "output. Pass weights of 1 where there are none."
            )
        if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch.weights)):
            check_weights_of(batch, "This batch")  # Reading device arrays would wait for them.
        return batch

    def decide_given(self, why_not: str, batch: Batch) -> None:
        """Like `decide`, for given batches, which are padded only to a multiple of the devices."""
        self._given_padders = {_form_of(batch): self._make_given(why_not)}
        self.is_decided_for_given = True

    def _make_given(self, why_not: str) -> Padder:
        size, is_local = sys.maxsize if why_not else 1, self._strategy.n_processes > 1
        return self._make(why_not, size=size, is_process_local=is_local)

    def load_given(self, item: PyTree) -> Loaded:
        """Loads a batch from outside the stream."""

        def prepare(item: PyTree) -> PreparedBatch:
            batch = self.given(item)
            return self._padder_of(batch, self._given_padders, self._make_given)(batch)

        return self._assemble_given.one(item, prepare)

    # Batches for the cost of a step.

    def example(self, n: int | None) -> Batch:
        """Returns a batch of zeros with `n` examples, rounded up to a multiple of `parts`.

        None: the regular size. The system allocates the memory of zeros only when it is written.
        """
        size = n or self.batch_size
        size += -size % self._parts
        shapes: Any = self.shapes
        if not has_rows(shapes):
            if n is not None:
                raise ValueError(
                    "The arrays of a batch have different lengths, so a batch of another size "
                    "cannot be derived from it."
                )
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        return jax.tree.map(lambda x: np.zeros((size, *x.shape[1:])[: x.ndim], x.dtype), shapes)

    def as_regular(self, batch: Batch) -> PreparedBatch:
        """Prepares a batch as if its size were the regular one."""
        return self._make(self.why_not and "the task or its loss does not allow it")(batch)

    def _make(self, why_not: str, **options: Any) -> Padder:
        return Padder(
            self._strategy,
            pad=not why_not,
            why_not=why_not,
            parts=self._parts,
            is_mixed=self._is_mixed,
            is_whole=self.is_whole,
            **options,
        )

    def _place(self, data: Batch | None) -> None:
        """Places resident data on the devices."""
        self.resident = None if data is None else self._strategy.place(data)
        leaves, structure = jax.tree.flatten(self.resident)
        # A string, since it is part of the key of each step, and Python caches its hash.
        self._resident_shapes = repr((structure, *((leaf.shape, leaf.dtype) for leaf in leaves)))


def feed_of_pass(
    data: Data,
    n_steps: int | None,
    task: EvalTask,
    strategy: Strategy,
    form: Callable[[PyTree], PyTree],
    *,
    endless: str,
) -> Feed:
    """Makes the feed of one pass over data, for `n_steps` batches; None: all.

    Raises:
      ValueError: `n_steps` is None and the data has no end; the message ends with `endless`.
    """
    stream = one_pass(data)
    if n_steps is None:
        pass_length(stream, endless)
    feed = Feed(strategy, form, is_whole=may_be_whole(task, strategy))
    feed.take_from(Cursor(stream, is_trained_on=False))
    return feed


def _form_of(batch: Batch | None) -> tuple[Hashable, ...]:
    """Returns a key that batches share if they differ only in their numbers of rows."""
    leaves, structure = jax.tree.flatten((batch or Batch(()))[:2])
    return structure, *((np.shape(leaf)[1:], leaf.dtype) for leaf in leaves)


def _rounded(data: Batch, batch_size: int) -> Batch:
    """Pads data to full batches with unused rows: data of similar size then shares programs."""
    leaves, n_more = jax.tree.leaves(data), -n_examples(data) % batch_size
    is_on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    if not n_more or not is_on_host or sum(leaf.nbytes for leaf in leaves) > _MOST_TO_COPY:
        return data
    return jax.tree.map(
        lambda x: np.concatenate([x, np.zeros((n_more, *x.shape[1:]), x.dtype)]), data
    )
