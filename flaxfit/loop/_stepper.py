"""Stepper: the state of a run, and `advance`, which takes its training steps."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from flaxfit.data._batch import Batch
from flaxfit.loop._assembly import Loaded
from flaxfit.loop._consistency import Consistency
from flaxfit.loop._cursor import Cursor
from flaxfit.loop._default_strategy import check_strategy
from flaxfit.loop._feed import Feed
from flaxfit.loop._in_flight import InFlight
from flaxfit.loop._inspection import Inspection
from flaxfit.loop._interrupts import Interrupts
from flaxfit.loop._padding import may_be_whole
from flaxfit.loop._placed_companions import PlacedCompanions
from flaxfit.loop._placed_state import PlacedState
from flaxfit.loop._programs import Programs, build_update
from flaxfit.loop._steps_per_call import StepsPerCall
from flaxfit.loop._stopwatch import Stopwatch
from flaxfit.loop._tally import Tally
from flaxfit.optim._freeze import check_matches
from flaxfit.state import TrainState
from flaxfit.step import explain, explained
from flaxfit.strategies import Strategy
from flaxfit.task import TrainTask
from flaxfit.tree import Data, Params, PyTree, Sums, shapes_of


class Stepper:
    """Holds the training state and the position in the data; `advance` moves both together.

    Only `metrics` reads from the devices. An interrupt never separates a consumed batch from the
    state of its step.
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
            raise ValueError("The task has a custom step, which returns no gradients to keep.")
        self.task, self.strategy, self._say = task, strategy, say
        self.options = {"grad_norm": grad_norm, "keep_grads": keep_grads}
        self.step = 0
        """The number of updates, counted on the host: reading `state.step` would wait."""
        self.interrupts = Interrupts()
        self.consistency = Consistency(strategy)
        self.feed = Feed(
            strategy,
            task.roles,
            parts=task.accumulate,
            is_mixed=task.step is not None,  # A custom step may take batches of any structure.
            is_whole=may_be_whole(task, strategy),
            drops_weights=True,
            say=say,
        )
        self.inspecting = Stopwatch()
        """The time of inspecting first batches."""
        self.programs = Programs() if strategy.runs_eagerly else Programs(say)
        self.inspection = Inspection(task, strategy, self.programs.found, say)
        self.steps_per_call = StepsPerCall()
        self.spacing = 1
        """The number of steps between checkpoints, which `steps_per_call="auto"` divides."""
        self.n_total = 0
        """The steps of the run, including those before a resume; 0: unknown."""
        self.tally = Tally(strategy.share)
        self._in_flight = InFlight(strategy.devices[0].platform, len(strategy.devices))
        self.placed = PlacedState(strategy)
        self.companions = PlacedCompanions(task, strategy)
        self._n_set = self.n_tuned = 0
        self.set_data(task.data)

    # State.

    @property
    def state(self) -> Any:
        """The training state on the devices; the next step donates it."""
        return self.placed.value

    @property
    def revision(self) -> tuple[int, int, int]:
        """Identifies the present state.

        It consists of the step, how often state or data were set, and how often hyperparameters
        or `freeze` were.
        """
        return self.step, self._n_set, self.n_tuned

    @property
    def is_preparing(self) -> bool:
        """Whether it is inspecting a first batch or compiling, which may take long."""
        return self.inspecting.is_running or self.programs.watch.is_running

    @property
    def preparation_time(self) -> float:
        """The seconds of inspection and compilation since the last reset."""
        return self.programs.watch.seconds + self.inspecting.seconds

    @explained
    def metrics(self) -> dict[str, Any]:
        """Computes the metrics over all steps since the last reset; waits for the devices."""
        return self.tally.metrics(self.task.metrics, self.step)

    @property
    def step_options(self) -> dict[str, bool]:
        """The options that programs of the step are compiled with."""
        return {"loss_has_weights": self.inspection.loss_has_weights, **self.options}

    # Changes between steps.

    def set_data(self, data: Data) -> None:
        """Switches to other data."""
        self._n_set += 1
        self.cursor = Cursor(self.task.roles.of_data_set(data))
        self.feed.take_from(self.cursor)

    def set_state(self, state: TrainState, *, may_donate: bool = False) -> None:
        """Continues from another state: from a copy, unless steps `may_donate` its arrays."""
        self.consistency.state(
            int(state.step), {"state": state, "companions": self.companions.states}
        )
        before = self.state
        check_norms(self.task, state.params)
        self.placed.place(state, may_donate=may_donate)
        self.step = int(state.step)
        self._n_set += 1
        if shapes_of(before) != shapes_of(self.state):
            self.tally.expect({})
            self.set_task(self.task)
            self.feed.forget()  # The next batch is validated again.
        self.reset_totals()

    def set_task(self, task: TrainTask) -> None:
        """Switches to a variant of the task, for which programs are compiled again."""
        self.task = task
        self.programs.forget()

    def set_norms(self, patterns: str | Sequence[str]) -> None:
        """Reports the norms of parameters that match these patterns from now on."""
        task = dataclasses.replace(self.task, norms=patterns)
        check_norms(task, self.state.params)
        if task.norms != self.task.norms:
            self.set_task(task)
            self.feed.forget()

    def reset_totals(self) -> None:
        """Resets steps, examples, sums and times."""
        self.tally.begin()
        self.placed.grads = None
        self.programs.watch.reset()
        self.inspecting.reset()

    # Steps.

    def advance(self, n_left: int = 1, batch: PyTree = None) -> bool:
        """Takes the steps of one dispatch: fetches batches, runs the update, stores the state.

        Args:
          n_left: the largest number of steps to take.
          batch: a batch for one step, which leaves the stream alone; None: the stream's next ones.

        Returns:
          Whether there was a batch.
        """
        try:
            # A donating call destroys the old state before the new one is stored: an interrupt in
            # between would lose both, so it waits until the release. Batches are passed on without
            # a name, because the traceback of the interrupt would keep local variables alive.
            self.interrupts.is_held = True
            try:
                if batch is None:
                    has_stepped = self._step(self._load(n_left), is_given=False)
                else:
                    has_stepped = self._step(self._load_given(batch), is_given=True)
            finally:
                self.interrupts.release()
            if has_stepped:
                self._in_flight.add(self.tally.totals, self.placed.leaves)
        except Exception as error:
            explain(error, self)
            raise
        return has_stepped

    def _step(self, loaded: Loaded | None, *, is_given: bool) -> bool:
        """Runs the compiled update on loaded batches, and stores the new state.

        Separate from `advance`: its local arrays must not live on in an interrupt's traceback.
        """
        if loaded is None:
            self.consistency.end("training", self.step, [self.tally.totals])
            self.cursor.ended = True
            return False
        prepared, arrays, n, n_examples = loaded
        placed, is_on_all = self.placed, prepared.strategy is self.strategy
        leaves, totals, companions = placed.leaves, self.tally.totals, self.companions.arguments
        if not is_on_all:
            leaves, totals = placed.moved(prepared.strategy, leaves, totals)
            companions = self.companions.moved(prepared.strategy)
        arguments = (leaves, totals, *companions, *prepared.data, arrays)
        key = (n, prepared.signature)
        update = self.programs.compiled.get(key)
        if update is None:
            with self.programs.compiling(self.consistency, prepared, self.step + 1):
                update = build_update(
                    self.task,
                    placed.layout,
                    self.companions,
                    prepared,
                    arguments,
                    n,
                    **self.step_options,
                )
            self.programs.compiled[key] = update
            self._in_flight.expect(loaded.n_bytes)
        placed.take_back()
        # `arguments` donates `leaves`: from here on only the results may be used.
        leaves, totals, placed.grads = update(*arguments)
        if not is_on_all:
            leaves, totals = placed.moved(self.strategy, leaves, totals)
        placed.leaves = leaves
        self.step += n
        self.tally.add(totals, n, n_examples)
        self.consistency.stepped(key)
        if not is_given:
            self.cursor.stepped(n)  # Last: a failure above leaves the batches in the queue.
        return True

    def _load(self, n_left: int) -> Loaded | None:
        """Loads the next batches if they share a program, else one; None at the end of the data."""
        n = self.steps_per_call.next(self, n_left)
        cursor = self.cursor
        items = cursor.fetch(n)
        if cursor is not self.cursor:  # Fetching a batch replaced `loop.data`.
            return self._load(n_left)
        if len(items) < n:  # The end of the data: a program for `n` steps does not fit.
            items = items[:1]
        if not items:
            return None
        if not self.feed.is_decided:
            self.expect(items[0])
        return self.feed.load(items)

    def _load_given(self, batch: PyTree) -> Loaded:
        """Loads a batch from outside the stream."""
        feed, item = self.feed, self.task.roles(batch)
        if not feed.is_decided:
            first = feed.first() if self.cursor.has_data else []
            with self.inspecting:
                self.inspect_first(first[0] if first else item)
        if not feed.is_decided_for_given:
            given = feed.given(item)
            is_known = feed.may_pad
            why_not = feed.why_not if is_known else self._inspect(given, None, True)
            feed.decide_given(why_not, feed.shapes if is_known and feed.shapes else given)
        return feed.load_given(item)

    def expect(self, item: PyTree) -> None:
        """Inspects the batch of the first fetched item."""
        with self.inspecting:
            self.inspect_first(self.feed.examples(item))

    def first_batch(self) -> PyTree:
        """Returns the next batch without committing it; raises if there is none."""
        first = self.feed.first()
        if not first:
            raise ValueError("The data holds no batches: there is nothing to train on.")
        return first[0]

    def inspect_first(self, batch: PyTree) -> None:
        """Validates the first batch, and decides how all batches are padded or split."""
        feed = self.feed
        if not feed.is_process_local:
            self.consistency.data(self.cursor.stream_position())
        data = feed.whole()
        batch = feed.begin(batch, data)
        why_not = self._inspect(batch, data, feed.may_pad)
        stepper = weakref.proxy(self)  # Else a dropped loop would keep its state for a while.
        examine = None if self.task.step else lambda batch: stepper._examine(batch)
        feed.decide(why_not, examine)

    def _examine(self, batch: Batch) -> str:
        """Returns why padding a later batch, of rows of another shape, is unsafe, or ""."""
        with self.inspecting:
            return self._found_of(batch, None, self.feed.may_pad, is_resumed=True)[1]

    def _found_of(
        self, batch: Batch, data: Batch | None, may_pad: bool, *, is_resumed: bool
    ) -> tuple[Sums, str]:
        """Returns the shapes of the sums of a step, and why padding is unsafe, or ""."""
        return self.inspection(
            *(self.task, self.state, batch, data),
            grad_norm=self.options["grad_norm"],
            is_resumed=is_resumed,
            may_pad=may_pad,
        )

    def _inspect(self, batch: Batch, data: Batch | None, may_pad: bool) -> str:
        """Validates a batch; returns why padding is unsafe, or ""."""
        is_resumed = self.cursor.is_resumed
        sums, why_not = self._found_of(batch, data, may_pad, is_resumed=is_resumed)
        if self.tally.expect(sums):
            self._say("the metrics changed between two checkpoints: counting starts over")
            self.reset_totals()
        return why_not


def check_norms(task: TrainTask, params: Params) -> None:
    """Checks that each pattern of `task.norms` matches a parameter."""
    for pattern in task.norms:
        check_matches("norms", pattern, params)
