"""TrainLoop: an iterator over the checkpoints of a training run."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax

from flaxfit import _totals
from flaxfit._batch import normalize
from flaxfit._checkpoint import Checkpoint
from flaxfit._display import say
from flaxfit._feed import Feed, Portion, stack_batches
from flaxfit._inspect import inspect, shapes_of
from flaxfit._interrupt import Interrupts
from flaxfit._start import start
from flaxfit._state import TrainState
from flaxfit._step import compute
from flaxfit._task import TrainTask
from flaxfit._update import make_update
from flaxfit.data import as_stream
from flaxfit.strategies import DataParallel, Strategy

# On a CPU with several devices, unbounded dispatch of collectives aborts the process.
_STEPS_IN_FLIGHT = 2


class EndOfData(Exception):
    """Raised by `next_step` and `next_checkpoint` when the data has no further batch."""


class TrainLoop:
    """Trains a task, yielding a checkpoint at step 1, 1 + n, 1 + 2n, ... and at the last step.

    The user's own `for` drives it; between two checkpoints nothing is read from the device.
    After an exception, Ctrl-C included, the loop goes on where it was. There is one run per loop:
    a second `iter(loop)` continues the same one.

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
      rnkey: a random key or an integer seed; not needed where `init` brings a state along.
      input_sample: the inputs of a batch, for their shapes; None looks at the first batch (which
        is then trained on).
      n_steps_per_checkpoint: steps from one checkpoint to the next.
      n_steps: the step to end at, counted from step 0; None: until the data ends.
      collections: names of random streams, in place of the task's `rngs`.
      mutable_collections: in place of the task's `mutable`.
      devices: the devices of a `DataParallel` strategy.
      strategy: where arrays live; None: `DataParallel(devices)`.
      callbacks: functions `Checkpoint -> Checkpoint | None`, called before each yield.
      first_checkpoint: the step of the first checkpoint; `n_steps_per_checkpoint` gives n, 2n, ...
      steps_per_call: steps per dispatch to the device.
      keep_grads: whether checkpoints hold the gradients of their last step.
      grad_norm: whether to report the norm of the gradients.
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
        collections: Any = None,
        mutable_collections: Any = None,
        devices: Sequence[Any] | None = None,
        strategy: Strategy | None = None,
        callbacks: Any = (),
        first_checkpoint: int = 1,
        steps_per_call: int = 1,
        keep_grads: bool = False,
        grad_norm: bool = True,
        stdout: bool = True,
    ):
        if devices is not None and strategy is not None:
            raise ValueError(
                "Give either devices or a strategy, not both: strategies hold devices."
            )
        self.task = _with_collections(task, collections, mutable_collections)
        self.strategy = strategy or DataParallel(devices)
        self.n_steps_per_checkpoint = n_steps_per_checkpoint
        self.n_steps = n_steps
        self.first_checkpoint = _positive("first_checkpoint", first_checkpoint)
        self.steps_per_call = _positive("steps_per_call", steps_per_call)
        self._options = {"grad_norm": grad_norm, "keep_grads": keep_grads}
        self._say = say if stdout else lambda text: None
        self._interrupts = Interrupts()
        self._executables: dict[Any, Callable[..., Any]] = {}
        self._in_flight: deque[jax.Array] = deque()
        self.data = self.task.data
        self.input_shapes: Any = None
        """The shapes and dtypes of the inputs of the first batch that was trained on."""

        def sample() -> Any:
            return normalize(self._first() if input_sample is None else (input_sample,)).inputs

        beginning = start(init, self.task, rnkey, sample, self._say)
        self._set_state(beginning.state)
        self.start = beginning.checkpoint
        """The checkpoint file that the run was restored from, or None."""
        if self.start is not None and self.start.data_state is not None:
            self._set_position(self.start.data_state)
        self.callbacks = callbacks

    # Driving the loop: each is a choice of where to train to.

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Checkpoint:
        if self.n_steps is not None and self.step >= self.n_steps and self._due is None:
            if not self._has_trained:
                self._say(f"step {self.n_steps:,} is already reached (at step {self.step:,})")
            self._end()
        if self.stopped:
            self._end()
        return self._train_to(self._next_stop()) or self._end()

    def next_checkpoint(self) -> Checkpoint:
        """Trains to the next checkpoint step; past `n_steps` where that is reached already."""
        return self._train_to(self._next_stop()) or self._no_data()

    def next_step(self) -> Checkpoint:
        """Trains a single step."""
        step = self.step + 1
        return self._train_to(lambda: step) or self._no_data()

    def run(self, n: int) -> Iterator[Checkpoint]:
        """Yields the checkpoints of the next `n` steps; the last of them always is one."""
        return self.run_until(self.step + n)

    def run_until(self, step: int) -> Iterator[Checkpoint]:
        """Yields the checkpoints up to `step`, which always is one."""
        if step <= self.step:
            self._say(f"step {step:,} is already reached (at step {self.step:,})")
        while self.step < step:
            stop = self._next_stop(last=lambda: step)
            checkpoint = self._train_to(stop)
            if checkpoint is None:
                return
            yield checkpoint
            if self.stopped:
                return

    # What the loop holds.

    @property
    def state(self) -> TrainState:
        """The training state: an unreplicated copy that stays valid."""
        return self.strategy.collect(self._state)

    @property
    def n_steps(self) -> int | None:
        """The step at which iteration ends; takes effect at once when set."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int | None) -> None:
        if value is not None and value < 0:
            raise ValueError(f"n_steps must be 0 or more, or None, got {value}.")
        self._n_steps = value

    @property
    def n_steps_per_checkpoint(self) -> int:
        """The steps between checkpoints; takes effect at once when set."""
        return self._n_steps_per_checkpoint

    @n_steps_per_checkpoint.setter
    def n_steps_per_checkpoint(self, value: int) -> None:
        self._n_steps_per_checkpoint = _positive("n_steps_per_checkpoint", value)

    @property
    def data(self) -> Any:
        """The stream of batches; set it to go on with other data."""
        return self._stream

    @data.setter
    def data(self, data: Any) -> None:
        self._stream = as_stream(data)
        self._fetched: list[Any] = []
        self._feed: Feed | None = None
        self._due: tuple[Checkpoint, list[Any]] | None = None
        self._ended = self.stopped = False

    @property
    def callbacks(self) -> Any:
        """The callbacks; those that have an `attach` get to know the loop when set."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Any) -> None:
        self._callbacks = (callbacks,) if callable(callbacks) else tuple(callbacks)
        self.watchers: list[Callable[[int], None]] = []
        """Functions of the step, called after each dispatch. They must not read the device."""
        for callback in self._callbacks:
            if hasattr(callback, "attach"):
                callback.attach(self)

    def running_metrics(self) -> dict[str, Any]:
        """The metrics since the previous checkpoint so far; waits for the device."""
        if not self._n_completed:
            return {}
        return compute(_totals.read(self._totals, self._sums), self.task.metrics)

    def restore(self, state: TrainState | Checkpoint) -> None:
        """Goes on from another state; a checkpoint brings its data position along."""
        if isinstance(state, TrainState):
            return self._set_state(state)
        self._set_state(state.state)
        if state.data_state is not None:
            self._set_position(state.data_state)
        return None

    def close(self) -> None:
        """Closes the callbacks; iteration that comes to its end does so by itself."""
        for callback in self.callbacks:
            if hasattr(callback, "close"):
                callback.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # How it trains.

    def _train_to(self, stop: Callable[[], int]) -> Checkpoint | None:
        """Trains to the step `stop()`, or to the end of the data; None if that is here."""
        with self._interrupts.watched(), self._timed():
            while self._due is None and self.step < stop() and not self._ended:
                self._advance(stop() - self.step)
            if self._due is None and self._n_completed:
                checkpoint = self._make_checkpoint()
                self._interrupts.hold()
                self._due = (checkpoint, list(self.callbacks))
                self._reset_totals()
                self._interrupts.release()
        return None if self._due is None else self._deliver()

    def _advance(self, n: int) -> None:
        """Makes one dispatch: of `steps_per_call` steps where `n` allows it, else of one."""
        # From here to the release an interrupt waits, so that no batch and no state is lost.
        self._interrupts.hold()
        try:
            portions = self._fetch(self.steps_per_call if n >= self.steps_per_call else 1)
            if not portions:
                self._ended = True
                return
            token = self._dispatch(portions)
        finally:
            self._interrupts.release()
        self._in_flight.append(token)
        if len(self._in_flight) > _STEPS_IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()
        for watch in self.watchers:
            watch(self.step)

    def _fetch(self, n: int) -> list[Portion]:
        """The next `n` batches if they share a program, else one; none at the end of the data."""
        while len(self._fetched) < n:
            try:
                self._fetched.append(next(self._stream))
            except StopIteration:
                break
        if not self._fetched:
            return []
        if self._feed is None:
            self._feed = self._make_feed(self._fetched[0])
        portions = [self._feed(item) for item in self._fetched[:n]]
        alike = len(portions) == n and len({p.signature for p in portions}) == 1
        return portions if alike else portions[:1]

    def _dispatch(self, portions: list[Portion]) -> jax.Array:
        """Runs the compiled update. What was fetched is let go once the new state is stored."""
        strategy, batch, is_weighted, signature = portions[0]
        n = len(portions)
        if n > 1:
            batch = stack_batches([portion.batch for portion in portions])
        batch = strategy.split(batch, n if n > 1 else 0)
        whole = strategy is self.strategy
        state, totals = self._state, self._totals
        if not whole:
            state, totals = strategy.place((state, totals))
        update = self._executables.get((n, signature))
        if update is None:
            update = self._compile(portions, (state, totals, batch))
        state, totals, (token, grads) = update(state, totals, batch)
        if not whole:
            state, totals = self.strategy.place((state, totals))
        self._state, self._totals, self._grads = state, totals, grads
        self.step += n
        self._n_completed += n
        self._has_trained = True
        del self._fetched[:n]
        return token

    def _compile(self, portions: list[Portion], arguments: tuple[Any, ...]) -> Any:
        began = time.perf_counter()
        strategy, batch, is_weighted, signature = portions[0]
        update = make_update(
            self.task,
            axis_name=strategy.axis_name,
            n_steps=len(portions),
            skip_empty=is_weighted,
            **self._options,
        )
        update = strategy.compile(update, arguments, n_donated=2)
        seconds = time.perf_counter() - began
        self._compile_time += seconds
        shapes = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(batch[:2]))
        self._say(
            f"compiled the training step {'again ' * bool(self._executables)}in {seconds:.1f}s, "
            f"for batches of {shapes} on {strategy.n_devices} device(s)"
        )
        self._executables[len(portions), signature] = update
        return update

    def _deliver(self) -> Checkpoint:
        """Shows the checkpoint to the callbacks; after an interrupt, to those still waiting."""
        checkpoint, waiting = self._due
        while waiting:
            checkpoint = waiting[0](checkpoint) or checkpoint
            del waiting[0]
            self._due = (checkpoint, waiting)
        self._due = None
        self.stopped = checkpoint.stop
        return checkpoint

    def _make_checkpoint(self) -> Checkpoint:
        metrics = compute(_totals.read(self._totals, self._sums), self.task.metrics)
        state, grads = self.strategy.collect((self._state, self._grads))
        get_position = getattr(self._stream, "get_state", None)
        return Checkpoint(
            step=self.step,
            state=state,
            metrics=metrics,
            n_completed_steps=self._n_completed,
            elapsed_time=self._elapsed + time.perf_counter() - self._resumed - self._compile_time,
            compile_time=self._compile_time,
            data_state=get_position() if get_position else None,
            last_grads=grads,
        )

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        self._resumed = time.perf_counter()
        try:
            yield
        finally:
            self._elapsed += time.perf_counter() - self._resumed

    def _make_feed(self, item: Any) -> Feed:
        """Looks at the first batch: the sums that it gives, and whether batches can be padded."""
        batch = normalize(item)
        self.input_shapes = shapes_of(batch.inputs)
        whole = self._stream.whole() if hasattr(self._stream, "whole") else None
        data = None if whole is None else normalize(whole)
        result = inspect(self.task, self._state, batch, data)
        names = ["grad_norm"] * self._options["grad_norm"]
        names += ["penalty"] * (result.penalty is not None)
        pair = (jax.ShapeDtypeStruct((), "float32"),) * 2
        self._sums = {**result.sums, **dict.fromkeys(names, pair)}
        if not self._n_completed:
            self._reset_totals()
        why_not = ""
        if not self.task.pad:
            why_not = "the task has pad=False"
        elif result.values.ndim == 0:
            why_not = "the loss returns a scalar, not one value per example"
        elif jax.tree.leaves(self._state.model_state) and self.task.mutable not in (False, (), []):
            why_not = "the model keeps statistics of what it sees, such as BatchNorm's"
        return Feed(self.strategy, pad=not why_not, why_not=why_not, say=self._say)

    def _next_stop(self, last: Callable[[], int | None] | None = None) -> Callable[[], int]:
        """Where the next checkpoint is due; a function, as the settings may change on the way."""
        here = self.step

        def stop() -> int:
            first, n = self.first_checkpoint, self.n_steps_per_checkpoint
            target = max(first, first + ((here - first) // n + 1) * n)
            end = self.n_steps if last is None else last()
            return min(target, end) if end is not None and here < end else target

        return stop

    def _first(self) -> Any:
        """The first batch, which stays there to be trained on."""
        if not self._fetched:
            try:
                self._fetched.append(next(self._stream))
            except StopIteration:
                raise ValueError(
                    "The data holds no batches: there is nothing to train on."
                ) from None
        return self._fetched[0]

    def _set_state(self, state: TrainState) -> None:
        self._state = self.strategy.place(state)
        self.step = int(state.step)
        """How many updates were done; on the host, as reading the device's would wait for it."""
        self._due = None
        self._has_trained = False
        self._sums: Any = {}
        self._reset_totals()
        self._feed = None

    def _set_position(self, data_state: Any) -> None:
        if hasattr(self._stream, "set_state"):
            self._stream.set_state(data_state)
            self._fetched = []
            self._ended = False

    def _reset_totals(self) -> None:
        self._totals = _totals.zero_totals(self._sums)
        self._grads = None
        self._n_completed = 0
        self._compile_time = self._elapsed = 0.0
        self._resumed = time.perf_counter()

    def _end(self) -> Any:
        self.close()
        raise StopIteration

    def _no_data(self) -> Any:
        raise EndOfData(
            f"The data ended after step {self.step:,}. Set loop.data to go on with more, or build "
            "the stream with epochs=None to repeat it."
        )


def _with_collections(task: TrainTask, collections: Any, mutable: Any) -> TrainTask:
    """The task with the ancestor's arguments taken over."""
    changes: dict[str, Any] = {}
    if collections is not None:
        if tuple(task.rngs) != ("dropout",):
            raise ValueError(f"Give either collections or the task's rngs ({task.rngs}), not both.")
        names = collections.get("apply", ()) if isinstance(collections, dict) else collections
        changes["rngs"] = tuple(names)
    if mutable is not None:
        if task.mutable is not None:
            raise ValueError("Give either mutable_collections or the task's mutable, not both.")
        changes["mutable"] = mutable
    return dataclasses.replace(task, **changes) if changes else task


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be 1 or more, got {value}.")
    return value
