"""IterableStream: batches of anything that Python can iterate over, with a position."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from flaxfit.data._position import check_description, check_own, describe_batch
from flaxfit.display import say
from flaxfit.tree import Json, PyTree

_FIRST = "first_batch"


@dataclasses.dataclass(eq=False, repr=False)
class IterableStream:
    """Streams the batches of an iterable, for one or several passes.

    Its position is the iterator's own if that has `get_state` and `set_state`, as Grain's have;
    otherwise it counts the delivered batches and returns to a position by skipping.
    An iterator that raises and then stops is broken, not finished, and the stream says so.
    """

    open_pass: Callable[[int], Iterator[PyTree]]
    """`epoch -> iterator over its batches`; called when the first batch is needed."""
    _: dataclasses.KW_ONLY
    name: str = "data"
    """The data's name in messages."""
    once: bool = False
    """Whether all passes share one iterator, which can end only once."""
    epochs: int | None = 1
    """The number of passes; None repeats forever."""
    start: int = 0
    """The epoch of the first pass."""
    is_apart: bool = False
    """Whether the stream stops after each pass, and the next call begins a new pass."""
    n_batches: int | None = None
    """The number of batches in a pass, if known."""
    settings: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    """Other settings that the batches depend on; saved with a position, and compared on resume."""
    shared: bool = True
    """Whether the batches are the same in every process."""

    def __post_init__(self):
        known = {} if self.n_batches is None else {"n_batches": self.n_batches}
        self._description: dict[str, Json] = {"type": self.name, **known, **self.settings}
        self._rewind()

    @property
    def is_repeatable(self) -> bool:
        """Whether the data can be iterated again, so that reading ahead loses nothing."""
        return not self.once

    def __len__(self) -> int:
        """Returns the number of batches in an epoch, if the data knows it."""
        if self.n_batches is None:
            raise TypeError(f"A stream of {self.name} does not know its length.")
        return self.n_batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PyTree:
        while not self._is_over():
            if self._iterator is None:
                self._iterator = self.open_pass(self.epoch)
                self._keeps = _keeps_position(self._iterator)
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_pass()
                if self.is_apart:
                    raise
                continue
            except BaseException as error:
                self._error = error
                raise
            self._error = None
            if not self._delivered:
                self._description[_FIRST] = describe_batch(batch)
            self._delivered += 1
            self._empty = False
            return batch
        raise StopIteration

    def one_epoch(self) -> "IterableStream":
        """Returns a fresh stream of one pass over the same data."""
        return self.passes(1)

    def passes(
        self, epochs: int | None, *, start: int = 0, is_apart: bool = False
    ) -> "IterableStream":
        """Returns a fresh stream of passes over the same data."""
        return dataclasses.replace(self, epochs=epochs, start=start, is_apart=is_apart)

    def close(self) -> None:
        """Closes the open pass and returns to the beginning, if the data allows it."""
        if not self.once:
            self._rewind()

    def get_state(self) -> dict[str, Json]:
        """Returns the position after the last delivered batch, with a description of the data."""
        state: dict[str, Json] = {"delivered": self._delivered, "data": dict(self._description)}
        if self.start:
            state["start"] = self.start
        if self.is_apart or self._keeps:
            state["epoch"] = self.epoch
        if self._keeps:  # The iterator is None between two passes.
            position = None if self._iterator is None else self._iterator.get_state()
            state["iterator"] = position.decode() if isinstance(position, bytes) else position
        return state

    def set_state(self, state: dict[str, Json]) -> None:
        """Moves to a position that `get_state` gave, by skipping batches if necessary.

        Raises:
          ValueError: the position belongs to other or longer data, or to an earlier batch of an
            iterator that cannot go back.
        """
        check_own(state)
        if "delivered" not in state:
            raise ValueError(
                f"Cannot resume in a {self.name} from a position saved in other data, {state}."
            )
        n, saved = state["delivered"], state.get("data")
        self._check(saved)
        if self.start != state.get("start", 0):
            self.start = state.get("start", 0)
            self._rewind()
        if "iterator" in state:
            self._restore(state)
            return
        is_behind = n < self._delivered
        if is_behind and self.once:
            raise ValueError(
                f"Cannot go back from batch {self._delivered:,} to {n:,} of a {self.name}, which "
                "can be iterated only once: pass a callable that returns a new one."
            )
        # Reopen only if necessary: a random generator in the data has advanced, so a new pass may
        # have another order.
        if not self.once and (is_behind or self._error is not None):
            self._rewind()
        self._skip(n - self._delivered, saved)
        if self.epoch < state.get("epoch", 0):
            self._end_pass()

    def _restore(self, state: dict[str, Json]) -> None:
        """Restores a position that contains the iterator's own position."""
        self._rewind()
        self.epoch, self._delivered = state["epoch"], state["delivered"]
        self._keeps = True
        if state["iterator"] is None:
            return
        iterator: Any = self.open_pass(state["epoch"])
        if not _keeps_position(iterator):
            raise ValueError(
                f"Cannot resume in a {self.name}, which keeps no position of its own, from {state}."
            )
        saved = state.get("data")
        if saved is not None and _FIRST in saved and _FIRST not in self._description:
            for batch in itertools.islice(self.open_pass(self.start), 1):
                self._description[_FIRST] = describe_batch(batch)
            self._check(saved)
        position = state["iterator"]
        # Grain's DataLoader keeps its position as encoded JSON.
        iterator.set_state(position.encode() if isinstance(position, str) else position)
        self._iterator, self._empty = iterator, False

    def _skip(self, n: int, saved: Json) -> None:
        if n:
            say(f"skipping {n:,} batches of a {self.name} to where training was")
        before = self._delivered
        while self._delivered < before + n:
            try:
                next(self)
            except StopIteration:
                if not self._is_over():  # Only this pass is.
                    continue
                raise ValueError(
                    f"Cannot resume after batch {before + n:,} of a {self.name} that ends after "
                    f"{self._delivered:,}: the data is shorter than when the position was saved."
                ) from None
            if self._delivered == before + 1:
                self._check(saved)

    def _check(self, saved: Json) -> None:
        """Compares the saved description of the data with the current one, if both are known."""
        if saved is not None:
            is_known = _FIRST in self._description and _FIRST in saved
            check_description(saved, self._description, but_for=None if is_known else _FIRST)

    def _end_pass(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                f"A {self.name} stopped after it raised "
                f"{type(self._error).__name__}: {self._error}. Its data did not end: "
                "fix the error and start the stream again."
            ) from self._error
        if self._empty and self.once and self._delivered:
            raise ValueError(
                f"A {self.name} ended after {self._delivered:,} batches, but more were "
                "requested, and it can be iterated only once. For several passes, pass a list, a "
                "loader or a callable."
            )
        if self._empty:
            raise ValueError(
                f"A {self.name} gave no batches: it is empty, or an iterator that was consumed "
                "before. For several passes, pass a list, a loader or a callable."
            )
        self._iterator, self._empty = None, True
        self.epoch += 1

    def _is_over(self) -> bool:
        return self.epochs is not None and self.epoch >= self.start + self.epochs

    def _rewind(self) -> None:
        self.epoch = self.start
        """The number of completed passes; a pass completes when a batch after its last is due."""
        self._delivered = 0
        self._iterator: Any = None
        self._keeps = False
        self._empty = True
        self._error: BaseException | None = None


def _keeps_position(iterator: object) -> bool:
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
