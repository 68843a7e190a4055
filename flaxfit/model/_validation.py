"""Validation: measures validation data after some or all epochs of `fit`."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flaxfit.data._libraries import is_hugging_face
from flaxfit.data._stream import is_read_once
from flaxfit.loop import EvalLoop, TrainLoop
from flaxfit.model._streams import in_order, known_length
from flaxfit.state import Checkpoint, TrainState
from flaxfit.tree import Data, Json, PyTree, whole_number


def epochs_of(validation_freq: Any) -> Callable[[int], bool]:
    """Returns the epochs to validate: every n-th, or those in a collection, counted from 1.

    >>> [epoch for epoch in range(1, 7) if epochs_of(3)(epoch)]
    [3, 6]
    """
    is_text = isinstance(validation_freq, str | bytes | Mapping)
    if is_text or not isinstance(validation_freq, Iterable):
        every = whole_number("validation_freq", validation_freq, other="a collection of epochs")
        return lambda epoch: epoch % every == 0
    among = {whole_number("an epoch in validation_freq", epoch) for epoch in validation_freq}
    return among.__contains__


class Validation:
    """A callback that measures validation data, and adds the metrics as "val_<metric>".

    `is_given`: the batch size was given for this data, which is an error for batches.
    """

    borrows = True
    """It only reads the checkpoint."""

    def __init__(
        self,
        evaluator: EvalLoop,
        averaged: Callable[[TrainState], TrainState],
        data: Data,
        *,
        batch_size: int | None,
        is_given: bool,
        n_steps: int | None,
        is_due: Callable[[], bool],
    ):
        if isinstance(data, tuple) or is_hugging_face(data) or is_given:
            data = in_order(data, batch_size)
        # A shallow copy: both share compiled programs.
        self._evaluator = copy.copy(evaluator)
        self._evaluator.n_steps = n_steps
        self._averaged, self.data, self._n_steps, self._is_due = averaged, data, n_steps, is_due
        self.adds = evaluator.adds
        """The metrics that it adds; see `EvalLoop.adds`."""
        self.adds_more = evaluator.adds_more

    def attach_to(self, loop: TrainLoop) -> None:
        """Validates the first batch before the first epoch, unless the data is a generator."""
        self._evaluator.attach(loop)
        self._loop = loop
        n = None if is_read_once(self.data) else known_length(self.data)
        self._is_said = False
        if n is not None:
            self._say_if_shorter(n)
        if hasattr(self.data, "one_epoch") or not isinstance(self.data, Iterator):
            self._evaluator.check(loop.state_in_place, self.data, in_phase=loop.in_phase)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint with the metrics of its state added."""
        if not self._is_due():
            return checkpoint
        for start in self._loop.on.before_validation:
            start()
        state, n_measured = self._averaged(checkpoint.state), []
        metrics = self._evaluator.measure(state, self._batches(), watch=n_measured.append)
        self._say_if_shorter(len(n_measured))
        return checkpoint.with_metrics(metrics, "val_").replace(
            modes={**checkpoint.modes, **self.adds}
        )

    def _batches(self) -> Data:
        return self.data

    def _say_if_shorter(self, n: int) -> None:
        """Prints, once, that the data has fewer batches than requested."""
        if not self._is_said and self._n_steps is not None and n < self._n_steps:
            self._is_said = True
            self._loop.say(f"validation_steps={self._n_steps:,}: all {n:,} batches are measured")


class GeneratorValidation(Validation):
    """Like `Validation`, on the next `n_steps` batches of a generator at each measurement."""

    _n_read = 0

    def get_state(self) -> dict[str, Json]:
        """Returns the number of batches read so far."""
        return {"n_read": self._n_read}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Skips the batches that were read before."""
        n = state["n_read"] - self._n_read
        for _ in itertools.islice(self.data, n):
            self._n_read += 1

    def _batches(self) -> Iterator[PyTree]:
        n = 0
        for batch in itertools.islice(self.data, self._n_steps):
            n, self._n_read = n + 1, self._n_read + 1
            yield batch
        if self._n_steps is not None and n < self._n_steps:
            raise ValueError(
                f"validation_data ended after {self._n_read:,} batches, {n} of the "
                f"validation_steps={self._n_steps} of this epoch: pass data that can be iterated "
                "again, such as arrays, a list or a loader, or fewer validation_steps."
            )


def validation_of(data: Data, *, n_times: int, n_steps: int | None, **options: Any) -> Validation:
    """Makes a `Validation` that measures `n_times`."""
    is_generator = is_read_once(data)
    if is_generator and n_steps is None and n_times > 1:
        raise ValueError(
            f"validation_data is a {type(data).__name__}, which can be iterated only once, but is "
            f"measured after {n_times} epochs: pass arrays, a list of batches, a loader or a "
            "callable that returns a new one; or validation_steps, to read on in each epoch."
        )
    kind = GeneratorValidation if is_generator else Validation
    return kind(data=data, n_steps=n_steps, **options)
