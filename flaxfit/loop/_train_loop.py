"""TrainLoop: an iterator over the checkpoints of a training run."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax

from flaxfit.data._batch import Batch, normalize
from flaxfit.display import count, n_numbers, quiet, say, short_errors, start_lines
from flaxfit.loop._access import by_one_thread, check_thread
from flaxfit.loop._callback_list import CallbackList, Delivery, as_tuple, unfreezes
from flaxfit.loop._card import card_of
from flaxfit.loop._compilation_cache import use_compilation_cache
from flaxfit.loop._consistency import agreed_shardings
from flaxfit.loop._default_strategy import eagerly, strategy_for
from flaxfit.loop._determinism import say_if_inexact
from flaxfit.loop._idle_gpu import warn_of_idle_gpu
from flaxfit.loop._initial_state import as_checkpoint, check_same_arrays, check_trains, start
from flaxfit.loop._ownership import copier
from flaxfit.loop._placed_companions import PlacedCompanions
from flaxfit.loop._record import LossWarning, get_running, make_checkpoint, set_running
from flaxfit.loop._schedule import Schedule
from flaxfit.loop._step_cost import step_cost, step_memory
from flaxfit.loop._stepper import Stepper
from flaxfit.loop._steps_per_call import StepsPerCall
from flaxfit.loop._stopwatch import Stopwatch
from flaxfit.loop._tuning import (
    freeze,
    match,
    present_hyperparams,
    set_generations,
    tune,
    with_settings,
)
from flaxfit.optim._extended import generations_of
from flaxfit.state import Borrowed, Checkpoint, FitCall, Observer, Observers, TrainState
from flaxfit.step import StepCost
from flaxfit.strategies import Strategy
from flaxfit.task import TrainTask, describe_loss, with_collections
from flaxfit.tree import ArrayLike, Data, PyTree, check_jit, without_mesh

_OPTIONS = {field.name for field in dataclasses.fields(TrainTask)}
_RATES = ("lr", "learning_rate")
_REPEATED = "flaxfit.data.as_stream(data, epochs=n) repeats a loader or a list of batches"


class EndOfData(Exception):
    """Raised by `next_step` and `next_checkpoint` when the data has no further batch.

    >>> issubclass(EndOfData, Exception)
    True
    """


class TrainLoop:
    """Trains a task, yielding a checkpoint at step 1, 1 + n, 1 + 2n, ... and at the last step.

    Your own `for` loop drives it; between checkpoints nothing is read from the device. After an
    exception, including Ctrl-C, the loop continues where it was. There is one run per loop: a
    second `iter(loop)` continues it.

    >>> import numpy as np, optax
    >>> x = np.ones((8, 1), np.float32)
    >>> task = TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse", (x, 2 * x))
    >>> init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
    >>> loop = TrainLoop(init, task, 0, n_steps=10, n_steps_per_checkpoint=5, stdout=False)
    >>> [checkpoint.step for checkpoint in loop]
    [1, 6, 10]

    Args:
      init: a Linen or NNX module, an `init(rngs, *inputs) -> variables`, a `TrainState`, or a
        `CheckpointFileReader`.
      task: what to train.
      rnkey: a random key or an integer seed; not needed if `init` holds a state.
      input_sample: the inputs of a batch, for their shapes; None: the inputs of the first batch,
        which is then trained on.
      n_steps_per_checkpoint: steps from one checkpoint to the next.
      n_steps: the step to end at, counted from step 0; None: until the data ends.
      collections: names of random streams, instead of the task's `rngs`.
      mutable_collections: instead of the task's `mutable`.
      devices: the devices of a `DataParallel` strategy.
      strategy: where arrays live; None: `DataParallel(devices)`, or, for a custom step on several
        devices, `Sharded(devices=devices)`.
      debug: whether to run each step operation by operation, on one device, so that prints and
        breakpoints in the model, the loss and the metrics see values. It is many times slower.
      callbacks: functions `Checkpoint -> Checkpoint | None`, called before each yield.
      first_checkpoint: the step of the first checkpoint; `n_steps_per_checkpoint` gives n, 2n, ...
      steps_per_call: steps per dispatch to the device, none of them across a checkpoint. "auto"
        takes up to 32 where steps are small and the data is arrays. Models with convolutions take
        one step per dispatch on a CPU.
      keep_grads: whether checkpoints hold the gradients of their last step.
      grad_norm: whether to report the norm of the gradients as a metric, which takes some
        microseconds of each step.
      snapshot: where the arrays of your checkpoints live: "device"; "host", as NumPy arrays, which
        take no device memory; or "none": not copied; the next step donates them, so read them
        before it.
      compilation_cache: a folder for JAX's persistent compilation cache, as in `Model`.
      stdout: whether to print notices (to stderr).

    Raises:
      ValueError: there is no random key, or an option is out of range.
      TypeError: `init`, `task` or a callback is of the wrong type.
    """

    @short_errors
    def __init__(
        self,
        init: Any,
        task: TrainTask,
        rnkey: Any = None,
        input_sample: Any = None,
        n_steps_per_checkpoint: int = 1,
        n_steps: int | None = None,
        *,
        collections: PyTree = None,
        mutable_collections: Any = None,
        devices: Sequence[Any] | None = None,
        strategy: Strategy | None = None,
        debug: bool = False,
        callbacks: Any = (),
        first_checkpoint: int = 1,
        steps_per_call: int | str = 1,
        keep_grads: bool = False,
        grad_norm: bool = False,
        snapshot: str = "device",
        compilation_cache: str | os.PathLike[str] | None = "auto",
        stdout: bool = True,
    ):
        use_compilation_cache(compilation_cache)
        warn_of_idle_gpu()
        task = with_collections(task, collections, mutable_collections)
        strategy = strategy_for(task, devices, strategy, is_eager=debug)
        self.strategy: Strategy = strategy
        """Where arrays live."""
        self.schedule: Schedule = Schedule(first_checkpoint, n_steps_per_checkpoint, n_steps)
        """Which steps yield a checkpoint; can be set."""
        self.on: Observers = Observers()
        """Functions that the loop calls between steps, besides its callbacks."""
        self.fit_call: FitCall | None = None
        """The call of `fit` that drives the loop, or that drove it last; None without `fit`."""
        self.start: Any = None
        """The checkpoint file that the run was restored from, or None."""
        self.stopped: bool = False
        """Whether a callback has ended the run; setting `data` restarts it."""
        self._is_talking = stdout
        self.say: Callable[[str], None] = say if stdout else lambda text: None
        """Prints a notice, unless the loop was made with `stdout=False`."""
        if strategy.runs_eagerly:
            self.say("debug mode: nothing is compiled, which is slow; it runs on one device")
        else:
            check_jit()
        self._copy = copier(snapshot, strategy)
        self._stepper = Stepper(
            task, strategy, grad_norm=grad_norm, keep_grads=keep_grads, say=self.say
        )
        self.steps_per_call = steps_per_call
        self._warn_of_loss = LossWarning(self.say)
        self._watch = Stopwatch()  # Training time since the latest checkpoint.
        self._due: Delivery | None = None  # Still to be passed to some callbacks.
        self._phase, self._is_finishing = "", False
        self._not_taken_over: Sequence[str] = ()
        CallbackList(callbacks).attach_first(self)
        self._begin(init, rnkey, input_sample, callbacks)
        self._first_step = self.step
        self._last = as_checkpoint(self.start)  # The latest checkpoint, without its arrays.
        # Until it trains, restores a state, or gets other data.
        self._is_at_start = True
        self.stopped = self._last is not None and self._last.stop
        self.callbacks = callbacks

    # Driving the loop: each method trains to another step.

    def __iter__(self) -> Self:
        return self

    @short_errors
    def __next__(self) -> Checkpoint:
        is_done = self.n_steps is not None and self.step >= self.n_steps
        if is_done and self._due is None and not self.n_completed_steps:
            if self._first_step == self.step:
                self.say(f"step {self.n_steps:,} is already reached (at step {self.step:,})")
            self._end()
        if self.stopped:
            self._say_if_complete()
            self._end()
        # If `n_steps` was set to an earlier step, a last checkpoint is still due.
        target = (lambda: self.step) if is_done else self._next_target()
        checkpoint = self._train_to(target, n_total=self.n_steps)
        if checkpoint is None and self.n_steps is not None and self.step < self.n_steps:
            self.say(
                f"the data ended after step {self.step:,}, before n_steps={self.n_steps:,}; "
                f"{_REPEATED}"
            )
        return self._end() if checkpoint is None else self.owned(checkpoint)

    @short_errors
    def next_checkpoint(self, *, copy: bool = True) -> Checkpoint:
        """Trains to the next checkpoint step, past `n_steps` if it was reached.

        >>> checkpoint = loop.next_checkpoint()
        >>> checkpoint.step == loop.step
        True

        Args:
          copy: as in `run_until`.
        """
        checkpoint = self._train_to(self._next_target(), n_total=self.n_steps) or self._no_data()
        return self.owned(checkpoint) if copy else checkpoint

    @short_errors
    def next_step(self, batch: PyTree = None, *, copy: bool = True) -> Checkpoint:
        """Trains a single step, on the next batch of the data or on `batch`.

        The batch may have any form that a stream yields, and any size. It does not advance the
        data, so you can mix both. A task that is only trained on given batches needs no data, but
        its loop needs an `input_sample`. With several processes, each passes its part.

        After an exception in a callback, the next call only finishes that step.

        Args:
          batch: the batch; None: the next one of the data.
          copy: as in `run_until`.

        >>> first, second = loop.next_step((x, 2 * x)), loop.next_step((x[:3], 2 * x[:3]))
        >>> second.step - first.step
        1
        """
        step = self.step + 1
        checkpoint = self._train_to(lambda: step, batch) or self._no_data()
        return self.owned(checkpoint) if copy else checkpoint

    def run(self, n: int) -> Iterator[Checkpoint]:
        """Yields the checkpoints of the next `n` steps, always including the last step.

        >>> start = loop.step
        >>> for checkpoint in loop.run(3):
        ...     pass
        >>> checkpoint.step - start
        3
        """
        return self.run_until(self.step + n)

    def run_until(self, step: int, *, copy: bool = True) -> Iterator[Checkpoint]:
        """Yields the checkpoints up to `step`, always including that step.

        >>> for checkpoint in loop.run_until(100):
        ...     pass
        >>> checkpoint.step
        100

        Args:
          step: the step to stop at.
          copy: whether checkpoints own their arrays; else these can be read until the next step.
        """
        if step <= self.step and not self.n_completed_steps:
            self.say(f"step {step:,} is already reached (at step {self.step:,})")
        if self.stopped and self._is_at_start:
            self._say_if_complete()
            return self.close()
        n_total = (self.fit_call and self.fit_call.n_steps) or step
        while self.step < step or (self.step == step and self.n_completed_steps):
            checkpoint = self._train_to(self._next_target(last=step), n_total=n_total)
            if checkpoint is None:
                return self.close()
            yield self.owned(checkpoint) if copy else checkpoint
            del checkpoint  # Free the copy that a callback received before the next step.
            if self.stopped:
                return self.close()

    # Training.

    @by_one_thread
    def _train_to(
        self, target: Callable[[], int], batch: PyTree = None, *, n_total: int | None = None
    ) -> Checkpoint | None:
        """Trains to the step `target()`, which may change on the way, or to the end of the data.

        Returns None if no step was left. With a `batch` it trains on that, not on the stream's.
        `n_total` is the number of steps of the run, if it is known.
        """
        if self._is_at_start:
            self._say_start()
        self._is_at_start = False
        stepper = self._stepper
        stepper.n_total = n_total or 0
        stepper.companions.refresh()
        with self.in_phase("training"), self._watch, stepper.interrupts, without_mesh():
            if self._due is None and not stepper.tally.n_steps and not stepper.cursor.ended:
                for observe in self.on.before_span:
                    observe(stepper.step)
            # Processes may be told to finish at different steps; they agree at a checkpoint.
            is_alone, schedule, end = not stepper.consistency.is_needed, None, 0
            while self._due is None:
                if schedule is not self.schedule:  # First pass, or an observer has set another.
                    schedule, end = self.schedule, target()
                is_watched = self.on.after_step or self.on.before_step
                stepper.spacing = 1 if is_watched else self.schedule.every
                if stepper.step >= end or stepper.cursor.ended and batch is None:
                    break
                if self._is_finishing and stepper.tally.n_steps and is_alone:
                    break
                for observe in self.on.before_step:
                    observe(stepper.step)
                if stepper.advance(end - stepper.step, batch):
                    for observe in (*self.on.after_step, *self.on.after_dispatch):
                        observe(stepper.step)
            if self._due is None and stepper.tally.n_steps:
                self._end_span()
        return self._deliver()

    def _say_start(self) -> None:
        """Prints the model and the devices; `fit` prints them itself, with its data."""
        if self._not_taken_over:
            self.say(f"from {self.start.path}: {'; '.join(self._not_taken_over)}")
        if self.fit_call is None:
            devices = self.strategy.devices
            n_params = n_numbers(self.state_in_place.params)
            where = {"n_devices": len(devices), "platform": devices[0].platform}
            self.say(start_lines("training", n_params=n_params, **where)[0])

    @property
    def _epoch(self) -> int | None:
        return None if self.fit_call is None else self.fit_call.epoch()

    def _next_target(self, last: int | None = None) -> Callable[[], int]:
        """Returns a function that returns the next checkpoint step of the current schedule."""
        # Steps without a checkpoint, as after an error: one may be due at the current step.
        here = self.step - bool(self.n_completed_steps)
        return lambda: self.schedule.after(here, last)

    def _end_span(self) -> None:
        """Makes the checkpoint of the steps since the previous one, and starts a new count."""
        stepper = self._stepper
        # An interrupt within an operation of JAX may leave JAX without a current trace: every later
        # operation fails. Reading a state with random keys runs such operations.
        with stepper.interrupts.held():
            stepper.consistency.checkpoint(stepper.step, lambda: stepper.state)
            checkpoint = make_checkpoint(
                stepper, self._watch, epoch=self._epoch, stop=self._is_finishing
            )
            self._warn_of_loss(checkpoint)
            self._due = Delivery(checkpoint, self._callbacks, self._settle)
            self._reset()

    def _deliver(self) -> Checkpoint | None:
        """Calls the callbacks with the checkpoint; after an exception, the remaining ones."""
        if self._due is None:
            return None
        stepper = self._stepper
        with self.in_phase("callbacks"):
            checkpoint = self._due.finish(self.owned, lambda: stepper.revision)
        self._due = None
        self._last = checkpoint.replace(state=None, last_grads=None)
        self.stopped = checkpoint.stop
        return checkpoint

    def _settle(self, checkpoint: Checkpoint) -> Checkpoint:
        """Adds to the checkpoint what callbacks have set, and whether the run ends with it."""
        tuned = [] if self._due is None else self._due.tuned
        if tuned and self.step == checkpoint.step and hasattr(checkpoint.state, "opt_state"):
            # Saved with the states of the callbacks, which will not set them again on resume.
            is_borrowed = checkpoint.is_borrowed
            checkpoint = with_settings(self._stepper, checkpoint, tuned)
            if is_borrowed:  # It lends the current state; other parameters may be frozen by now.
                checkpoint = checkpoint.replace(running=get_running(self._stepper))
        # A callback may have called `finish`.
        wanted, self._is_finishing = checkpoint.stop or self._is_finishing, False
        stop = self._stepper.consistency.stop(wanted)
        return checkpoint if stop == checkpoint.stop else checkpoint.replace(stop=stop)

    def _say_if_complete(self) -> None:
        if self._is_at_start and self.start is not None:
            self.say(f"this run is complete: it was ended at step {self.step:,}")

    def _end(self) -> Any:
        self.close()
        raise StopIteration

    def _no_data(self) -> Any:
        raise EndOfData(
            f"The data ended after step {self.step:,}. Set loop.data to continue with more; "
            f"{_REPEATED}."
        )

    # Starting, and continuing from another state.

    def _begin(self, init: Any, rnkey: Any, input_sample: Any, callbacks: Any) -> None:
        """Starts from a new state, the given one, or the one a reader restores."""
        stepper = self._stepper
        task, strategy = stepper.task, stepper.strategy

        def sample() -> PyTree:
            with self.in_phase("training"):
                is_batch = isinstance(input_sample, Batch)  # Its columns already have roles.
                given = task.roles.inputs_of(input_sample if is_batch else (input_sample,))
                batch = stepper.first_batch() if input_sample is None else given
            return normalize(batch, is_whole=task.keeps_whole).inputs

        with eagerly(strategy), without_mesh():
            state, self.start, may_donate, present = start(
                init,
                task,
                rnkey,
                sample,
                self.say,
                agreed_shardings(strategy),
                freezes_as_saved=any(map(unfreezes, as_tuple(callbacks))),
            )
        if present is not task:
            stepper.set_task(present)
        if task.step is None:
            check_trains(state, self.say)
        if self.start is not None or strategy.virtual_replicas:
            say_if_inexact(self.say, strategy.devices[0].platform)
        self._resume(state, self.start, may_donate=may_donate)

    def _resume(self, state: TrainState, checkpoint: Any, *, may_donate: bool = False) -> None:
        """Continues from a state, and from the position and counts of its checkpoint, if any."""
        self._companions.restore(getattr(checkpoint, "companions", None))
        with quiet(not self._is_talking):
            self._stepper.cursor.move_to(getattr(checkpoint, "data_state", None))
        self._stepper.set_state(match(self._stepper, state), may_donate=may_donate)
        self._forget_delivery()
        self._last, self._is_at_start = None, False
        self._reset()
        # A bare state does not say when its parameters were unfrozen.
        set_generations(self._stepper, generations_of(self._stepper.task.optimizer))
        if (running := getattr(checkpoint, "running", None)) is not None:
            set_running(self._stepper, running, self.say)
        if getattr(checkpoint, "sums", None) is not None:
            self._stepper.tally.resume(checkpoint)

    def _forget_delivery(self) -> None:
        """Drops a checkpoint that waits for callbacks, unless they are being called with it."""
        if self._phase != "callbacks":
            self._due = None
        if self._due is not None:
            self._due.tuned.clear()

    def _reset(self) -> None:
        """Resets the counts and sums since the latest checkpoint."""
        self._stepper.reset_totals()
        self._watch.reset()

    # State and metrics.

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
        check_thread(self)
        copy = self._copy or self._stepper.strategy.collect
        # It may be read within a trace, as by a jitted function.
        with self._stepper.interrupts.held(), jax.ensure_compile_time_eval():
            return self._stepper.placed.copied(copy)

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
        borrowed = {k: x for k, x in vars(checkpoint).items() if isinstance(x, Borrowed)}
        with self._stepper.interrupts.held():
            return checkpoint.replace(**{k: borrowed[k].copied(self._copy) for k in borrowed})

    @property
    def revision(self) -> tuple[int, ...]:
        """Identifies the present state: its step, and a count of changes from outside."""
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
        """Returns a checkpoint of the current step, without calling callbacks.

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

    def running_metrics(self) -> dict[str, Any]:
        """The metrics since the previous checkpoint; waits for the device.

        >>> isinstance(loop.running_metrics(), dict)
        True
        """
        return self._stepper.metrics()

    @property
    def input_shapes(self) -> PyTree:
        """The shapes and dtypes of the inputs of the first batch; None before training."""
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
        """Sets the phase within a `with` block, for work that others do for the loop."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    # The cost of a step.

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
        """Returns the operations of one step, and whether some recompute activations.

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

    # What can be set between two steps: optimizer, schedule, data and callbacks.

    @property
    def task(self) -> TrainTask:
        """The task that is trained, with the current `freeze` and `norms`."""
        return self._stepper.task

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The optimizer's hyperparameters by name, or for groups by group and name.

        An `OptimizerDef`, a `MultiOptimizer` and `optax.inject_hyperparams` have them. A scheduled
        one has the value of the latest step. Of a plain optimizer that ends in a scaling by a
        number, such as `optax.adam(1e-3)`, it is the learning rate.
        """
        return present_hyperparams(self._stepper)

    def set_hyperparams(self, *, group: str | int | None = None, **values: ArrayLike) -> None:
        """Sets hyperparameters from the next step on, without recompilation.

        A value overrides a schedule until None clears it. Setting the learning rate of a plain
        optimizer for the first time moves it into the state, and compiles the step again.

        >>> loop.set_hyperparams(learning_rate=0.5 * loop.hyperparams["learning_rate"])
        >>> round(loop.hyperparams["learning_rate"], 4)
        0.05

        Args:
          group: the group of a `MultiOptimizer`, by name or position; None: all groups.
          **values: numbers by name.

        Raises:
          ValueError: the optimizer has no such hyperparameter or group; the error lists them.
        """
        tune(self._stepper, group, values)
        if self._due is not None:
            self._due.tuned.append((group, values))

    @property
    def freeze(self) -> Sequence[str]:
        """Patterns of the parameters that are not trained; can be set.

        The update is compiled again, and the moments of the other parameters are kept.
        """
        return self.task.freeze

    @freeze.setter
    def freeze(self, patterns: str | Sequence[str]) -> None:
        freeze(self._stepper, patterns)

    @property
    def norms(self) -> Sequence[str]:
        """Patterns of the parameters whose norms are reported; can be set.

        Setting them between two checkpoints restarts the count.
        """
        return self.task.norms

    @norms.setter
    def norms(self, patterns: str | Sequence[str]) -> None:
        self._stepper.set_norms(patterns)

    @property
    def n_steps(self) -> int | None:
        """The step at which iteration ends; can be set."""
        return self.schedule.last

    @n_steps.setter
    def n_steps(self, value: int | None) -> None:
        self.schedule = dataclasses.replace(self.schedule, last=value)

    @property
    def n_steps_per_checkpoint(self) -> int:
        """The number of steps between checkpoints; can be set."""
        return self.schedule.every

    @n_steps_per_checkpoint.setter
    def n_steps_per_checkpoint(self, value: int) -> None:
        self.schedule = dataclasses.replace(self.schedule, every=value)

    @property
    def first_checkpoint(self) -> int:
        """The step of the first checkpoint; can be set."""
        return self.schedule.first

    @first_checkpoint.setter
    def first_checkpoint(self, value: int) -> None:
        self.schedule = dataclasses.replace(self.schedule, first=value)

    @property
    def steps_per_call(self) -> int:
        """The number of steps per dispatch, for "auto" the chosen one; can be set."""
        return self._stepper.steps_per_call.number

    @steps_per_call.setter
    def steps_per_call(self, value: int | str) -> None:
        self._stepper.steps_per_call = StepsPerCall(value)

    @property
    def data(self) -> Data:
        """The stream of batches; set it to continue with other data and a new count."""
        return self._stepper.cursor.stream

    @data.setter
    def data(self, data: Data) -> None:
        self._stepper.set_data(data)
        self._forget_delivery()
        self._reset()
        self._last = None  # It holds the position and batch size of the previous data.
        self.stopped = self._is_finishing = self._is_at_start = False

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """The callbacks; setting them attaches them to the loop."""
        return self._callbacks.given

    @callbacks.setter
    def callbacks(self, callbacks: Any) -> None:
        self._callbacks = CallbackList(callbacks)
        if self._due is not None:
            self._due.keep(self._callbacks)
        self.on = Observers()
        self._callbacks.attach(self)
        if self._is_at_start and self.start is not None:
            self._not_taken_over = self._callbacks.restore(self.start)

    @property
    def watchers(self) -> list[Observer]:
        """Functions of the step, called after each dispatch. They must not read the device.

        With `steps_per_call="auto"` a dispatch takes one step if there are any.
        """
        return self.on.after_step

    @property
    def dispatch_watchers(self) -> list[Observer]:
        """Like `watchers`, for functions that need not see every step."""
        return self.on.after_dispatch

    def close(self) -> None:
        """Closes all callbacks, as the end of an iteration does.

        >>> loop.close()
        """
        self._callbacks.close()

    def finish(self) -> None:
        """Ends the run after the current step, whatever `n_steps` is.

        That step yields the last checkpoint, with `stop=True`. It can be called from a watcher, a
        callback, another thread, or the `for` over the loop, where no step is being taken and no
        further checkpoint comes.

        >>> loop = TrainLoop(init, task, 0, n_steps=10, n_steps_per_checkpoint=5, stdout=False)
        >>> loop.watchers.append(lambda step: loop.finish() if step == 3 else None)
        >>> [(checkpoint.step, checkpoint.stop) for checkpoint in loop]
        [(1, False), (3, True)]
        """
        if self._phase or self.n_completed_steps:
            self._is_finishing = True
        else:
            self.stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        n_params = count(n_numbers(self.state_in_place.params))
        return (
            f"TrainLoop({describe_loss(self.task.loss)}, step={self.step}, n_steps={self.n_steps}, "
            f"n_steps_per_checkpoint={self.n_steps_per_checkpoint}, {self._stepper.strategy}, "
            f"{n_params} params)"
        )

    def _repr_html_(self) -> str:
        return card_of(self, {} if self._last is None else self._last.scalars)

    def __reduce__(self) -> Any:
        raise TypeError(
            "Cannot copy or pickle a TrainLoop: it holds compiled programs. Begin another loop "
            "with loop.state, which is a copy."
        )

    def __setattr__(self, name: str, value: object) -> None:
        # Nothing would read an option of the task that is set on the loop: `loop.clip_norm = 1`.
        is_ours = type(self).__module__.startswith("flaxfit.")  # Subclasses may store anything.
        if is_ours and (name in _OPTIONS or name in _RATES) and not hasattr(type(self), name):
            advice = f"use TrainLoop(loop.state, dataclasses.replace(loop.task, {name}=...))"
            if name in _RATES:
                advice = "use loop.set_hyperparams(learning_rate=...)"
            words = f"A TrainLoop has no {name} to set: {advice}."
            raise AttributeError(words, name=name, obj=self)
        super().__setattr__(name, value)
