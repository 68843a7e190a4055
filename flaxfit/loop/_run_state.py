"""RunState: what a training loop holds, and what can be read of it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from flaxfit.data._batch import normalize
from flaxfit.display import quiet
from flaxfit.loop._callback_list import Delivery, as_tuple, unfreezes
from flaxfit.loop._determinism import say_if_inexact
from flaxfit.loop._initial_state import as_checkpoint, check_same_arrays, check_trains, start
from flaxfit.loop._ownership import Copier, owned
from flaxfit.loop._placed_companions import PlacedCompanions
from flaxfit.loop._record import make_checkpoint, set_running
from flaxfit.loop._step_cost import step_cost, step_memory
from flaxfit.loop._stepper import Stepper
from flaxfit.loop._stopwatch import Stopwatch
from flaxfit.loop._tuning import match, set_late
from flaxfit.optim._extended import late_of
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.state._train_state import TrainState
from flaxfit.step._cost import StepCost
from flaxfit.strategies._eager import eagerly
from flaxfit.tree._context_mesh import without_mesh
from flaxfit.tree._types import PyTree


class RunState:
    """The part of `TrainLoop` that holds its state: reading, copying and restoring it."""

    epoch_number: Callable[[], int] | None = None
    """Returns the number of the present epoch of `fit`."""
    fit_steps: int | None = None
    """The steps of the call of `fit`, those before it was resumed included, if they are known."""
    start: Any = None
    """The checkpoint file that the run was restored from, or None."""
    stopped: bool = False
    """Whether a callback has ended the run; setting `data` restarts it."""
    say: Callable[[str], None]
    """Prints a notice, unless the loop was made with `stdout=False`."""
    _stepper: Stepper
    _copy: Copier | None
    """Copies what a checkpoint borrows; None with `snapshot="none"`."""
    _due: Delivery | None = None
    """A checkpoint that some callbacks have not seen yet."""
    _last: Checkpoint | None = None
    """The latest checkpoint, without its arrays."""
    _watch: Stopwatch
    """The time of the steps since the latest checkpoint."""
    _phase: str = ""
    _first_step: int
    """The step at which the loop began, or was restored."""
    _is_talking: bool
    _is_at_start: bool = True
    """Whether nothing has happened since construction: no training, `restore` or other data."""

    @property
    def step(self) -> int:
        """The number of completed updates."""
        return self._stepper.step

    @property
    def n_completed_steps(self) -> int:
        """The number of updates since the previous checkpoint."""
        return self._stepper.tally.n_steps

    @property
    def state(self) -> TrainState:
        """The training state: an unreplicated copy, which stays valid."""
        copy = self._copy or self._stepper.strategy.collect
        # A function that JAX traces may ask for it.
        with self._stepper.interrupts.held(), jax.ensure_compile_time_eval():
            return copy(self._stepper.state)

    @property
    def state_in_place(self) -> TrainState:
        """The training state in place on the devices, not copied: the next step donates it."""
        return self._stepper.state

    @property
    def _companions(self) -> PlacedCompanions:
        """The companions of the task, in place on the devices."""
        return self._stepper.companions

    def owned(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with copies of what it borrows; itself with `snapshot="none"`.

        >>> checkpoint = loop.next_step(copy=False)
        >>> checkpoint.is_borrowed, loop.owned(checkpoint).is_borrowed
        (True, False)
        """
        if self._copy is None or not checkpoint.is_borrowed:
            return checkpoint
        with self._stepper.interrupts.held():
            return owned(checkpoint, self._copy)

    @property
    def revision(self) -> tuple[int, ...]:
        """Identifies the present state: its step, and how often something was set."""
        return self._stepper.revision

    def restore(self, state: TrainState | Checkpoint) -> None:
        """Continues from another state, and from the data position of a checkpoint.

        >>> state = loop.state
        >>> checkpoint = loop.next_checkpoint()
        >>> loop.restore(state)
        >>> loop.step == state.step
        Array(True, dtype=bool)
        """
        checkpoint = None if isinstance(state, TrainState) else state
        state = getattr(state, "state", state)
        if not isinstance(state, TrainState):
            raise TypeError(
                f"restore needs a TrainState or a Checkpoint, got {type(state).__name__}."
            )
        state = match(self._stepper, state)
        # Checked before anything changes.
        check_same_arrays(self._stepper.state, state)
        self._resume(state, checkpoint)

    def snapshot(self) -> Checkpoint | None:
        """Returns a checkpoint of this moment, which callbacks do not see.

        The count continues. Resuming from it, by `restore` or from a file, reproduces this loop's
        metrics exactly. Returns None if that is not possible: while callbacks run, or while a
        fetched batch waits to be trained on.

        >>> loop.snapshot().step == loop.step
        True
        """
        stepper = self._stepper
        if self._due is not None or not stepper.cursor.is_between_batches:
            return None
        if not self.n_completed_steps and self._last is not None:
            return self._last.replace(state=self.state, companions=self._companions.saved)
        now = make_checkpoint(stepper, self._watch, epoch=self._epoch, between=True)
        return self.owned(now.replace(last_grads=None))

    @property
    def _epoch(self) -> int | None:
        return None if self.epoch_number is None else self.epoch_number()

    def _begin(
        self, init: Any, rnkey: Any = None, input_sample: Any = None, callbacks: Any = ()
    ) -> None:
        """Begins with a new state, a given one, or that of a reader; callbacks are set afterwards.

        The arguments are those of the loop.
        """
        stepper = self._stepper
        task, strategy = stepper.task, stepper.strategy

        def sample() -> PyTree:
            with self.in_phase("training"):
                given = task.roles.inputs_of((input_sample,))
                batch = stepper.first_batch() if input_sample is None else given
            return normalize(batch, is_whole=task.keeps_whole).inputs

        with eagerly(strategy), without_mesh():
            state, self.start, is_own, present = start(
                init,
                task,
                rnkey,
                sample,
                self.say,
                strategy.shardings,
                freezes_as_saved=any(map(unfreezes, as_tuple(callbacks))),
            )
        if present is not task:
            stepper.set_task(present)
        if task.step is None:
            check_trains(state, self.say)
        if self.start is not None or strategy.virtual_replicas:
            say_if_inexact(self.say, strategy.devices[0].platform)
        self._resume(state, self.start, is_own=is_own)
        self._first_step = self.step
        self._last = as_checkpoint(self.start)
        self._is_at_start = True
        self.stopped = self._last is not None and self._last.stop

    def _resume(self, state: TrainState, checkpoint: Any, *, is_own: bool = False) -> None:
        """Continues from a state, and from the position and counts of its checkpoint, if any."""
        self._companions.restore(getattr(checkpoint, "companions", None))
        with quiet(not self._is_talking):
            self._stepper.cursor.move_to(getattr(checkpoint, "data_state", None))
        self._stepper.set_state(match(self._stepper, state), is_own=is_own)
        self._forget_delivery()
        self._last, self._is_at_start = None, False
        self._reset()
        # Those of a state alone are unknown: it may be one from before they were unfrozen.
        set_late(self._stepper, late_of(self._stepper.task.optimizer))
        if (running := getattr(checkpoint, "running", None)) is not None:
            set_running(self._stepper, running, self.say)
        if getattr(checkpoint, "sums", None) is not None:
            self._stepper.tally.resume(checkpoint)

    def _forget_delivery(self) -> None:
        """Forgets a checkpoint that callbacks are still to get, unless they are getting it now."""
        if self._phase != "callbacks":
            self._due = None
        if self._due is not None:
            self._due.tuned.clear()

    def _reset(self) -> None:
        """Starts a new count."""
        self._stepper.reset_totals()
        self._watch.reset()

    # What it is doing, and what a step costs.

    def running_metrics(self) -> dict[str, Any]:
        """The metrics since the previous checkpoint; waits for the device.

        >>> isinstance(loop.running_metrics(), dict)
        True
        """
        return self._stepper.metrics()

    @property
    def input_shapes(self) -> PyTree:
        """The shapes and dtypes of the inputs of the first batch trained on; None before."""
        batch = self._stepper.feed.shapes
        return None if batch is None else batch.inputs

    @property
    def phase(self) -> str:
        """What the loop is doing: "training", "preparing" (inspection or compilation), "callbacks",
        or "" while the user has a checkpoint.
        """
        is_preparing = self._phase == "training" and self._stepper.is_preparing
        return "preparing" if is_preparing else self._phase

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Sets the phase for a while, so that work for the loop is watched as its own."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def step_flops(self, batch_size: int | None = None) -> float:
        """The floating-point operations of one step on all devices, as XLA counts them.

        They are counted before compilation. The body of a `while` loop counts once, and a custom
        kernel not at all, so the result may be too low or `nan` for such a model; it is `nan` with
        `debug`. What `jax.checkpoint` recomputes counts again.

        >>> loop.step_flops() > 0
        True

        Args:
          batch_size: examples in the step; None: the size of a regular batch of the data.
        """
        return self.step_cost(batch_size).flops

    def step_cost(self, batch_size: int | None = None) -> StepCost:
        """The operations of one step, as `step_flops`, and whether some are recomputation.

        >>> loop.step_cost().flops == loop.step_flops()
        True

        Args:
          batch_size: as in `step_flops`.
        """
        return step_cost(self._stepper, batch_size)

    def step_memory(self, batch_size: int | None = None) -> int:
        """The bytes that one step needs on each device, by XLA's plan for it.

        The step is compiled, but not run, so no batch is too large to ask about. Resident data and
        the next two batches are not counted.

        >>> loop.step_memory(4096) > loop.step_memory(64)
        True

        Args:
          batch_size: as in `step_flops`.

        Raises:
          ValueError: the backend does not report it, several processes share the step, or it runs
            eagerly.
        """
        return step_memory(self._stepper, batch_size)

    def __reduce__(self) -> Any:
        raise TypeError(
            "Cannot copy or pickle a TrainLoop: it holds compiled programs. Begin another loop "
            "with loop.state, which is a copy."
        )
