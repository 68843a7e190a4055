"""EvalLoop: measures a state over a data set; as a callback, adds `val_` metrics."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from flaxfit.data import as_stream
from flaxfit.data._batch import Batch
from flaxfit.loop._collected_rows import CollectedRows, check_bounds, of_rows
from flaxfit.loop._consistency import Consistency
from flaxfit.loop._division import examine
from flaxfit.loop._feed import Feed, feed_of_pass
from flaxfit.loop._in_flight import InFlight
from flaxfit.loop._padding import PreparedBatch
from flaxfit.loop._placed_companions import PlacedCompanions
from flaxfit.loop._programs import Programs
from flaxfit.loop._state_layout import StateLayout
from flaxfit.metrics._monitor import modes_of
from flaxfit.optim import averaged
from flaxfit.state import Checkpoint
from flaxfit.step import compute, evaluated, inspect, make_eval_step, metric_totals
from flaxfit.strategies import DataParallel, Strategy
from flaxfit.task import EvalTask, are_same, for_all_outputs
from flaxfit.tree import (
    Data,
    Function,
    PyTree,
    Sums,
    debugging_explained,
    structure_of,
    whole_number,
    without_mesh,
)

_ENDLESS = (
    "Give the number of batches (EvalLoop(n_steps=...), evaluate(steps=...), "
    "fit(validation_steps=...)), or data that ends."
)


class EvalLoop:
    """Measures the metrics of a task, exactly: sums over all examples, divided once.

    The rows of collected metrics are kept on the host, by every process.

    As a callback it adds `val_<metric>` to a checkpoint; several with different names can be
    chained.

    >>> import numpy as np
    >>> from flaxfit import InferenceState
    >>> x = np.arange(5, dtype=np.float32)
    >>> evaluate = EvalLoop(EvalTask(lambda v, x: v["params"] * x, ["mse"], (x, x)))
    >>> evaluate.measure(InferenceState(np.int32(0), np.float32(2), {}))
    {'mse': 6.0}

    Args:
      task: what to measure, on one pass over its data.
      name: the prefix of the metrics that are added to a checkpoint.
      n_steps: the number of batches to measure; None: all of one pass.
      ema: whether to measure the average of the parameters, from `ema=` or a schedule-free
        optimizer.
      strategy: where arrays live; None: the strategy of the loop whose callback this is, else all
        local devices.

    Raises:
      TypeError: `task` is not an `EvalTask`.
      ValueError: `n_steps` is less than 1.
    """

    borrows = True
    """It only reads the checkpoint."""

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
        if not isinstance(task, EvalTask):
            raise TypeError(
                "EvalLoop needs a task, flaxfit.EvalTask(apply, metrics, data), got "
                f"{type(task).__name__}."
            )
        self.task = task
        self.name = name
        self.n_steps = n_steps
        self.ema = ema
        self._strategy = strategy
        self._starters: Iterable[Callable[[], None]] = ()
        self._is_given = strategy is not None
        self._collecting = of_rows(task.metrics)
        # One stream for all measurements, so that 64-bit arrays are narrowed only once.
        self._data = None
        if task.data is not None:
            self._data = as_stream(task.roles.of_data_set(task.data))
        self._checked: Data = None  # The data whose values were all validated.
        self._forget()

    def _forget(self) -> None:
        self._programs = Programs()
        self._placed: PlacedCompanions | None = None

    @property
    def _companions(self) -> PlacedCompanions:
        self._placed = self._placed or PlacedCompanions(self.task, self.strategy)
        return self._placed

    @property
    def strategy(self) -> Strategy:
        """Where arrays live."""
        self._strategy = self._strategy or DataParallel()
        return self._strategy

    def attach(self, loop: Any) -> None:
        """Adopts the strategy of a loop, if none was given, and companions common to both."""
        if not self._is_given and self._strategy is not loop.strategy:
            self._strategy = loop.strategy
            self._forget()
        observers = getattr(loop, "on", None)  # None: `Model.evaluate` passes its `Trainer`.
        self._starters = () if observers is None else observers.before_validation
        own, is_in_place = self.task.companions, self._strategy is loop.strategy
        if own and is_in_place and are_same(own, loop.task.companions):
            self._placed = loop._companions

    def __repr__(self) -> str:
        return f"EvalLoop({self.task}, name={self.name!r})"

    @property
    def adds(self) -> dict[str, str | None]:
        """The metrics that it adds to a checkpoint: name -> "min", "max" or None."""
        has_loss = self.task.loss is not None or self.task.objective is not None
        loss = {f"{self.name}_loss": "min"} if has_loss else {}
        unnamed = self._unnamed
        known = {name: each for name, each in self.task.metrics.items() if name not in unnamed}
        return loss | modes_of(known, f"{self.name}_")

    @property
    def adds_more(self) -> bool:
        """Whether it may add further names, returned by an objective or a collected metric."""
        return bool(self._unnamed) or self.task.objective is not None

    @property
    def _unnamed(self) -> list[str]:
        """The metrics whose values may be mappings: their names are known only after computing."""
        return [name for name, metric in self._collecting.items() if metric.mode is None]

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint with the metrics of its state added."""
        for start in self._starters:
            start()
        measured = checkpoint.with_metrics(self.measure(checkpoint.state), f"{self.name}_")
        return measured.replace(modes={**checkpoint.modes, **self.adds})

    @debugging_explained()
    @without_mesh()
    def measure(
        self,
        state: PyTree,
        data: Data = None,
        *,
        n_steps: int | None = None,
        watch: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Returns the metrics of a state over the task's data, or over other data.

        >>> evaluate.measure(InferenceState(np.int32(0), np.float32(3), {}))
        {'mse': 24.0}

        Args:
          state: a state with the parameters to measure.
          data: anything that `as_stream` takes, instead of the data of the task.
          n_steps: the number of batches to measure; None: the loop's `n_steps`.
          watch: a function of the number of measured batches, called after each of them.

        Raises:
          ValueError: the data holds no batches.
        """
        data, n_steps = self._given(data), self.n_steps if n_steps is None else n_steps
        strategy, consistency = self.strategy, Consistency(self.strategy)
        programs, feed, n = self._programs, self._pass(data, n_steps), 0
        in_flight = InFlight(strategy.devices[0].platform, len(strategy.devices))
        collected, waiting = CollectedRows(self.task.metrics), deque[tuple[Strategy, PyTree]]()

        def collect() -> None:
            own, rows = waiting.popleft()
            collected.add(own.join(rows))

        first = feed.first()
        if not first:
            consistency.end("evaluation", n, ())
            raise ValueError("There is nothing to evaluate: the data holds no batches.")
        state = strategy.share(self._measured(state))
        sums = self._inspect(feed, first[0], state, data, is_cut=n_steps is not None)
        layout, shapes, key = StateLayout(state), structure_of(state), structure_of(sums)
        if key not in programs.found:
            zeros = strategy.share(metric_totals.zero_totals(sums))
            programs.found[key] = zeros, metric_totals.reader(sums)
        totals, read = programs.found[key]
        leaves = layout.flatten(state)
        self._companions.refresh()
        companions, latest, update = self._companions.arguments, None, None
        batches = itertools.islice(feed.batches(as_views=True), n_steps)
        for n, (_, loaded) in enumerate(batches, 1):
            prepared = loaded.prepared
            if prepared is not latest:  # Batches with a cached plan share one object.
                latest = prepared
                update = programs.compiled.get((prepared.signature, shapes))
                in_flight.expect(loaded.n_bytes)
                if prepared.strategy is not strategy:
                    strategy = prepared.strategy
                    state, totals = strategy.share((state, totals))
                    leaves, companions = layout.flatten(state), self._companions.moved(strategy)
            position = (np.uint32(n - 1),) if self.task.rngs else ()
            arguments = (leaves, totals, *companions, *position, loaded.arrays)
            if update is None:
                with programs.compiling(consistency, prepared, n):
                    update = self._compile(layout, prepared, arguments)
                programs.compiled[prepared.signature, shapes] = update
            totals, rows = update(*arguments)
            in_flight.add(totals, ())
            if rows:
                waiting.append((strategy, rows))
            if len(waiting) > 2:  # Reading rows waits for the devices: let them run ahead.
                collect()
            if watch is not None:
                watch(n)
        consistency.end("evaluation", n, [totals, *(rows for _, rows in waiting)])
        while waiting:
            collect()
        where = " in the data that was measured"
        values = compute(read(totals), self.task.metrics, where)
        return values | collected.values(values)

    @without_mesh()
    def check(
        self,
        state: PyTree,
        data: Data = None,
        *,
        n_steps: int | None = None,
        in_phase: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Validates the first batch as `measure` does, without measuring anything.

        Args:
          state: as in `measure`.
          data: as in `measure`.
          n_steps: as in `measure`.
          in_phase: the phases of the loop to which this work belongs.

        Raises:
          ValueError: labels, weights or the shape of the loss are invalid.
        """
        data, n_steps = self._given(data), self.n_steps if n_steps is None else n_steps
        feed = self._pass(data, n_steps)
        with in_phase("training"):
            first = feed.first()
        if first:
            state, is_cut = self._measured(state), n_steps is not None
            with in_phase("preparing"):
                self._inspect(feed, first[0], state, data, is_cut=is_cut)

    def _given(self, data: Data) -> Data:
        """Returns the given data, or that of the task."""
        if data is None and self._data is None:
            raise ValueError(
                "There is nothing to evaluate: give data to the task, EvalTask(..., data=(x, y)), "
                "or to measure(state, data)."
            )
        return self._data if data is None else data

    def _pass(self, data: Data, n_steps: int | None) -> Feed:
        """Returns the feed of one pass over the data."""
        roles = self.task.roles
        data = roles.of_data_set(data)
        return feed_of_pass(data, n_steps, self.task, self.strategy, roles, endless=_ENDLESS)

    def _measured(self, state: PyTree) -> PyTree:
        """Returns the part of a state that is measured."""
        state = averaged(state) if self.ema else state
        return evaluated(state, self.task.rngs, f"EvalTask(rngs={self.task.rngs})")

    def _inspect(
        self, feed: Feed, first: PyTree, state: PyTree, data: Data, *, is_cut: bool
    ) -> Sums:
        """Validates the first batch, and decides how the feed pads; returns the shapes of sums."""
        is_known, self._checked = data is self._checked, data
        batch, whole = feed.begin(first), None if is_known else feed.whole()
        if whole is not None and not is_cut:
            check_bounds(self._collecting, whole)

        def examined(
            batch: Batch, whole: Batch | None = None, *, is_first: bool = False
        ) -> tuple[str, Sums]:
            found, options = self._programs.found, {"is_resumed": not is_first}
            bind = self.strategy.bind
            result = inspect(self.task, state, batch, whole, bind, found, **options).shapes
            task = for_all_outputs(self.task, result.outputs, batch)
            given = task, self.strategy, state, batch, result, found
            return examine(*given, may_pad=feed.may_pad), result.sums

        why_not, sums = examined(batch, whole, is_first=True)
        feed.decide(why_not, lambda batch: examined(batch)[0])
        return {name: each for name, each in sums.items() if name not in self._collecting}

    def _compile(
        self, layout: StateLayout, prepared: PreparedBatch, arguments: tuple[PyTree, ...]
    ) -> Function:
        """Compiles `(leaves, totals, *position, arrays) -> (totals, rows)` for a signature."""
        strategy, structure = prepared.strategy, jax.tree.structure(prepared.batch)

        def update(leaves: PyTree, totals: PyTree, *others: PyTree) -> tuple[PyTree, PyTree]:
            bound, (*position, arrays) = self._companions.bound(self.task, others)
            measure = make_eval_step(
                bound,
                axis_name=strategy.axis_name,
                virtual_replicas=strategy.virtual_replicas,
            )
            state = layout.unflatten(leaves)
            sums = measure(state, structure.unflatten(arrays), *position)
            rows = {name: sums.pop(name) for name in self._collecting}
            return strategy.constrain(metric_totals.add(totals, sums), state), rows

        return strategy.compile(update, arguments, has_rows=True)
