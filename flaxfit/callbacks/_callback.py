"""Callback: the one hook of a training loop; Loop: the part of a loop that callbacks use."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from flaxfit.checkpoints import CheckpointFile
from flaxfit.state import Checkpoint, FitCall, Observers, TrainState
from flaxfit.strategies import Strategy
from flaxfit.tree import ArrayLike, PyTree


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


class Loop(Protocol):
    """The part of `TrainLoop` that the callbacks of the library use."""

    on: Observers
    """The observers that it calls besides its callbacks."""
    fit_call: FitCall | None
    """The call of `fit` that drives it; None in your own loop."""

    @property
    def callbacks(self) -> Iterable[Any]: ...

    @property
    def freeze(self) -> Sequence[str]: ...

    @freeze.setter
    def freeze(self, patterns: Sequence[str], /) -> None: ...

    @property
    def norms(self) -> Sequence[str]: ...

    @norms.setter
    def norms(self, patterns: Sequence[str], /) -> None: ...

    @property
    def step(self) -> int: ...

    @property
    def start(self) -> CheckpointFile | None:
        """The checkpoint file that the run was restored from."""
        ...

    @property
    def n_steps(self) -> int | None: ...

    @property
    def n_steps_per_checkpoint(self) -> int: ...

    @property
    def steps_per_call(self) -> Any:
        """An int; pyright adds the types that `TrainLoop` can set it to."""
        ...

    @property
    def strategy(self) -> Strategy: ...

    @property
    def state(self) -> TrainState: ...

    @property
    def state_in_place(self) -> TrainState: ...

    @property
    def revision(self) -> tuple[int, ...]: ...

    @property
    def hyperparams(self) -> dict[str, PyTree]: ...

    @property
    def input_shapes(self) -> PyTree: ...

    @property
    def phase(self) -> str: ...

    def set_hyperparams(self, *, group: str | int | None = None, **values: ArrayLike) -> None: ...

    def running_metrics(self) -> dict[str, float]: ...

    def step_cost(self, batch_size: int, /) -> Any:
        """Returns a `StepCost`; `Any`, as callbacks may not import `step`."""
        ...

    def snapshot(self) -> Checkpoint | None: ...

    def restore(self, state: TrainState, /) -> None: ...

    def finish(self) -> None: ...


def attached(loop: Loop | None, owner: str, use: str) -> Loop:
    """Returns the loop of a callback; raises if it was not attached to one."""
    if loop is None:
        raise ValueError(f"{owner} must be in the callbacks of a loop, which it {use}.")
    return loop


def first_epoch(loop: Loop | None) -> int:
    """Returns the index of the first epoch of the `fit` that drives a loop, else 0."""
    return 0 if loop is None or loop.fit_call is None else loop.fit_call.first_epoch
