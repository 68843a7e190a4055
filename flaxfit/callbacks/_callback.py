"""Callback: the one hook of a training loop, and what a loop offers to a callback."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._types import PyTree


class Callback(Protocol):
    """Anything that takes a checkpoint and returns it, a changed copy, or None (unchanged).

    Callbacks run in their order; what one returns is what the next one and the user get. Return
    the checkpoint, as the built-in ones do, and `redex.combinator.serial` composes them too.

    A callback may have two more methods. `attach(loop)` is called once when a loop that has it
    in its `callbacks` is built. `close()` is called when training ends, however it ends. One that
    remembers something which changes what training does is a `StatefulCallback`.

    A callback with the attribute `order = "last"` gets a checkpoint after the others, and is closed
    before them; one with `order = "first"` gets it before the others, is attached before the first
    batch is fetched, and is closed after them.

    A callback that only reads the checkpoint, and keeps none of its arrays, says so by the
    attribute `borrows = True`: the loop then makes no copy for it.

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
    """A callback whose memory is saved with each checkpoint and restored with it.

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
        """What it remembers: values of JSON by name, and arrays as fields of a training state.

        Such fields are "params", "model_state" or "opt_state", with the structure that they have in
        the state of the loop.
        """
        ...

    def set_state(self, state: Mapping[str, PyTree], /) -> None:
        """Restores what `get_state` returned."""
        ...


class Loop(Protocol):
    """What a callback that is attached to a training loop may use of it."""

    watchers: list[Callable[[int], None]]
    """Functions of the step, called after each dispatch; they must not read arrays."""

    dispatch_watchers: list[Callable[[int], None]]
    """As `watchers`, for functions that need not see each step."""

    starters: list[Callable[[int], None]]
    """Functions of the step, called before the first step after each checkpoint."""

    @property
    def step(self) -> int:
        """How many updates were done."""
        ...

    @property
    def start(self) -> Any:
        """The checkpoint file that the run was restored from, or None."""
        ...

    @property
    def n_steps(self) -> int | None:
        """Where training ends; None: with the data."""
        ...

    @property
    def n_steps_per_checkpoint(self) -> int:
        """How many steps lie between two checkpoints."""
        ...

    @property
    def state(self) -> PyTree:
        """A safe copy of the training state."""
        ...

    @property
    def revision(self) -> tuple[int, ...]:
        """What no other state of this loop shares."""
        ...

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The optimizer's hyperparameters by name, or by group and name."""
        ...

    def set_hyperparams(self, *, group: str | int | None = None, **values: Any) -> None:
        """Sets hyperparameters from the next step on."""
        ...

    def finish(self) -> None:
        """Ends the run with the step that is being taken; see `TrainLoop.finish`."""
        ...

    def restore(self, state: PyTree, /) -> Any:
        """Goes on from another state."""
        ...

    @property
    def phase(self) -> str:
        """What it is at: "training", "preparing", "callbacks" or ""; see `TrainLoop.phase`."""
        ...

    @property
    def callbacks(self) -> Any:
        """All callbacks of the loop."""
        ...

    def owned(self, checkpoint: Checkpoint, /) -> Checkpoint:
        """The checkpoint with copies of what it borrows."""
        ...

    def snapshot(self) -> Checkpoint | None:
        """A checkpoint of this very moment, if one can be made; see `TrainLoop.snapshot`."""
        ...

    def running_metrics(self) -> dict[str, float]:
        """The means since the last checkpoint; waits for the device."""
        ...
