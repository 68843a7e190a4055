"""EvalLoop: measures a state over a data set; as a callback, adds `val_` metrics."""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from flaxfit import _totals
from flaxfit._checkpoint import Checkpoint
from flaxfit._feed import Feed
from flaxfit._inspect import shapes_of
from flaxfit._step import compute, make_eval_step
from flaxfit._task import EvalTask
from flaxfit.data import one_pass
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
      strategy: where arrays live; None: that of the loop whose callback this is, else all local
        devices.
    """

    def __init__(
        self,
        task: EvalTask,
        *,
        name: str = "val",
        n_steps: int | None = None,
        strategy: Strategy | None = None,
    ):
        if n_steps is not None and n_steps < 1:
            raise ValueError(f"n_steps must be 1 or more, or None, got {n_steps}.")
        self.task = task
        self.name = name
        self.n_steps = n_steps
        self._strategy = strategy
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
        feed = Feed(self.strategy, pad=True, say=lambda text: None)
        state = self.strategy.place(state)
        totals, in_flight = None, deque()
        batches = one_pass(self.task.data if data is None else data)
        for item in itertools.islice(batches, self.n_steps):
            strategy, batch, signature = feed(item)
            if totals is None:
                totals = self._zero_totals(state, batch)
            arguments = (state, totals, strategy.split(batch))
            if signature not in self._executables:
                self._executables[signature] = strategy.compile(self._update(), arguments)
            totals = self._executables[signature](*arguments)
            in_flight.append(totals)
            if len(in_flight) > 2:
                jax.block_until_ready(in_flight.popleft())
        if totals is None:
            raise ValueError("There is nothing to evaluate: the data holds no batches.")
        return compute(_totals.read(totals), self.task.metrics)

    def _zero_totals(self, state: Any, batch: Any) -> Any:
        measure = make_eval_step(self.task)
        return _totals.zero_totals(jax.eval_shape(measure, shapes_of(state), shapes_of(batch)))

    def _update(self) -> Callable[..., Any]:
        measure = make_eval_step(self.task, axis_name=self.strategy.axis_name)
        return lambda state, totals, batch: _totals.add(totals, measure(state, batch))
