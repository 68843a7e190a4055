"""TrainLoop: an iterator over the checkpoints of a training run."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax

from flaxfit.display import say, start_lines
from flaxfit.display._tracebacks import short_errors
from flaxfit.loop._access import by_one_thread
from flaxfit.loop._callback_list import CallbackList
from flaxfit.loop._checkpointing import Checkpointing
from flaxfit.loop._compilation_cache import use_compilation_cache
from flaxfit.loop._default_strategy import strategy_for
from flaxfit.loop._idle_gpu import warn_of_idle_gpu
from flaxfit.loop._ownership import copier
from flaxfit.loop._record import LossWarning
from flaxfit.loop._schedule import Schedule
from flaxfit.loop._stepper import Stepper
from flaxfit.loop._stopwatch import Stopwatch
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.strategies import Strategy
from flaxfit.task._task import TrainTask, with_collections
from flaxfit.tree._context_mesh import without_mesh
from flaxfit.tree._jax_debugging import check_jit
from flaxfit.tree._types import PyTree

_REPEATED = "flaxfit.data.as_stream(data, epochs=n) repeats a loader or a list of batches"


class EndOfData(Exception):
    """Raised by `next_step` and `next_checkpoint` when the data has no further batch.

    >>> issubclass(EndOfData, Exception)
    True
    """


class TrainLoop(Checkpointing):
    """Trains a task, yielding a checkpoint at step 1, 1 + n, 1 + 2n, ... and at the last step.

    Your `for` drives it; between checkpoints nothing is read from the device. After an exception,
    including Ctrl-C, the loop continues where it was. There is one run per loop: a second
    `iter(loop)` continues it.

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
        self.strategy = strategy = strategy_for(task, devices, strategy, is_eager=debug)
        self._copy = copier(snapshot, strategy)
        self.schedule = Schedule(first_checkpoint, n_steps_per_checkpoint, n_steps)
        self._is_talking = stdout
        self.say = say if stdout else lambda text: None
        if strategy.runs_eagerly:
            self.say("debug mode: nothing is compiled, which is slow; it runs on one device")
        else:
            check_jit()
        self._stepper = Stepper(
            task, strategy, grad_norm=grad_norm, keep_grads=keep_grads, say=self.say
        )
        self.steps_per_call = steps_per_call
        self._warn_of_loss = LossWarning(self.say)
        self._watch = Stopwatch()
        CallbackList(callbacks).attach_first(self)
        self._begin(init, rnkey, input_sample, callbacks)
        self.callbacks = callbacks

    # Driving the loop: each is a choice of where to train to.

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
        # Steps past an end that was set to an earlier step are still to be shown.
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

        >>> import numpy as np, optax
        >>> x = np.ones((8, 1), np.float32)
        >>> task = TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse")
        >>> init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
        >>> loop = TrainLoop(init, task, 0, input_sample=x, stdout=False)
        >>> loop.next_step((x, 2 * x)).loss, loop.next_step((x[:3], x[:3])).step
        (4.0, 2)
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
        n_total = self.fit_steps or step
        while self.step < step or (self.step == step and self.n_completed_steps):
            checkpoint = self._train_to(self._next_target(last=step), n_total=n_total)
            if checkpoint is None:
                return self.close()
            yield self.owned(checkpoint) if copy else checkpoint
            del checkpoint  # A copy that a callback was given is not to be held while training.
            if self.stopped:
                return self.close()

    # How it trains.

    @by_one_thread
    def _train_to(
        self, target: Callable[[], int], batch: PyTree = None, *, n_total: int | None = None
    ) -> Checkpoint | None:
        """Trains to the step `target()`, which may change on the way, or to the end of the data.

        Returns None if no step was left. With a `batch` it trains on that, not on the stream's.
        `n_total` is the number of steps of the run, if it is known.
        """
        if self._is_at_start and self._not_taken_over:
            self.say(f"from {self.start.path}: {'; '.join(self._not_taken_over)}")
        if self._is_at_start and self.epoch_number is None:  # `fit` says it with its data.
            n_params = sum(leaf.size for leaf in jax.tree.leaves(self.state_in_place.params))
            devices = self.strategy.devices
            line, *_ = start_lines(
                "training",
                n_params=n_params,
                n_devices=len(devices),
                platform=devices[0].platform,
            )
            self.say(line)
        self._is_at_start = False
        stepper, before = self._stepper, self._phase
        stepper.companions.refresh()
        self._phase = "training"
        try:
            with self._watch, stepper.interrupts, without_mesh():
                if self._due is None and not stepper.tally.n_steps and not stepper.cursor.ended:
                    for start in self.starters:
                        start(stepper.step)
                # Processes may be asked to finish at different steps: a checkpoint decides for all.
                is_alone = not stepper.consistency.is_needed
                while self._due is None and (n_left := target() - stepper.step) > 0:
                    if stepper.cursor.ended and batch is None:
                        break
                    if self._is_finishing and stepper.tally.n_steps and is_alone:
                        break
                    for start in self.step_starters:
                        start(stepper.step)
                    # With "auto" a watcher sees each step.
                    is_watched = self.watchers or self.step_starters
                    spacing = 1 if is_watched else self.schedule.every
                    if stepper.advance(n_left, batch, spacing=spacing, n_total=n_total):
                        for watch in (*self.watchers, *self.dispatch_watchers):
                            watch(stepper.step)
                if self._due is None and stepper.tally.n_steps:
                    self._end_span()
        finally:
            self._phase = before
        return self._deliver()

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
