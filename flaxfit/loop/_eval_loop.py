"""EvalLoop: measures a state over a data set; as a callback, adds `val_` metrics."""

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from flaxfit.data import as_stream, one_pass
from flaxfit.data._batch import Batch, normalize
from flaxfit.data._stream import pass_length
from flaxfit.loop._consistency import Consistency
from flaxfit.loop._local_rows import LocalBatches
from flaxfit.loop._padding import Padder
from flaxfit.metrics._monitor import modes_of
from flaxfit.optim import averaged
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.step import _metric_totals
from flaxfit.step._error_messages import calls_explained
from flaxfit.step._train_step import compute, evaluated, make_eval_step
from flaxfit.step._validate import inspect_eval, structure_of
from flaxfit.strategies import DataParallel, Strategy
from flaxfit.task._task import EvalTask
from flaxfit.tree._checks import whole_number
from flaxfit.tree._jax_debugging import debugging_explained
from flaxfit.tree._types import Data, Function, PyTree


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
      ema: whether to measure the average of the parameters, that of `ema=` or of a schedule-free
        optimizer.
      strategy: where arrays live; None: that of the loop whose callback this is, else all local
        devices.
    """

    borrows = True
    """It only reads what a checkpoint holds."""

    def __init__(
        self,
        task: EvalTask,
        *,
        name: str = "val",
        n_steps: int | None = None,
        ema: bool = False,
        strategy: Strategy | None = None,
    ):
        if n_steps is not None:
            whole_number("n_steps", n_steps)
        self.task = task
        self.name = name
        self.n_steps = n_steps
        self.ema = ema
        self._strategy = strategy
        self._is_given = strategy is not None
        # Made a stream once, so that wide arrays are narrowed once and not at each measurement.
        self._data = None if task.data is None else as_stream(task.data)
        self._checked: Any = None  # The data whose values were checked whole.
        self._forget()

    def _forget(self) -> None:
        """Begins without what was compiled and traced."""
        self._executables: dict[Any, Function] = {}
        self._traced: dict[Any, Any] = {}

    @property
    def strategy(self) -> Strategy:
        """Where arrays live."""
        self._strategy = self._strategy or DataParallel()
        return self._strategy

    def attach(self, loop: Any) -> None:
        """Takes over the strategy of the loop, where none was given."""
        if not self._is_given and self._strategy is not loop.strategy:
            self._strategy = loop.strategy
            self._forget()

    @property
    def adds(self) -> dict[str, str | None]:
        """The metrics that it adds to a checkpoint: name -> "min", "max" or None."""
        loss = {} if self.task.loss is None else {f"{self.name}_loss": "min"}
        return loss | modes_of(self.task.metrics, f"{self.name}_")

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with the metrics of its state added."""
        measured = checkpoint.with_metrics(self.measure(checkpoint.state), f"{self.name}_")
        return measured.replace(modes={**checkpoint.modes, **self.adds})

    @debugging_explained()
    def measure(self, state: PyTree, data: Data = None) -> dict[str, Any]:
        """The metrics of a state over the task's data, or over other data.

        Raises:
          ValueError: the data holds no batches.
        """
        data = self._given(data)
        strategy, consistency = self.strategy, Consistency(self.strategy)
        batches = self._pass(data)
        state = strategy.share(self._measured(state))
        shapes = structure_of(state)
        feed, sums, totals, in_flight, n_batches = None, None, None, deque(), 0
        for item in itertools.islice(batches, self.n_steps):
            if feed is None:
                feed, sums = self._look_at(batches.examples(item), state, batches, data)
                totals = _metric_totals.zero_totals(sums)
            portion, batch, *_ = batches.load(item, feed)
            position = (np.uint32(n_batches),) if self.task.rngs else ()
            n_batches += 1
            if portion.strategy is not strategy:
                strategy = portion.strategy
                state, totals = strategy.share((state, totals))
            arguments = (state, totals, *position, batch)
            key = (portion.signature, shapes)
            update = self._executables.get(key)
            if update is None:
                consistency.program(n_batches, portion.batch)
                with calls_explained(portion.batch.inputs, portion.batch.targets):
                    update = self._executables[key] = self._compile(strategy, arguments)
            totals = update(*arguments)
            in_flight.append(totals)
            if len(in_flight) > 2:
                jax.block_until_ready(in_flight.popleft())
        consistency.end("evaluation", n_batches, in_flight)
        if totals is None:
            raise ValueError("There is nothing to evaluate: the data holds no batches.")
        where = " in the data that was measured"
        return compute(_metric_totals.reader(sums)(totals), self.task.metrics, where)

    def check(
        self, state: PyTree, data: Data = None, *, in_phase: Callable[[str], Any] = nullcontext
    ) -> None:
        """Looks at the first batch, as `measure` would, without measuring anything.

        Args:
          state: as of `measure`.
          data: as of `measure`.
          in_phase: of the loop that this is done for.

        Raises:
          ValueError: labels, weights or the shape of the loss do not fit.
        """
        data = self._given(data)
        batches = self._pass(data)
        with in_phase("training"):
            item = next(iter(batches), None)
        if item is not None:
            with in_phase("preparing"):
                self._look_at(batches.examples(item), self._measured(state), batches, data)

    def _given(self, data: Data) -> Any:
        """The data to measure on: that of the task, where no other is given."""
        if data is None and self._data is None:
            raise ValueError(
                "There is nothing to evaluate: give data to the task, EvalTask(..., data=(x, y)), "
                "or to measure(state, data)."
            )
        return self._data if data is None else data

    def _pass(self, data: Data) -> LocalBatches:
        """The batches of one pass over the data."""
        stream = one_pass(data)
        if self.n_steps is None:
            pass_length(stream, "Give EvalLoop(n_steps=...), or data that ends.")
        return LocalBatches(stream, self.strategy)

    def _measured(self, state: PyTree) -> Any:
        """The part of a state that is measured."""
        state = averaged(state) if self.ema else state
        return evaluated(state, self.task.rngs, f"EvalTask(rngs={self.task.rngs})")

    def _look_at(
        self, batch: Batch, state: PyTree, batches: LocalBatches, data: Data
    ) -> tuple[Padder, Any]:
        """Checks the first batch; whether batches can be padded, and the sums that they give."""
        bind = self.strategy.bind
        is_known, self._checked = data is self._checked, data
        whole = None if is_known else batches.whole()
        whole = None if whole is None else normalize(whole)
        result = inspect_eval(self.task, state, batch, whole, bind, self._traced)
        why_not = "the loss returns a scalar, not one value per example"
        is_scalar = result.values is not None and result.values.ndim == 0
        feed = Padder(
            self.strategy,
            pad=self.task.pad and not is_scalar,
            why_not=why_not if is_scalar else "the task has pad=False",
            size=batches.batch_size,
            is_own=batches.is_own,
        )
        return feed, result.sums

    def _compile(self, strategy: Strategy, arguments: tuple[PyTree, ...]) -> Function:
        measure = make_eval_step(
            self.task,
            axis_name=strategy.axis_name,
            virtual_replicas=strategy.virtual_replicas,
        )

        def update(state: PyTree, totals: PyTree, *positioned: PyTree) -> Any:
            *position, batch = positioned
            return strategy.constrain(
                _metric_totals.add(totals, measure(state, batch, *position)), state
            )

        return strategy.compile(update, arguments)
