"""Stepper: takes training steps, each from a batch of the stream to the state that follows."""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax

from flaxfit.data._batch import Batch
from flaxfit.loop._compiled_steps import CompiledSteps
from flaxfit.loop._consistency import Consistency
from flaxfit.loop._cursor import Cursor
from flaxfit.loop._default_strategy import check_strategy
from flaxfit.loop._device_loader import DeviceLoader, Loaded
from flaxfit.loop._inspection import Inspection
from flaxfit.loop._interrupts import Interrupts
from flaxfit.loop._padding import Portion
from flaxfit.loop._state_layout import StateLayout
from flaxfit.loop._steps_per_call import steps_per_call
from flaxfit.loop._tally import Tally
from flaxfit.optim import set_hyperparams
from flaxfit.optim._extended import carry_state
from flaxfit.optim._freeze import check_matches
from flaxfit.optim._hyperparams import names_of
from flaxfit.state._checkpoint import Borrowed
from flaxfit.state._optimizer_axes import with_optimizer
from flaxfit.state._train_state import TrainState
from flaxfit.step._cost import StepCost, cost_of, memory_of
from flaxfit.step._error_messages import explain, explained
from flaxfit.step._update import make_step, make_update
from flaxfit.step._validate import shapes_of
from flaxfit.strategies import Strategy
from flaxfit.task._task import TrainTask
from flaxfit.tree._functions import runs_eagerly
from flaxfit.tree._types import ArrayLike, Data, Json, Params, PyTree

# On a CPU with several devices, unbounded dispatch of collectives aborts the process; a single
# device holds the batches of steps that wait, unless the data is on it anyway. Then each eighth
# dispatch waits for the one 24 before.
_MOST_IN_FLIGHT = 2
_RESIDENT_DISPATCHES_PER_WAIT = 8
_RESIDENT_MOST_IN_FLIGHT = 3


class Stepper:
    """The state of a run, its position in the data, and the compiled update between them.

    Only `metrics` reads from the device. An interrupt never separates a batch from the state that
    follows from it.
    """

    def __init__(
        self,
        task: TrainTask,
        strategy: Strategy,
        *,
        grad_norm: bool,
        keep_grads: bool,
        say: Callable[[str], None],
    ):
        check_strategy(task, strategy)
        if keep_grads and task.step is not None:
            raise ValueError("The task has a step of its own, which returns no gradients to keep.")
        self.task, self.strategy, self._say = task, strategy, say
        self.step = 0
        """The number of completed updates; on the host, as reading the device's would wait."""
        self.interrupts = Interrupts()
        self.consistency = Consistency(strategy)
        is_mixed = task.step is not None  # A step of the user's own checks batches by itself.
        self.loader = DeviceLoader(
            strategy, self.consistency, say, parts=task.accumulate, is_mixed=is_mixed
        )
        is_eager = runs_eagerly(strategy)
        self.programs = CompiledSteps(self.consistency, (lambda text: None) if is_eager else say)
        self.inspection = Inspection(task, strategy, say)
        self.tally = Tally(strategy.share)
        self._layout, self._leaves = StateLayout(()), []
        self._grads: PyTree = None
        self._borrowed: list[Borrowed] = []
        self._options = {"grad_norm": grad_norm, "keep_grads": keep_grads}
        self._in_flight: deque[jax.Array] = deque()
        self._n_dispatched = 0
        self._n_set = self._n_tuned = 0
        self.set_data(task.data)

    # What it holds.

    def set_data(self, data: Data) -> None:
        """Continues with other data."""
        self._n_set += 1
        self.cursor = Cursor(data)
        self.loader.take_from(self.cursor)
        is_resident = self.cursor.gathers and len(self.strategy.devices) == 1
        self._dispatches_per_wait = _RESIDENT_DISPATCHES_PER_WAIT if is_resident else 1
        self._most_in_flight = _RESIDENT_MOST_IN_FLIGHT if is_resident else _MOST_IN_FLIGHT

    @property
    def state(self) -> PyTree:
        """The training state, in its places on the devices; the next step uses it up."""
        return self._layout.unflatten(self._leaves)

    def _hold(self, state: PyTree) -> None:
        self._layout = StateLayout(state)
        self._leaves = self._layout.flatten(state)
        self.has_hyperparams = bool(names_of(state.opt_state))

    def borrowed(self) -> tuple[Any, Any]:
        """The state and the kept gradients as `Borrowed`, to be read until the next step."""
        unflatten, leaves, kept = self._layout.unflatten, self._leaves, self._grads
        state = Borrowed(lambda: unflatten(leaves))
        grads = None if kept is None else Borrowed(lambda: kept)
        self._borrowed += [state] if grads is None else [state, grads]
        return state, grads

    def set_state(self, state: TrainState) -> None:
        """Continues from another state."""
        self.consistency.state(int(state.step), state)
        before = self.state
        check_norms(self.task, state.params)
        self._hold(self.strategy.place(self._layout.restructured(state)))
        self.step = int(state.step)
        self._n_set += 1
        if shapes_of(before) != shapes_of(self.state):
            self.tally.expect({})
            self._forget()
        self.reset_totals()

    @property
    def revision(self) -> tuple[int, int, int]:
        """Tells the present state from every other one.

        That is the step, how often state or data were set, and how often hyperparameters or
        frozen parameters were.
        """
        return self.step, self._n_set, self._n_tuned

    def set_norms(self, patterns: Sequence[str]) -> None:
        """Continues with the norms of these patterns reported."""
        task = dataclasses.replace(self.task, norms=patterns)
        check_norms(task, self.state.params)
        if task.norms != self.task.norms:
            self.task = task
            self._forget()

    def freeze(self, patterns: Any) -> None:
        """Continues with other parameters frozen, and keeps the optimizer state of the rest."""
        self._n_tuned += 1
        task = dataclasses.replace(self.task, freeze=patterns)
        state = self.strategy.collect(self.state)
        opt_state = carry_state(state.opt_state, task.optimizer, state.params)
        axes = with_optimizer(state.axes, state.params, opt_state)
        placed = self.strategy.place(state.replace(opt_state=opt_state, axes=axes))
        self.task = task
        self._hold(placed)
        self.programs.forget()
        self.inspection.forget()

    def set_hyperparams(self, group: str | int | None, values: dict[str, PyTree]) -> None:
        """Continues with other hyperparameters; nothing is recompiled."""
        old = self.state
        new = set_hyperparams(old.opt_state, group=group, **values)

        def placed(x: ArrayLike, before: PyTree) -> PyTree:
            return before if x is before else self.strategy.place(x)  # A copy: steps use it up.

        self._hold(old.replace(opt_state=jax.tree.map(placed, new, old.opt_state)))
        self._n_tuned += 1

    def _forget(self) -> None:
        """Forgets compiled programs; the next batch is validated and compiled again."""
        self.programs.forget()
        self.loader.forget()
        self.inspection.forget()

    def reset_totals(self) -> None:
        """Starts a new count."""
        self.tally.begin()
        self._grads = None
        self.programs.seconds = self.loader.seconds = 0.0

    @property
    def is_preparing(self) -> bool:
        """Whether it inspects the first batch or compiles, which may take long."""
        return self.loader.is_inspecting or self.programs.is_compiling

    @property
    def preparation_time(self) -> float:
        """The seconds since the count began that inspection and compilation took."""
        return self.programs.seconds + self.loader.seconds

    def get_running(self, *, counts: bool) -> Any:
        """What a run needs beside state and position to continue exactly, as JSON.

        That is the size of the batches, as the next one may be a remainder, and between two
        checkpoints what was counted so far.
        """
        running: dict[str, Any] = {"batch_size": self.loader.batch_size}
        if (n_virtual := self.strategy.virtual_replicas) is not None:
            running["virtual_replicas"] = n_virtual
        if counts and self.tally.n_steps:
            running |= self.tally.as_json(self.metrics())
        return running

    def set_running(self, running: Json) -> None:
        """Continues from what `get_running` returned."""
        self.loader.batch_size = running["batch_size"]
        before, now = running.get("virtual_replicas"), self.strategy.virtual_replicas
        if before != now:
            self._say(
                f"the numbers do not go on bit for bit: virtual_replicas was {before}, now is {now}"
            )
        if "n_steps" in running:
            self.tally.go_on_from(running)

    @explained
    def metrics(self) -> dict[str, Any]:
        """The metrics over all steps since the count began; waits for the device."""
        return self.tally.metrics(self.task.metrics, self.step)

    # How it steps.

    def advance(self, n: int = 1, batch: PyTree = None) -> bool:
        """Dispatches up to `n` steps in one program, or one if their batches share no program.

        A given batch is one step; the stream stays where it is.

        Returns whether there was a batch.
        """
        interrupts = self.interrupts
        try:
            # Until the release an interrupt waits, so that no batch and no state is lost.
            interrupts.is_held = True
            try:
                has_stepped = self._step(n, batch)
            finally:
                interrupts.release()
            if has_stepped:
                self._n_dispatched += 1
                if self._n_dispatched >= self._dispatches_per_wait:
                    self._bound()
            return has_stepped
        except Exception as error:
            explain(error, self)
            raise

    def _next_batches(self, n: int) -> Loaded | None:
        """The next `n` batches if they share a program, else one; None at the end of the data."""
        if n > 1 and self._is_slow_in_loops():
            self.inspection.say_slow()
            n = 1
        cursor = self.cursor
        items = cursor.fetch(n)
        if cursor is not self.cursor:  # Reading it has set other data.
            return self._next_batches(n)
        if len(items) < n:
            items = items[:1]
        return self.loader.load(items, self._inspect) if items else None

    def steps_per_call(self, spacing: int, n_total: float) -> int:
        """The steps to take in one dispatch with "auto"; see `steps_per_call`.

        Several are taken of arrays only, whose batches are indices: batches that a user's code
        makes may take much memory, or be made in one buffer.
        """
        if not self.cursor.takes_rows or self._is_slow_in_loops():
            return 1
        devices = self.strategy.devices
        work = self.inspection.work / len(devices)
        return steps_per_call(work, spacing, n_total, devices[0].platform)

    def _is_slow_in_loops(self) -> bool:
        """Whether steps like the next one are slow in a loop; depends on the next batch alone.

        A resumed run then takes the same steps together.
        """
        cursor = self.cursor
        is_mixed = self.task.step is not None and not cursor.gathers
        if is_mixed or not self.loader.has_inspected:
            items = cursor.peek()
            if cursor is not self.cursor:  # Reading it has set other data.
                return self._is_slow_in_loops()
            if items:
                portion = self.loader.portion(items[0], self._inspect)
                if is_mixed:
                    self.inspection.inspect_loops(self.task, self.state, portion)
        return self.inspection.is_slow_in_loops

    def _step(self, n: int, batch: PyTree) -> bool:
        """Fetches batches, runs the compiled update, and stores the state; see `advance`."""
        if batch is None:
            loaded = self._next_batches(n)
        else:
            loaded = self.loader.load_given(batch, self._inspect)
        if loaded is None:
            self.consistency.end("training", self.step, self._in_flight)
            self.cursor.ended = True
            return False
        portion, arrays, n, n_examples = loaded
        leaves, totals = self._leaves, self.tally.totals
        is_whole = portion.strategy is self.strategy
        if not is_whole:
            leaves, totals = self._moved(portion.strategy, leaves, totals)
        arguments = (leaves, totals, *portion.data, arrays)
        key = (n, portion.signature)
        update = self.programs.compiled.get(key)
        if update is None:
            update = self.programs.compile(
                key,
                functools.partial(self._build, portion, arguments, n_steps=n),
                portion,
                step=self.step + 1,
            )
        if self._borrowed:
            for each in self._borrowed:
                each.end()
            self._borrowed.clear()
        leaves, totals, self._grads = update(*arguments)
        if not is_whole:
            leaves, totals = self._moved(self.strategy, leaves, totals)
        self._leaves = leaves
        self.step += n
        self.tally.add(totals, n, n_examples)
        self.consistency.stepped(key)
        if batch is None:
            self.cursor.stepped(n)  # Its batches may go, now that the new state is stored.
        return True

    def _moved(self, strategy: Strategy, leaves: PyTree, totals: PyTree) -> tuple[Any, Any]:
        """What a step takes, in its places under that strategy; copied only where it moves."""
        state, totals = strategy.share((self._layout.unflatten(leaves), totals))
        return self._layout.flatten(state), totals

    def _build(self, portion: Portion, arguments: tuple[PyTree, ...], *, n_steps: int) -> Any:
        layout, strategy = self._layout, portion.strategy
        update = make_update(
            self.task,
            axis_name=strategy.axis_name,
            virtual_replicas=strategy.virtual_replicas,
            n_steps=n_steps,
            skip_empty=portion.is_weighted,
            **self._options,
        )

        def update_leaves(leaves: PyTree, totals: PyTree, *batch: PyTree) -> Any:
            state = layout.unflatten(leaves)
            results = strategy.constrain(update(state, totals, *batch), state)
            return layout.flatten(results[0]), *results[1:]

        return strategy.compile(update_leaves, arguments, n_donated=1)

    def _bound(self) -> None:
        """Notes the latest dispatch, and waits for an earlier one if too many are in flight."""
        self._n_dispatched = 0
        # No later step uses the totals up: waiting for these waits for the step.
        totals = next(iter(self.tally.totals.values()), None)
        if totals is None:  # A step of the user's own that reports nothing.
            jax.block_until_ready(self._leaves)
            return
        self._in_flight.append(totals)
        if len(self._in_flight) > self._most_in_flight:
            self._in_flight.popleft().block_until_ready()

    def _inspect(self, batch: Batch, data: Batch | None) -> str:
        """Validates the first batch; returns why padding is unsafe, or ""."""
        options = {
            "grad_norm": self._options["grad_norm"],
            "is_resumed": self.cursor.is_resumed,
        }
        found = self.inspection(self.task, self.state, batch, data, **options)
        if self.tally.expect(found.sums):
            self._say("the metrics changed in the middle of their span: the count starts over")
            self.reset_totals()
        return found.why_not_pad

    def cost(self, n: int | None) -> StepCost:
        """The operations of a step on `n` examples, on all devices together; `nan` if eager."""
        if runs_eagerly(self.strategy):
            return StepCost(math.nan, recomputes=False)
        step, example = make_step(self.task), self.loader.example(n, self._inspect)
        return cost_of(self.strategy.bind(step), shapes_of(self.state), shapes_of(example))

    def count_bytes(self, n: int | None) -> int:
        """The memory of a step on `n` examples, on each device; compiles it, and runs nothing."""
        portion = self.loader.as_regular(self.loader.example(n, self._inspect))
        arguments = (self._leaves, self.tally.totals, portion.strategy.split(portion.batch))
        return memory_of(self._build(portion, arguments, n_steps=1))


def check_norms(task: TrainTask, params: Params) -> None:
    """Checks that each pattern of `task.norms` matches a parameter."""
    for pattern in task.norms:
        check_matches("norms", pattern, params)
