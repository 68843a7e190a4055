"""TrainLoop: an iterator over the checkpoints of a training run."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax

from flaxfit.data._batch import normalize
from flaxfit.display import quiet, say
from flaxfit.loop._callback_list import CallbackList, Delivery
from flaxfit.loop._compilation_cache import use_compilation_cache
from flaxfit.loop._default_strategy import strategy_for
from flaxfit.loop._idle_gpu import warn_of_idle_gpu
from flaxfit.loop._initial_state import as_checkpoint, check_same_arrays, check_trains, start
from flaxfit.loop._ownership import copier, owned
from flaxfit.loop._schedule import Schedule
from flaxfit.loop._stepper import Stepper
from flaxfit.metrics._monitor import modes_of
from flaxfit.optim import hyperparams, set_hyperparams
from flaxfit.optim._hyperparams import group_name, learning_rates
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.state._train_state import TrainState
from flaxfit.step._cost import StepCost
from flaxfit.strategies import DataParallel, Eager, Strategy
from flaxfit.strategies._eager import eagerly
from flaxfit.task._task import TrainTask, with_collections
from flaxfit.tree._checks import whole_number
from flaxfit.tree._functions import runs_eagerly
from flaxfit.tree._jax_debugging import check_jit
from flaxfit.tree._types import Data, PyTree


class EndOfData(Exception):
    """Raised by `next_step` and `next_checkpoint` when the data has no further batch.

    >>> issubclass(EndOfData, Exception)
    True
    """


class TrainLoop:
    """Trains a task, yielding a checkpoint at step 1, 1 + n, 1 + 2n, ... and at the last step.

    The user's own `for` drives it; between two checkpoints nothing is read from the device.
    After an exception, including Ctrl-C, the loop continues where it was. There is one run per
    loop: a second `iter(loop)` continues it.

    >>> import numpy as np, optax
    >>> x = np.ones((8, 1), np.float32)
    >>> task = TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse", (x, 2 * x))
    >>> init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
    >>> loop = TrainLoop(init, task, 0, n_steps=10, n_steps_per_checkpoint=5, stdout=False)
    >>> [checkpoint.step for checkpoint in loop]
    [1, 6, 10]

    Args:
      init: a linen `init`, a `TrainState`, or a `CheckpointFileReader`.
      task: what to train.
      rnkey: a random key or an integer seed; not needed if `init` holds a state.
      input_sample: the inputs of a batch, for their shapes; None: those of the first batch, which
        is then trained on.
      n_steps_per_checkpoint: steps from one checkpoint to the next.
      n_steps: the step to end at, counted from step 0; None: until the data ends.
      collections: names of random streams, instead of the task's `rngs`.
      mutable_collections: instead of the task's `mutable`.
      devices: the devices of a `DataParallel` strategy.
      strategy: where arrays live; None: `DataParallel(devices)`, or, for a task with a step of its
        own and several devices, `Sharded(devices=devices)`.
      debug: whether to run each step operation by operation, on one device, so that prints and
        breakpoints in the model, the loss and the metrics see values. It is many times slower.
      callbacks: functions `Checkpoint -> Checkpoint | None`, called before each yield.
      first_checkpoint: the step of the first checkpoint; `n_steps_per_checkpoint` gives n, 2n, ...
      steps_per_call: steps per dispatch to the device, none of them across a checkpoint. "auto"
        takes up to 32 where steps are small and the data is arrays. Models with convolutions take
        one step per dispatch on a CPU.
      keep_grads: whether checkpoints hold the gradients of their last step.
      grad_norm: whether to report the norm of the gradients.
      snapshot: where checkpoints that your own code gets have their arrays: "device"; "host", as
        NumPy arrays, which take no memory of the devices; or "none": they borrow those of the
        loop, and can be read until the next step.
      compilation_cache: a folder that JAX keeps compiled programs in, for this whole process and
        for later ones, which then start without compiling again.
      stdout: whether to print notices (to stderr).
    """

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
        grad_norm: bool = True,
        snapshot: str = "device",
        compilation_cache: str | os.PathLike[str] | None = None,
        stdout: bool = True,
    ):
        if compilation_cache is not None:
            use_compilation_cache(compilation_cache)
        warn_of_idle_gpu()
        if devices is not None and strategy is not None:
            raise ValueError(
                "Give either devices or a strategy, not both: strategies hold devices."
            )
        self.task = with_collections(task, collections, mutable_collections)
        if debug:
            strategy = Eager(strategy if devices is None else DataParallel(devices))
        self.strategy = strategy or strategy_for(self.task, devices)
        self._copy = copier(snapshot, self.strategy)
        self._modes = modes_of(self.task.metrics)
        self.schedule = Schedule(first_checkpoint, n_steps_per_checkpoint, n_steps)
        """Which steps yield a checkpoint; takes effect at once when set."""
        self._is_talking = stdout
        self.say = say if stdout else lambda text: None
        if runs_eagerly(self.strategy):
            self.say("debug mode: nothing is compiled, which is slow; it runs on one device")
        else:
            check_jit()
        self._stepper = stepper = Stepper(
            self.task, self.strategy, grad_norm=grad_norm, keep_grads=keep_grads, say=self.say
        )
        self.steps_per_call = steps_per_call
        self._run_end: int | None = None
        """The step that the present run ends at, if it is known."""

        def sample() -> Any:
            with self.in_phase("training"):
                batch = stepper.loader.first_batch() if input_sample is None else (input_sample,)
            return normalize(batch).inputs

        self._phase = ""
        self._due: Delivery | None = None
        self._set_meanwhile: list[tuple[Any, dict[str, Any]]] = []
        """Hyperparameters that callbacks have set while a checkpoint is shown to them."""
        self._is_finishing = False
        self._had_finite_loss = True
        CallbackList(callbacks).attach_first(self)
        with eagerly(self.strategy):
            beginning = start(init, self.task, rnkey, sample, self.say, self.strategy.shardings)
        if self.task.step is None:
            check_trains(beginning.state, self.say)
        self.start = beginning.checkpoint
        """The checkpoint file that the run was restored from, or None."""
        self._go_on_from(beginning.state, self.start)
        self._first_step = self.step
        self._last = as_checkpoint(self.start)
        self._is_at_start = True
        self._not_taken_over: list[str] = []
        self.stopped = self._last is not None and self._last.stop
        """Whether a callback has ended the run; setting `data` restarts it."""
        self.callbacks = callbacks

    def __reduce__(self) -> Any:
        raise TypeError(
            "Cannot copy or pickle a TrainLoop: it holds compiled programs. Begin another loop "
            "with loop.state, which is a copy."
        )

    # Driving the loop: each is a choice of where to train to.

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Checkpoint:
        is_done = self.n_steps is not None and self.step >= self.n_steps
        if is_done and self._due is None and not self.n_completed_steps:
            if self._first_step == self.step:
                self.say(f"step {self.n_steps:,} is already reached (at step {self.step:,})")
            self._end()
        if self.stopped:
            self._say_if_complete()
            self._end()
        self._run_end = self.n_steps
        # Steps past an end that was set to an earlier step are still to be shown.
        target = (lambda: self.step) if is_done else self._next_target()
        checkpoint = self._train_to(target)
        if checkpoint is None and self.n_steps is not None and self.step < self.n_steps:
            self.say(f"the data ended after step {self.step:,}, before n_steps={self.n_steps:,}")
        return self._end() if checkpoint is None else self.owned(checkpoint)

    def next_checkpoint(self, *, copy: bool = True) -> Checkpoint:
        """Trains to the next checkpoint step, past `n_steps` if it was reached.

        Args:
          copy: as of `run_until`.
        """
        self._run_end = None
        checkpoint = self._train_to(self._next_target()) or self._no_data()
        return self.owned(checkpoint) if copy else checkpoint

    def next_step(self, batch: PyTree = None) -> Checkpoint:
        """Trains a single step: on the next batch of the data, or on one that is given.

        A given batch may have any form that a stream may yield, and any size. The data stays
        where it is, so the two can be mixed. A task that is only trained on given batches needs no
        data, but its loop needs an `input_sample`. With several processes, each gives its part.

        After an exception in a callback, the next call only finishes that step.

        >>> import numpy as np, optax
        >>> x = np.ones((8, 1), np.float32)
        >>> task = TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse")
        >>> init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
        >>> loop = TrainLoop(init, task, 0, input_sample=x, stdout=False)
        >>> loop.next_step((x, 2 * x)).loss, loop.next_step((x[:3], x[:3])).step
        (4.0, 2)
        """
        step = self.step + 1
        return self.owned(self._train_to(lambda: step, batch) or self._no_data())

    def run(self, n: int) -> Iterator[Checkpoint]:
        """Yields the checkpoints of the next `n` steps, always including the last step."""
        return self.run_until(self.step + n)

    def run_until(self, step: int, *, copy: bool = True) -> Iterator[Checkpoint]:
        """Yields the checkpoints up to `step`, always including that step.

        Args:
          step: the step to stop at.
          copy: whether checkpoints own their arrays; else these can be read until the next step.
        """
        if step <= self.step and not self.n_completed_steps:
            self.say(f"step {step:,} is already reached (at step {self.step:,})")
        if self.stopped and self._is_at_start:
            self._say_if_complete()
            return self.close()
        while self.step < step or (self.step == step and self.n_completed_steps):
            self._run_end = step
            checkpoint = self._train_to(self._next_target(last=step))
            if checkpoint is None:
                return self.close()
            yield self.owned(checkpoint) if copy else checkpoint
            del checkpoint  # A copy that a callback was given is not to be held while training.
            if self.stopped:
                return self.close()

    # What the loop holds.

    @property
    def step(self) -> int:
        """The number of completed updates."""
        return self._stepper.step

    @property
    def state(self) -> TrainState:
        """The training state: an unreplicated copy, which stays valid."""
        copy = self._copy or self.strategy.collect
        # A function that JAX traces may ask for it.
        with self._stepper.interrupts.held(), jax.ensure_compile_time_eval():
            return copy(self._stepper.state)

    def owned(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with copies of what it borrows; itself with `snapshot="none"`."""
        if self._copy is None or not checkpoint.is_borrowed:
            return checkpoint
        with self._stepper.interrupts.held():
            return owned(checkpoint, self._copy)

    @property
    def state_in_place(self) -> TrainState:
        """The training state in place on the devices, not copied: the next step uses it up."""
        return self._stepper.state

    @property
    def revision(self) -> tuple[int, ...]:
        """Identifies the present state: its step, and how often something was set."""
        return self._stepper.revision

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The optimizer's hyperparameters by name, those of groups by group and name.

        An `OptimizerDef`, a `MultiOptimizer` and `optax.inject_hyperparams` have them. A scheduled
        one has the value of the latest step.
        """
        return _on_host(hyperparams(self._stepper.state.opt_state))

    def group_name(self, group: str | int) -> str:
        """The name of a group of the optimizer, given by name or position.

        Raises:
          ValueError: there is no such group; the error lists the groups.
        """
        return group_name(self._stepper.state.opt_state, group)

    def set_hyperparams(self, *, group: str | int | None = None, **values: Any) -> None:
        """Sets hyperparameters from the next step on, without recompilation.

        A value overrides a schedule until None clears it.

        >>> import numpy as np, optax
        >>> x = np.ones((8, 1), np.float32)
        >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
        >>> apply = lambda v, x, **_: (v["params"] * x, {})
        >>> loop = TrainLoop(
        ...     lambda rngs, x: {"params": np.zeros(1, np.float32)},
        ...     TrainTask(apply, optimizer, "mse", (x, 2 * x)), 0, n_steps=3, stdout=False,
        ... )
        >>> for checkpoint in loop:
        ...     loop.set_hyperparams(learning_rate=0.5 * loop.hyperparams["learning_rate"])
        >>> round(loop.hyperparams["learning_rate"], 4)
        0.0125

        Args:
          group: the group of a `MultiOptimizer`, by name or position; None: all groups.
          **values: numbers by name.

        Raises:
          ValueError: the optimizer has no such hyperparameter or group; the error lists them.
        """
        self._stepper.set_hyperparams(group, values)
        if self._due is not None:
            self._set_meanwhile.append((group, values))

    @property
    def freeze(self) -> Sequence[str]:
        """Patterns of the parameters that are not trained; takes effect at once when set.

        The update is compiled again, and the moments of the other parameters are kept.
        """
        return self._stepper.task.freeze

    @freeze.setter
    def freeze(self, patterns: str | Sequence[str]) -> None:
        self._stepper.freeze(patterns)
        self.task = self._stepper.task

    @property
    def norms(self) -> tuple[str, ...]:
        """Patterns of the parameters whose norms are reported: "grad_norm/..", "param_norm/.."."""
        return tuple(self._stepper.task.norms)

    @norms.setter
    def norms(self, patterns: Sequence[str]) -> None:
        self._stepper.set_norms(patterns)
        self.task = self._stepper.task

    @property
    def n_steps(self) -> int | None:
        """The step at which iteration ends; takes effect at once when set."""
        return self.schedule.last

    @n_steps.setter
    def n_steps(self, value: int | None) -> None:
        self.schedule = dataclasses.replace(self.schedule, last=value)

    @property
    def n_steps_per_checkpoint(self) -> int:
        """The number of steps between checkpoints; takes effect at once when set."""
        return self.schedule.every

    @n_steps_per_checkpoint.setter
    def n_steps_per_checkpoint(self, value: int) -> None:
        self.schedule = dataclasses.replace(self.schedule, every=value)

    @property
    def steps_per_call(self) -> int:
        """The steps per dispatch, with "auto" of the latest one; takes effect at once when set."""
        return self._steps_per_call

    @steps_per_call.setter
    def steps_per_call(self, value: int | str) -> None:
        self._is_auto = value == "auto"
        number = 1 if self._is_auto else whole_number("steps_per_call", value, other="auto")
        self._steps_per_call = number

    @property
    def first_checkpoint(self) -> int:
        """The step of the first checkpoint."""
        return self.schedule.first

    @first_checkpoint.setter
    def first_checkpoint(self, value: int) -> None:
        self.schedule = dataclasses.replace(self.schedule, first=value)

    @property
    def data(self) -> Data:
        """The stream of batches; set it to continue with other data and a new count."""
        return self._stepper.cursor.stream

    @data.setter
    def data(self, data: Data) -> None:
        self._stepper.set_data(data)
        self._forget_delivery()
        self._reset()
        self.stopped = self._is_finishing = self._is_at_start = False

    @property
    def callbacks(self) -> Any:
        """The callbacks; setting them attaches them to the loop."""
        return self._callbacks.given

    @callbacks.setter
    def callbacks(self, callbacks: Any) -> None:
        self._callbacks = CallbackList(callbacks)
        if self._due is not None:
            self._due.keep(self._callbacks)
        self.watchers: list[Callable[[int], None]] = []
        """Functions of the step, called after each dispatch. They must not read the device.

        With `steps_per_call="auto"` a dispatch takes one step if there are any.
        """
        self.dispatch_watchers: list[Callable[[int], None]] = []
        """As `watchers`, for functions that need not see each step."""
        self.starters: list[Callable[[int], None]] = []
        """Functions of the step, called before the first step after each checkpoint."""
        self._callbacks.attach(self)
        if self._is_at_start and self.start is not None:
            self._not_taken_over = self._callbacks.restore(self.start)

    def running_metrics(self) -> dict[str, Any]:
        """The metrics since the previous checkpoint; waits for the device."""
        return self._stepper.metrics()

    @property
    def input_shapes(self) -> Any:
        """The shapes and dtypes of the inputs of the first batch trained on; None before."""
        batch = self._stepper.loader.shapes
        return None if batch is None else batch.inputs

    def step_flops(self, batch_size: int | None = None) -> float:
        """The floating-point operations of one step on all devices, as XLA counts them.

        They are counted before compilation. The body of a `while` loop counts once, and a custom
        kernel not at all, so the result may be too low or `nan` for such a model; it is `nan` with
        `debug`. What `jax.checkpoint` recomputes counts again.

        Args:
          batch_size: examples in the step; None: those of a regular batch of the data.
        """
        return self.step_cost(batch_size).flops

    def step_cost(self, batch_size: int | None = None) -> StepCost:
        """The operations of one step, as `step_flops`, and whether some of them are recomputation.

        Args:
          batch_size: examples in the step; None: those of a regular batch of the data.
        """
        return self._stepper.cost(batch_size)

    def step_memory(self, batch_size: int | None = None) -> int:
        """The bytes that one step needs on each device, by XLA's plan for it.

        The step is compiled, but not run, so no batch is too large to ask about. Resident data and
        the next two batches are not counted.

        >>> import numpy as np, optax
        >>> x = np.ones((8, 1), np.float32)
        >>> task = TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse", (x, x))
        >>> init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
        >>> loop = TrainLoop(init, task, 0, stdout=False)
        >>> loop.step_memory(4096) > loop.step_memory(64)
        True

        Args:
          batch_size: examples in the step; None: those of a regular batch of the data.

        Raises:
          ValueError: the backend does not report it, several processes share the step, or it runs
            eagerly.
        """
        return self._stepper.count_bytes(batch_size)

    def restore(self, state: TrainState | Checkpoint) -> None:
        """Continues from another state, and from the data position of a checkpoint."""
        checkpoint = None if isinstance(state, TrainState) else state
        state = getattr(state, "state", state)
        if not isinstance(state, TrainState):
            raise TypeError(
                f"restore needs a TrainState or a Checkpoint, got {type(state).__name__}."
            )
        # Checked before anything changes.
        check_same_arrays(self._stepper.state, state)
        self._go_on_from(state, checkpoint)

    @property
    def n_completed_steps(self) -> int:
        """The number of updates since the previous checkpoint."""
        return self._stepper.tally.n_steps

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

    def snapshot(self) -> Checkpoint | None:
        """Returns a checkpoint of this moment, which callbacks do not see.

        The count continues. Resuming from it, by `restore` or from a file, reproduces this loop's
        metrics exactly. Returns None if that is not possible: while callbacks run, or while a
        fetched batch waits to be trained on.
        """
        if self._due is not None or not self._stepper.cursor.is_between_batches:
            return None
        if not self.n_completed_steps and self._last is not None:
            return self._last.replace(state=self.state)
        return self.owned(self._make_checkpoint(between=True).replace(last_grads=None))

    def finish(self) -> None:
        """Ends the run with the step that is being taken, whatever `n_steps` says.

        That step yields the last checkpoint, with `stop=True`. It can be called from a watcher, a
        callback, another thread, or the `for` over the loop, where no step is being taken and no
        further checkpoint comes.

        >>> import numpy as np, optax
        >>> x = np.ones((8, 1), np.float32)
        >>> task = TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse", (x, x))
        >>> init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
        >>> loop = TrainLoop(init, task, 0, n_steps=10, n_steps_per_checkpoint=5, stdout=False)
        >>> loop.watchers.append(lambda step: loop.finish() if step == 3 else None)
        >>> [(checkpoint.step, checkpoint.stop) for checkpoint in loop]
        [(1, False), (3, True)]
        """
        if self._phase or self.n_completed_steps:
            self._is_finishing = True
        else:
            self.stopped = True

    def close(self) -> None:
        """Closes all callbacks; the end of an iteration does so by itself."""
        self._callbacks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # How it trains.

    def _train_to(self, target: Callable[[], int], batch: PyTree = None) -> Checkpoint | None:
        """Trains to the step `target()`, or to the end of the data; None if that is here."""
        self._leave_start()
        before = self._phase
        try:
            self._phase, self._resumed = "training", time.perf_counter()
            with self._stepper.interrupts:
                self._train(target, batch)
        finally:
            self._elapsed += time.perf_counter() - self._resumed
            self._phase = before
        return self._deliver()

    def _train(self, target: Callable[[], int], batch: PyTree) -> None:
        """Takes steps until a checkpoint is due, and makes it."""
        stepper = self._stepper
        if self._due is None and not stepper.tally.n_steps and not stepper.cursor.ended:
            for start in self.starters:
                start(stepper.step)
        # Several processes may be told at different steps: a checkpoint settles it.
        is_alone = not stepper.consistency.is_needed
        while self._due is None and (n_left := target() - stepper.step) > 0:
            if stepper.cursor.ended and batch is None:
                break
            if self._is_finishing and stepper.tally.n_steps and is_alone:
                break
            n = 1 if batch is not None else self._steps_per_dispatch(n_left)
            if stepper.advance(n, batch):
                for watch in (*self.watchers, *self.dispatch_watchers):
                    watch(stepper.step)
        if self._due is None and stepper.tally.n_steps:
            stepper.consistency.checkpoint(stepper.step)
            checkpoint = self._make_checkpoint()
            self._warn_of_loss(checkpoint)
            stepper.interrupts.hold()
            self._due = Delivery(checkpoint, self._callbacks, self._settle)
            self._reset()
            stepper.interrupts.release()

    def _steps_per_dispatch(self, n_left: int) -> int:
        """How many of the steps that are left to take in the next dispatch."""
        if not self._is_auto:
            return min(self._steps_per_call, n_left)
        n_total = math.inf if self._run_end is None else self._run_end
        several = self._stepper.steps_per_call
        n = 1 if self.watchers else several(self.n_steps_per_checkpoint, n_total)
        self._steps_per_call = n
        return n if n <= n_left else 1

    def _warn_of_loss(self, checkpoint: Checkpoint) -> None:
        """Warns once when the loss is no longer finite."""
        is_finite = math.isfinite(checkpoint.scalars.get("loss", 0.0))
        if self._had_finite_loss and not is_finite:
            self.say(
                f"warning: the loss is {checkpoint.scalars['loss']} at step {checkpoint.step:,}. "
                "Lower the learning rate or clip the gradients; callbacks.StopOnNaN() ends such "
                "a run."
            )
        self._had_finite_loss = is_finite

    def _deliver(self) -> Checkpoint | None:
        """Shows the checkpoint to the callbacks; after an exception, to those still waiting."""
        if self._due is None:
            return None
        with self.in_phase("callbacks"):
            checkpoint = self._due.finish(self.owned, lambda: self.revision)
        self._due, self._set_meanwhile = None, []
        self._last = checkpoint.replace(state=None, last_grads=None)
        self.stopped = checkpoint.stop
        return checkpoint

    def _forget_delivery(self) -> None:
        """Forgets a checkpoint that callbacks are still to get, but not while they get it."""
        if self._phase != "callbacks":
            self._due = None
        self._set_meanwhile = []

    def _settle(self, checkpoint: Checkpoint) -> Checkpoint:
        """Adds what callbacks have set, and whether it is the last, before it is saved."""
        if self._set_meanwhile and hasattr(checkpoint.state, "opt_state"):
            # The callbacks remember that they have set these: a resumed run needs both.
            if checkpoint.is_borrowed:
                checkpoint = checkpoint.replace(state=self._stepper.borrowed()[0])
            else:
                opt_state = checkpoint.state.opt_state
                for group, values in self._set_meanwhile:
                    opt_state = set_hyperparams(opt_state, group=group, **values)
                state = checkpoint.state.replace(opt_state=opt_state)
                checkpoint = checkpoint.replace(state=state)
        self._set_meanwhile = []
        # A callback may have called `finish` just now.
        wanted, self._is_finishing = checkpoint.stop or self._is_finishing, False
        stop = self._stepper.consistency.stop(wanted)
        return checkpoint if stop == checkpoint.stop else checkpoint.replace(stop=stop)

    def _leave_start(self) -> None:
        """Marks that the run has moved on from what was restored."""
        if self._is_at_start and self._not_taken_over:
            self.say(f"from {self.start.path}: {'; '.join(self._not_taken_over)}")
        self._is_at_start = False

    def _say_if_complete(self) -> None:
        if self._is_at_start and self.start is not None:
            self.say(f"this run is complete: it was ended at step {self.step:,}")

    def _make_checkpoint(self, *, between: bool = False) -> Checkpoint:
        stepper = self._stepper
        # Work that does not wait for the devices comes before the metrics.
        state, grads = stepper.borrowed()
        position, running = stepper.cursor.position(), stepper.get_running(counts=between)
        metrics = stepper.metrics() | self._learning_rates()
        seconds = self._elapsed + time.perf_counter() - self._resumed
        return Checkpoint(
            step=stepper.step,
            state=state,
            metrics=metrics,
            modes=self._modes,
            n_completed_steps=stepper.tally.n_steps,
            n_examples=stepper.tally.n_examples,
            elapsed_time=seconds - stepper.preparation_time,
            compile_time=stepper.programs.seconds,
            stop=self._is_finishing and not between,
            data_state=position,
            running=running,
            last_grads=grads,
        )

    def _learning_rates(self) -> dict[str, float]:
        """The learning rates of the latest step, if the optimizer has them."""
        rates = learning_rates(self.hyperparams) if self._stepper.has_hyperparams else {}
        return {
            "learning_rate" if group is None else f"learning_rate/{group}": rate
            for group, rate in rates.items()
        }

    def _go_on_from(self, state: TrainState, checkpoint: Any) -> None:
        """Continues from a state, and from the position and counts of its checkpoint."""
        with quiet(not self._is_talking):
            self._stepper.cursor.move_to(getattr(checkpoint, "data_state", None))
        self._stepper.set_state(state)
        self._forget_delivery()
        self._last: Checkpoint | None = None
        self._is_at_start = False
        self._reset()
        if getattr(checkpoint, "running", None) is not None:
            self._stepper.set_running(checkpoint.running)

    def _reset(self) -> None:
        self._stepper.reset_totals()
        self._elapsed, self._resumed = 0.0, time.perf_counter()

    def _next_target(self, last: int | None = None) -> Callable[[], int]:
        """The step of the next checkpoint; a function, as the schedule may change on the way."""
        # After steps that no checkpoint has shown, one may still be due at this very step.
        here = self.step - bool(self.n_completed_steps)
        return lambda: self.schedule.after(here, last)

    def _end(self) -> Any:
        self.close()
        raise StopIteration

    def _no_data(self) -> Any:
        raise EndOfData(
            f"The data ended after step {self.step:,}. Set loop.data to go on with more, or build "
            "the stream with epochs=None to repeat it."
        )


def _on_host(values: dict[str, PyTree]) -> dict[str, Any]:
    """Hyperparameters as numbers, in the order of the groups."""
    fetched = {}
    for name, value in values.items():
        if isinstance(value, dict):
            fetched[name] = _on_host(value)
        else:
            fetched[name] = value.item() if value.ndim == 0 else jax.device_get(value)
    return fetched
