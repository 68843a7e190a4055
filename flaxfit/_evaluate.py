"""EvalLoop: measures a state over a data set; as a callback, adds `val_` metrics."""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from flaxfit import _totals
from flaxfit._batch import Batch, normalize
from flaxfit._checkpoint import Checkpoint
from flaxfit._feed import Feed
from flaxfit._inspect import inspect_eval, shapes_of
from flaxfit._step import compute, make_eval_step
from flaxfit._task import EvalTask
from flaxfit.data import as_stream, one_pass
from flaxfit.optim import swap_ema
from flaxfit.strategies import DataParallel, Strategy


class EvalLoop:
    """Measures the metrics of a task, exactly: sums over all examples, divided once.

    Called with a checkpoint it returns that checkpoint with `val_<metric>` added, so that it
    serves as a callback; several with different names can be chained.

    >>> import numpy as np
    >>> from flaxfit import InferenceState
    >>> x = np.arange(5, dtype=np.float32)
    >>> evaluate = EvalLoop(EvalTask(lambda v, x: v["params"] * x, ["mse"], (x, x)))
    >>> evaluate.measure(InferenceState(np.int32(0), np.float32(2), {}))
    {'mse': 6.0}

    Args:
      task: what to measure, on one pass over its data.
      name: the prefix of the metrics that a checkpoint is given.
      n_steps: how many batches to measure; None: all of one pass.
      ema: whether to measure the moving average of the parameters.
      strategy: where arrays live; None: that of the loop whose callback this is, else all local
        devices.
    """

    def __init__(
        self,
        task: EvalTask,
        *,
        name: str = "val",
        n_steps: int | None = None,
        ema: bool = False,
        strategy: Strategy | None = None,
    ):
        if n_steps is not None and n_steps < 1:
            raise ValueError(f"n_steps must be 1 or more, or None, got {n_steps}.")
        self.task = task
        self.name = name
        self.n_steps = n_steps
        self.ema = ema
        self._strategy = strategy
        # Made a stream once, so that wide arrays are narrowed once and not at each measurement.
        self._data = None if task.data is None else as_stream(task.data)
        self._executables: dict[Any, Callable[..., Any]] = {}

    @property
    def strategy(self) -> Strategy:
        """Where arrays live."""
        self._strategy = self._strategy or DataParallel()
        return self._strategy

    def attach(self, loop: Any) -> None:
        """Takes over the strategy of the loop, where none was given."""
        self._strategy = self._strategy or loop.strategy

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with the metrics of its state added."""
        return checkpoint.with_metrics(self.measure(checkpoint.state), f"{self.name}_")

    def measure(self, state: Any, data: Any = None) -> dict[str, Any]:
        """The metrics of a state over the task's data, or over other data.

        Raises:
          ValueError: the data holds no batches.
        """
        batches = one_pass(self._data if data is None else data)
        state = swap_ema(state) if self.ema else state
        strategy, state = self.strategy, self.strategy.share(state)
        feed, sums, totals, in_flight = None, None, None, deque()
        for item in itertools.islice(batches, self.n_steps):
            if feed is None:
                feed, sums = self._look_at(normalize(item), state, batches)
                totals = _totals.zero_totals(sums)
            portion = feed(item)
            if portion.strategy is not strategy:
                strategy = portion.strategy
                state, totals = strategy.share((state, totals))
            arguments = (state, totals, strategy.split(portion.batch))
            update = self._executables.get(portion.signature)
            if update is None:
                update = self._executables[portion.signature] = self._compile(strategy, arguments)
            totals = update(*arguments)
            in_flight.append(totals)
            if len(in_flight) > 2:
                jax.block_until_ready(in_flight.popleft())
        if totals is None:
            raise ValueError("There is nothing to evaluate: the data holds no batches.")
        return compute(_totals.read(totals, sums), self.task.metrics)

    def _look_at(self, batch: Batch, state: Any, batches: Any) -> tuple[Feed, Any]:
        """Checks the first batch; whether batches can be padded, and the sums that they give."""
        bind = self.strategy.bind
        values = inspect_eval(self.task, state, batch, bind)
        is_scalar = values is not None and values.ndim == 0
        sums = jax.eval_shape(bind(make_eval_step(self.task)), shapes_of(state), shapes_of(batch))
        feed = Feed(
            self.strategy,
            pad=not is_scalar,
            why_not="the loss returns a scalar, not one value per example",
            size=0 if is_scalar else getattr(batches, "batch_size", 0),
        )
        return feed, sums

    def _compile(self, strategy: Strategy, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        measure = make_eval_step(self.task, axis_name=strategy.axis_name)

        def update(state: Any, totals: Any, batch: Any) -> Any:
            return _totals.add(totals, measure(state, batch))

        return strategy.compile(update, arguments)
