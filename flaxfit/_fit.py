"""What `fit` is made of: its epochs, their batches and lengths, and what it says at the start."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from flaxfit import _display as display
from flaxfit._checkpoint import Checkpoint
from flaxfit._loop import EndOfData, TrainLoop
from flaxfit._own_rows import knows_rows
from flaxfit._whole_number import whole_number
from flaxfit.callbacks._progress import ENDLESS
from flaxfit.data import ArrayStream, prefetch


def check_numbers(
    verbose: Any,
    *,
    epochs: Any,
    batch_size: Any,
    steps_per_epoch: Any = None,
    steps_per_execution: Any = "auto",
) -> None:
    """Checks those arguments of `fit` that are numbers.

    >>> check_numbers(0, epochs=0, batch_size=32)
    Traceback (most recent call last):
    ValueError: epochs must be 1 or more, got 0.
    """
    if verbose not in ("auto", 0, 1, 2):
        raise ValueError(f"verbose must be 'auto', 0, 1 or 2, got {verbose!r}.")
    counts: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size}
    if steps_per_epoch is not None:
        counts["steps_per_epoch"] = steps_per_epoch
    if steps_per_execution != "auto":
        counts["steps_per_execution"] = steps_per_execution
    for name, number in counts.items():
        whole_number(name, number, other="auto" if name == "steps_per_execution" else "")


def pass_length(stream: Any) -> int | None:
    """The number of batches in a pass over a stream, where it is known.

    Raises:
      ValueError: it is without end.
    """
    try:
        n_steps = len(stream)
    except TypeError:
        return None
    if n_steps > ENDLESS:
        raise ValueError(
            f"Cannot tell where an epoch ends: the data gives {n_steps:,} batches, which is "
            "without end. Give steps_per_epoch, or data that ends."
        )
    return n_steps


def batches_of(stream: Any, n_steps: int | None) -> Any:
    """The batches to train on, assembled ahead where they are assembled at all.

    Where the length of a pass is unknown they are those of a single pass. None is assembled ahead
    where the data is on the devices already or its rows are parted between processes, nor of a
    generator: what was read ahead of it would be lost to whoever goes on with it.
    """
    is_whole = n_steps is not None or not hasattr(stream, "one_epoch")
    batches = stream if is_whole else stream.one_epoch()
    is_resident = getattr(batches, "resident", False) or knows_rows(batches)
    is_repeatable = getattr(batches, "is_repeatable", isinstance(batches, ArrayStream))
    return prefetch(batches) if is_repeatable and not is_resident else batches


def run_epochs(loop: TrainLoop, stream: Any, n_steps: int | None, epochs: int) -> Iterator[None]:
    """Trains for so many epochs, and stops after each; one of unknown length is one pass.

    It keeps no checkpoint: what somebody holds on to would be copied before the next step.
    """
    if n_steps is not None:
        for checkpoint in loop.run_until(loop.first_checkpoint + (epochs - 1) * n_steps):
            del checkpoint
            yield
        return
    for epoch in range(epochs):
        if epoch:
            loop.data = batches_of(stream, None)
        loop.first_checkpoint = loop.step + ENDLESS
        try:
            loop.next_checkpoint()
        except EndOfData:
            continue  # This pass held nothing.
        yield
        if loop.stopped:
            return


def validating(
    measure: Callable[[Any, Any], dict[str, Any]], data: Any
) -> Callable[[Checkpoint], Checkpoint]:
    """The callback that adds what is measured on data: `(state, data) -> metrics`."""

    def validate(checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint.with_metrics(measure(checkpoint.state, data), "val_")

    return validate


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
