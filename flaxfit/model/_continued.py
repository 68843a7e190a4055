"""What a run continues from: the state of a checkpoint, or that of another optimizer."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import optax

from flaxfit import checkpoints
from flaxfit.display import say
from flaxfit.optim._extended import continued_state, first_state
from flaxfit.optim._generations import Late, to_json
from flaxfit.optim._plain_rate import live_rate, matched
from flaxfit.state._train_state import TrainState, with_opt_state
from flaxfit.task._task import TrainTask
from flaxfit.tree._types import PyTree


class StateReader:
    """Reads only the state of a checkpoint, with which a run of its own begins.

    Args:
      reader: reads the checkpoint.
      loaded: its state, whose optimizer's state has no types yet.
      task: the task to continue with, if it is another one than what wrote the checkpoint.
      writers: tasks that may have written it.
      is_same, quiet: as in `continued`.
    """

    def __init__(
        self,
        reader: checkpoints.CheckpointFileReader,
        loaded: TrainState,
        task: TrainTask | None = None,
        writers: Sequence[TrainTask] = (),
        is_same: bool = True,
        quiet: bool = True,
    ):
        self.target, self.loaded = reader.target, loaded
        self._reader, self._task, self._writers = reader, task, writers
        self._is_same, self._quiet = is_same, quiet
        self._state: TrainState | None = None
        self.late: Late | None = None
        """The parameters that were unfrozen later, once the state of another task was read."""

    def followed_by(
        self, task: TrainTask, before: TrainTask, is_same: bool, quiet: bool
    ) -> "StateReader":
        """Returns a reader for a task that takes the place of the one before."""
        is_same, quiet = self._is_same and is_same, self._quiet and quiet
        writers = [*self._writers, before]
        return StateReader(self._reader, self.loaded, task, writers, is_same, quiet)

    def read(self, template: PyTree) -> checkpoints.CheckpointFile | None:
        """Reads the checkpoint without its history, position and callbacks."""
        found = self._read(template)
        if found is None:
            return None
        state, running = found.state, None
        if self._task is not None:
            options = {"is_same": self._is_same, "quiet": self._quiet}
            state, self.late = continued(state, self._task, **options)
            running = {"late": to_json(self.late)}
        return checkpoints.CheckpointFile(
            step=found.step, state=state, metrics=found.metrics, running=running, path=found.path
        )

    @property
    def state(self) -> TrainState:
        """The state that a run will begin with."""
        if self._task is None:
            return self.loaded
        if self._state is None:
            template = self.loaded.replace_optimizer(self._task.optimizer)
            quiet = StateReader(self._reader, self.loaded, self._task, self._writers, self._is_same)
            found = quiet.read(template)
            self._state = self.loaded if found is None else found.state
            self.late = quiet.late
        return self._state

    def _read(self, template: PyTree) -> checkpoints.CheckpointFile | None:
        try:
            return self._reader.read(template)
        except ValueError:
            for optimizer in self._others():
                with contextlib.suppress(ValueError):
                    return self._reader.read(_for_optimizer(template, optimizer))
            if self._is_same or not isinstance(template, TrainState):
                raise
            return self._read_weights(template)

    def _read_weights(self, template: TrainState) -> checkpoints.CheckpointFile | None:
        """Reads a checkpoint of an unknown optimizer, and leaves that optimizer's state out."""
        found, whole = self._reader.read(template.for_inference()), self._reader.read()
        if found is None or whole is None:
            return None
        step, params, model_state = found.state.step, found.state.params, found.state.model_state
        state = TrainState(step, params, (), model_state, whole.state.key, found.state.axes)
        return checkpoints.CheckpointFile(
            step=found.step, state=state, metrics=found.metrics, path=found.path
        )

    def _others(self) -> Iterator[Any]:
        """Yields the optimizers that may have written the checkpoint."""
        for task in [*self._writers, *([self._task] if self._task else [])]:
            yield task.optimizer
            if task.step is None and (live := live_rate(task.optimizer)) is not None:
                yield live


def continued(
    state: TrainState, task: TrainTask, *, is_same: bool, quiet: bool = False
) -> tuple[TrainState, Late]:
    """Returns a state for the optimizer of a task, which is another one or has other options.

    Also returns the parameters that were unfrozen later. Says what of the optimizer's state is
    kept, unless nothing was trained.

    Args:
      state: the present state.
      task: the task to continue with.
      is_same: whether the user's optimizer is the one of the state, whose hyperparameters stay.
      quiet: whether to say nothing: only `freeze` was set, which keeps all that it can.
    """
    optimizer = task.optimizer
    if task.step is None:  # The rate of a plain optimizer may have been moved into the state.
        optimizer, _ = matched(optimizer, state.opt_state)
    opt_state, is_kept, late = continued_state(
        state.opt_state, optimizer, state.params, state.model_state, is_same=is_same
    )
    if int(state.step) and not quiet:
        kept = "the weights and the optimizer state are kept"
        if not is_same and (count := _place_in_schedule(opt_state)):
            kept += f"; its schedule continues at step {count:,}"
        fresh = "the weights are kept; the optimizer state differs and starts from scratch"
        say(f"compiled at step {int(state.step):,}: {kept if is_kept else fresh}")
    return with_opt_state(state, opt_state), late


def _place_in_schedule(opt_state: PyTree) -> int:
    """The number of steps that the schedule of an optimizer has taken; 0 if it has none."""

    def is_schedule(node: object) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    nodes = jax.tree.leaves(opt_state, is_leaf=is_schedule)
    return max((int(node.count) for node in nodes if is_schedule(node)), default=0)


def _for_optimizer(state: TrainState, optimizer: Any) -> TrainState:
    return with_opt_state(
        state,
        jax.eval_shape(functools.partial(first_state, optimizer), state.params, state.model_state),
    )
