"""Callback: the one hook of a training loop."""

from collections.abc import Callable, Mapping
from typing import Protocol

from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint
from flaxfit.tree import PyTree


class Callback(Protocol):
    """Anything that takes a checkpoint and returns it, a changed copy, or None (unchanged).

    Callbacks run in order; the next one, and then the user, receive what one returns. Those that
    return the checkpoint, as the built-in ones do, also compose with `redex.combinator.serial`.

    A callback may have two more methods. `attach(loop)` is called once when a loop with it in its
    `callbacks` is built. `close()` is called when training ends, for whatever reason. A callback
    whose state affects training is a `StatefulCallback`.

    A callback with the attribute `order = "last"` receives a checkpoint after the others, and is
    closed before them; one with `order = "first"` receives it before the others, is attached before
    the first batch is fetched, and is closed after them.

    A callback that ends training can say why in `endings`, a list of lines that `ProgressBar` shows
    at the end.

    A callback that only reads the checkpoint, and keeps none of its arrays, declares
    `borrows = True`: the loop then makes no copy for it.

    >>> def halve(checkpoint: Checkpoint) -> Checkpoint:
    ...     return checkpoint.with_metrics({"half": checkpoint.loss / 2})
    >>> callback: Callback = halve
    >>> callback(Checkpoint(step=1, state=None, metrics={"loss": 0.5})).metrics["half"]
    0.25
    """

    def __call__(self, checkpoint: Checkpoint, /) -> Checkpoint | None:
        """Reads, changes or stores what happened up to a step."""
        ...


class StatefulCallback(Callback, Protocol):
    """A callback whose state is saved and restored with each checkpoint.

    A `CheckpointFileWriter` among the callbacks saves it; a loop that resumes from the file
    restores it after `attach`.

    >>> class Count:
    ...     n = 0
    ...
    ...     def __call__(self, checkpoint: Checkpoint) -> None:
    ...         self.n += 1
    ...
    ...     def get_state(self) -> dict[str, int]:
    ...         return {"n": self.n}
    ...
    ...     def set_state(self, state: Mapping[str, int]) -> None:
    ...         self.n = state["n"]
    >>> callback: StatefulCallback = Count()
    """

    def get_state(self) -> dict[str, PyTree]:
        """Returns its state: JSON values by name, and arrays as fields of a training state.

        Such fields are "params", "model_state" or "opt_state", with the structure that they have in
        the state of the loop.
        """
        ...

    def set_state(self, state: Mapping[str, PyTree], /) -> None:
        """Restores what `get_state` returned."""
        ...


def attached(loop: TrainLoop | None, owner: str, use: str) -> TrainLoop:
    """Returns the loop of a callback; raises if it was not attached to one."""
    if loop is None:
        raise ValueError(f"{owner} must be in the callbacks of a loop, which it {use}.")
    return loop


def watch_metrics(
    loop: TrainLoop, every: int, look: Callable[[int, Mapping[str, float]], object]
) -> None:
    """Calls `look(step, running metrics)` every so many steps, at the end of a dispatch."""
    seen = loop.step

    def watch(step: int) -> None:
        nonlocal seen
        if step - seen >= every:
            seen = step
            look(step, loop.running_metrics())

    loop.on.after_dispatch.append(watch)


def first_epoch(loop: TrainLoop | None) -> int:
    """Returns the index of the first epoch of the `fit` that drives a loop, else 0."""
    return 0 if loop is None or loop.fit_call is None else loop.fit_call.first_epoch
