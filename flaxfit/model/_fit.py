"""What `fit` is made of: its epochs, their batches and lengths, and what it says at the start."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from flaxfit import display
from flaxfit.callbacks._progress import ENDLESS
from flaxfit.data import ArrayStream, as_stream, prefetch
from flaxfit.data._libraries import is_hugging_face, regular_size
from flaxfit.data._stream import pass_length
from flaxfit.loop._local_rows import knows_rows
from flaxfit.loop._train_loop import EndOfData, TrainLoop
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._checks import whole_number
from flaxfit.tree._types import Data


def check_numbers(
    verbose: Any,
    *,
    epochs: Any,
    batch_size: Any = None,
    steps_per_epoch: Any = None,
    steps_per_execution: Any = "auto",
) -> None:
    """Checks those arguments of `fit` that are numbers.

    >>> check_numbers(0, epochs=0)
    Traceback (most recent call last):
    ValueError: epochs must be 1 or more, got 0.
    """
    if verbose not in ("auto", 0, 1, 2):
        raise ValueError(f"verbose must be 'auto', 0, 1 or 2, got {verbose!r}.")
    optional = {"batch_size": batch_size, "steps_per_epoch": steps_per_epoch}
    counts = {"epochs": epochs, **{name: n for name, n in optional.items() if n is not None}}
    if steps_per_execution != "auto":
        counts["steps_per_execution"] = steps_per_execution
    for name, number in counts.items():
        whole_number(name, number, other="auto" if name == "steps_per_execution" else "")


def stream_of(
    data: Data,
    *,
    batch_size: int | None,
    shuffle: bool | None,
    seed: int,
    epochs: int,
    steps_per_epoch: int | None,
    n_before: int,
) -> Any:
    """The stream that `fit` trains on, of what `prepare` gave.

    Args:
      data: arrays as a tuple, or whatever `as_stream` takes.
      batch_size: as given to `fit`.
      shuffle: as given to `fit`.
      seed: of the random orders.
      epochs: as given to `fit`.
      steps_per_epoch: as given to `fit`: the data is repeated as often as these need it.
      n_before: how many epochs were trained before.

    Raises:
      ValueError: batches are given, and they were to be cut or shuffled.
    """
    if isinstance(data, tuple):
        size, shuffle = regular_size(batch_size), shuffle is not False
        stream = ArrayStream(*data, batch_size=size, shuffle=shuffle, seed=seed)
        stream.epoch = n_before
        return stream
    if shuffle is False and getattr(data, "shuffle", False) is True:
        raise ValueError(
            f"shuffle=False cannot be applied to a {type(data).__name__} that shuffles: set it "
            "where that is made."
        )
    shuffle = is_hugging_face(data) if shuffle is None else bool(shuffle)
    stream = as_stream(data, batch_size=batch_size, shuffle=shuffle, seed=seed)
    is_apart = steps_per_epoch is None and length_of(stream) is None
    if not hasattr(stream, "passes") or (stream is data and not is_apart):
        return stream
    n_passes = None if steps_per_epoch else epochs
    return stream.passes(n_passes, start=n_before, is_apart=is_apart)


def length_of(stream: Any) -> int | None:
    """The number of batches in a pass over a stream, where it is known.

    Raises:
      ValueError: it repeats for ever.
    """
    return pass_length(stream, "Give steps_per_epoch, or data that ends.")


def batches_of(stream: Any) -> Any:
    """The batches to train on, assembled ahead where they are assembled at all.

    None is assembled ahead where the data is on the devices already or its rows are parted between
    processes, nor of a generator: what was read ahead of it would be lost to later readers.
    """
    is_resident = getattr(stream, "resident", False) or knows_rows(stream)
    is_repeatable = getattr(stream, "is_repeatable", isinstance(stream, ArrayStream))
    return prefetch(stream) if is_repeatable and not is_resident else stream


def run_epochs(loop: TrainLoop, n_steps: int | None, epochs: int) -> Iterator[None]:
    """Trains for so many epochs, and stops after each; one of unknown length is one pass.

    Raises:
      ValueError: the data ended before.
    """
    if n_steps is None:
        yield from _run_passes(loop, epochs)
        return
    end = loop.first_checkpoint + (epochs - 1) * n_steps
    for checkpoint in loop.run_until(end, copy=False):
        del checkpoint  # A copy that a callback was given is not to be held while training.
        yield
    if loop.step < end and not loop.stopped:
        raise ValueError(
            f"The data ended after step {loop.step:,}, and {epochs} epochs of {n_steps:,} steps "
            f"end at step {end:,}. Give fewer steps_per_epoch or epochs, or data that lasts."
        )


def _run_passes(loop: TrainLoop, epochs: int) -> Iterator[None]:
    """Trains for so many passes over data of unknown length."""
    n_done, was_empty = 0, False
    while n_done < epochs:
        loop.first_checkpoint = loop.step + ENDLESS
        try:
            loop.next_checkpoint(copy=False)
        except EndOfData:
            if was_empty:
                raise ValueError(
                    f"The data ended after {n_done} of {epochs} epochs: give data that can be "
                    "passed over again, such as a list, a loader or a callable."
                ) from None
            was_empty = True  # A run may be resumed from the very end of a pass.
        else:
            n_done, was_empty = n_done + 1, False
            yield
            if loop.stopped:
                return
        if n_done < epochs:
            loop.data = loop.data


class Validation:
    """The callback that adds what a model's evaluation measures on data, with "val_" before it.

    Args:
      measure: `(state, data) -> metrics`.
      data: the validation data.
      adds: the metrics that it adds, as `EvalLoop.adds`.
    """

    borrows = True
    """It only reads what a checkpoint holds."""

    def __init__(
        self,
        measure: Callable[[Any, Any], dict[str, Any]],
        data: Data,
        adds: Mapping[str, str | None],
    ) -> None:
        self._measure, self._data, self.adds = measure, data, adds

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with the metrics of its state added."""
        measured = checkpoint.with_metrics(self._measure(checkpoint.state, self._data), "val_")
        return measured.replace(modes={**checkpoint.modes, **self.adds})


def first_line(
    name: str, loop: TrainLoop, stream: Any, validation_data: Any, n_steps: int | None
) -> str:
    """What is trained, on what and with what, as the first line says it."""
    params = loop.state_in_place.params
    return display.start_line(
        name,
        n_params=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        n_devices=len(loop.strategy.devices),
        platform=jax.default_backend(),
        batch_size=getattr(stream, "batch_size", None),
        n_train=getattr(stream, "n_examples", None),
        n_validation=getattr(validation_data, "n_examples", None),
        steps_per_epoch=n_steps,
    )
