"""Stepper: takes training steps, each from a batch of the stream to the state it leads to."""

import dataclasses
import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxfit.data import ArrayStream
from flaxfit.data._batch import Batch
from flaxfit.loop._compiled_steps import Programs
from flaxfit.loop._consistency import Agreement
from flaxfit.loop._cursor import Source
from flaxfit.loop._default_strategy import check_strategy
from flaxfit.loop._device_loader import Intake
from flaxfit.loop._held import Form, Held, on_held
from flaxfit.loop._interrupts import Interrupts
from flaxfit.loop._padding import Portion, stack_batches
from flaxfit.loop._snapshot import is_light
from flaxfit.loop._tally import Tally
from flaxfit.optim import set_hyperparams
from flaxfit.optim._extended import carry_state
from flaxfit.optim._freeze import check_matches
from flaxfit.optim._hyperparams import names_of
from flaxfit.state._later import Later
from flaxfit.state._optimizer_axes import with_optimizer
from flaxfit.state._train_state import TrainState
from flaxfit.step._cost import StepCost, cost_of, memory_of
from flaxfit.step._error_messages import calls_explained, explain, explained
from flaxfit.step._train_step import more_sums
from flaxfit.step._unrolled import MOST_UNROLLED
from flaxfit.step._update import make_step, make_update
from flaxfit.step._validate import inspect, inspect_step, shapes_of, trace
from flaxfit.step._wide_products import why_wide
from flaxfit.strategies import Strategy
from flaxfit.task._task import TrainTask
from flaxfit.tree._functions import runs_eagerly
from flaxfit.tree._paths import flat

# On a CPU with several devices, unbounded dispatch of collectives aborts the process.
_STEPS_IN_FLIGHT = 2
# A single device only holds the batches of steps that wait, unless these are on it anyway: then it
# is looked at each eighth step whether the one 24 before is done.
_RESIDENT_STEPS_PER_LOOK = 8
_RESIDENT_LOOKS_IN_FLIGHT = 3


class _Ready(NamedTuple):
    """What steps a batch, or several at once, whose like was stepped before."""

    update: Callable[..., Any]
    data: tuple[Any, ...]
    """What the update gathers its batch from, if it does."""
    structure: Any
    """Of the batch, whose leaves are its own arrays and `more`."""
    more: list[Any]
    """The weights, where they are the same for all such batches: split and on the devices."""
    n_examples: int


class Stepper:
    """The state of a run, its position in the data, and the compiled update between them.

    Nothing is read from the device but by `metrics`. An interrupt never parts a batch from the
    state that it leads to.
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
        self.task = task
        self.strategy = strategy
        self.step = 0
        """How many updates were done; on the host, as reading the device's would wait for it."""
        self._n_set = self._n_tuned = 0
        self.interrupts = Interrupts()
        self.agreement = Agreement(strategy)
        self.intake = Intake(
            strategy,
            self.agreement,
            say,
            parts=task.accumulate,
            is_mixed=task.step is not None,  # It looks at each batch itself.
        )
        is_eager = runs_eagerly(strategy)
        self.programs = Programs(self.agreement, (lambda text: None) if is_eager else say)
        self.tally = Tally(strategy.share)
        self._traced: dict[Any, Any] = {}
        self._knows_products = False
        self._not_added: set[str] = set()
        is_on_cpu = strategy.devices[0].platform == "cpu"
        # Virtual replicas and parts are loops or branches themselves.
        is_flat = getattr(strategy, "virtual_replicas", None) is None and task.accumulate == 1
        self._may_unroll = is_on_cpu and is_flat and not is_eager
        self.unrolls = False
        """Whether several steps are no loop, but stand in a program one behind the other."""
        self._convolves: dict[Hashable, bool] = {}
        """Whether a step of the user's own does, by the signatures of its batches."""
        self.norms: tuple[str, ...] = ()
        # How the state is taken apart, once there is one, and its arrays.
        self._form: Any = None
        self._held = Held([], [])
        self.grads: Any = None
        """The gradients of the latest step, if they are kept."""
        self._kept: list[weakref.ref[Later]] = []
        """What the latest checkpoint holds, until it is copied."""
        self._options = {"grad_norm": grad_norm, "keep_grads": keep_grads}
        self._say = say
        self._in_flight: deque[jax.Array] = deque()
        """What some of the steps that may not be done yet result in."""
        self._n_unlooked = 0
        self.set_data(task.data)

    def set_data(self, data: Any) -> None:
        """Goes on with other data."""
        self._n_set += 1
        self.source = Source(data)
        self.intake.take_from(self.source)
        is_free = self.source.gathers and len(self.strategy.devices) == 1
        self._steps_per_look = _RESIDENT_STEPS_PER_LOOK if is_free else 1
        self._most_in_flight = _RESIDENT_LOOKS_IN_FLIGHT if is_free else _STEPS_IN_FLIGHT
        self._ready: dict[Hashable, _Ready] = {}
        """What steps batches like those that were stepped before, by their keys."""

    @property
    def state(self) -> Any:
        """The training state, in its places on the devices; the next step uses most of it up."""
        return None if self._form is None else self._form.together(self._held)

    @state.setter
    def state(self, state: Any) -> None:
        # To take a state apart and put it together for every step costs more than small steps do.
        if self._form is None or not self._form.fits(state, self.task.freeze):
            self._form = Form(state, self.task.freeze)
        self._held = self._form.apart(state)
        self._is_small = is_light([*self._held.moving, *self._held.still])
        self.has_hyperparams = bool(names_of(state.opt_state))

    def kept(
        self, snapshot: Callable[..., Callable[[], Any]], *, is_urgent: bool
    ) -> tuple[Any, Any]:
        """The state and the kept gradients, each as `Later`: copies of what the next step uses up.

        They are made when somebody asks for it; at the latest by the next step, if somebody still
        holds on to them.

        Args:
          snapshot: copies a tree, see `snapshots`.
          is_urgent: whether they are copied at once: a step may be under way.
        """
        # Random keys as plain arrays, which takes less time.
        form, held, grads, is_small = self._form, self._held, self.grads, self._is_small

        def copied() -> Callable[[], Any]:
            copy = snapshot(held, is_small)
            return lambda: form.together(copy())

        state = Later(copied)
        gradients = None if grads is None else Later(lambda: snapshot(grads))
        references = [weakref.ref(each) for each in (state, gradients) if each is not None]
        # Of several processes all run the same programs, whatever each does with its checkpoint.
        if is_urgent or self.strategy.n_processes > 1:
            _secure(references)
        else:
            self._kept = [each for each in self._kept if each() is not None] + references
        return state, gradients

    def secure_kept(self) -> None:
        """Copies what was kept and is still held on to: the next step uses it up."""
        _secure(self._kept)
        self._kept = []  # Not before: what could not be copied is not to be used up.

    def set_state(self, state: TrainState) -> None:
        """Goes on from another state."""
        self.agreement.state(int(state.step), state)
        state = state if self._form is None else self._form.restructured(state)
        before, self.state = self.state, self.strategy.place(state)
        self.step = int(state.step)
        self._n_set += 1
        if shapes_of(before) != shapes_of(self.state):
            self.tally.expect({})
            self._forget()
        self.reset_totals()

    @property
    def revision(self) -> tuple[int, int, int]:
        """What tells the present state from every other one: its step, and what was set meanwhile.

        That is how often state or data were set, and hyperparameters or what is frozen.
        """
        return self.step, self._n_set, self._n_tuned

    def freeze(self, patterns: Any) -> None:
        """Goes on with other parameters frozen; what the optimizer knows of the rest is kept."""
        self._n_tuned += 1
        task = dataclasses.replace(self.task, freeze=patterns)
        state = self.strategy.collect(self.state)
        opt_state = carry_state(state.opt_state, task.optimizer, state.params)
        axes = with_optimizer(state.axes, state.params, opt_state)
        placed = self.strategy.place(state.replace(opt_state=opt_state, axes=axes))
        self.task, self.state = task, placed
        self.programs.forget()
        self._traced, self._ready = {}, {}

    def set_norms(self, patterns: Sequence[str]) -> None:
        """Reports the norms of parameters and gradients by these patterns, from now on."""
        if tuple(patterns) == self.norms:
            return
        if self.tally.n_steps and self.intake.has_looked:
            raise RuntimeError(
                f"Cannot report other norms now: {self.tally.n_steps} steps were counted since the "
                "latest checkpoint. Set them before training, or right after a checkpoint."
            )
        if self.task.step is not None:
            raise ValueError("The task has a step of its own: let it report the norms.")
        for pattern in patterns:
            check_matches("norms", pattern, self.state.params)
        self.norms = tuple(patterns)
        self._forget()

    def set_hyperparams(self, group: str | int | None, values: dict[str, Any]) -> None:
        """Goes on with other hyperparameters; nothing is recompiled."""
        opt_state = set_hyperparams(self.state.opt_state, group=group, **values)
        self.state = self.state.replace(opt_state=opt_state)
        self._n_tuned += 1

    def check_fits(self, state: TrainState) -> None:
        """Checks that a state is like the present one.

        Raises:
          ValueError: with the arrays that are not.
        """
        own, new = (
            {path: _kind(x) for path, x in flat(tree).items()} for tree in (self.state, state)
        )
        if own != new:
            paths = [path for path in {**own, **new} if own.get(path) != new.get(path)]
            lines = [f"  {p}: here {own.get(p, '-')}, given {new.get(p, '-')}" for p in paths[:30]]
            n = "1 array differs" if len(paths) == 1 else f"{len(paths)} arrays differ"
            raise ValueError(
                f"Cannot go on from a state of another model or optimizer; {n}:\n"
                + "\n".join(lines)
                + "\nIf other parameters were frozen then, set `freeze` as it was, restore, and "
                "set it back."
            )

    def _forget(self) -> None:
        """Has the next batch be looked at, and the update be compiled, as at first."""
        self.programs.forget()
        self.intake.forget()
        self._convolves = {}
        self._ready = {}

    def reset_totals(self) -> None:
        """Begins to count anew."""
        self.tally.begin()
        self.grads = None
        self.programs.seconds = self.intake.seconds = 0.0

    @property
    def batch_shapes(self) -> Batch | None:
        """Shapes and dtypes of the latest first batch; None before there is one."""
        return self.intake.shapes

    @property
    def is_preparing(self) -> bool:
        """Whether it inspects the first batch or compiles, which may take long."""
        return self.intake.is_looking or self.programs.is_compiling

    @property
    def compile_time(self) -> float:
        """The seconds since the totals were reset that were spent on compiling."""
        return self.programs.seconds

    @property
    def inspection_time(self) -> float:
        """The seconds since the totals were reset that were spent on looking at first batches."""
        return self.intake.seconds

    def get_running(self, *, counts: bool) -> Any:
        """What a run needs beside state and position to go on exactly, as JSON.

        That is the size of the batches, as the next one may be a remainder, and between two
        checkpoints what was counted so far.
        """
        running: dict[str, Any] = {"batch_size": self.intake.batch_size}
        if (n_virtual := getattr(self.strategy, "virtual_replicas", None)) is not None:
            running["virtual_replicas"] = n_virtual
        if counts and self.tally.n_steps:
            running |= self.tally.as_json(self.metrics())
        return running

    def set_running(self, running: Any) -> None:
        """Goes on from what `get_running` gave."""
        self.intake.batch_size = running["batch_size"]
        before = running.get("virtual_replicas")
        now = getattr(self.strategy, "virtual_replicas", None)
        if before != now:
            self._say(
                f"the numbers do not go on bit for bit: virtual_replicas was {before}, now is {now}"
            )
        if "n_steps" in running:
            self.tally.go_on_from(running)

    @explained
    def metrics(self) -> dict[str, Any]:
        """The metrics over all steps since the totals were reset; waits for the device."""
        return self.tally.metrics(self.task.metrics, self.step)

    def advance(self, n: int, batch: Any = None) -> bool:
        """Dispatches up to `n` steps at once, or one where the batches do not share a program.

        With a batch that is given it is one step, on that, and the stream stays where it is.

        Returns whether there was a batch to step.
        """
        if n == 1 and batch is None and self.source.gathers:
            for _ in self.advance_singly(self.step + 1):
                return True
            if self.source.ended:
                return False
        # Not by `explained`, which is a call more for each step.
        try:
            # From here to the release an interrupt waits, so that no batch and no state is lost.
            self.interrupts.hold()
            try:
                n = self._at_once(n) if n > 1 else n
                is_usual = batch is None and self._ready and self.source.is_between_batches
                has_stepped = self._step_as_before(n) if is_usual else None
                if has_stepped is None:
                    portions = (
                        self._portions(n)
                        if batch is None
                        else [self.intake.given(batch, self._inspect)]
                    )
                    has_stepped = bool(portions)
                    if has_stepped:
                        self._dispatch(portions, self.source if batch is None else None)
                if not has_stepped:
                    self._end()
                    return False
            finally:
                self.interrupts.release()
            self._n_unlooked += 1
            if self._n_unlooked >= self._steps_per_look:
                self._bound()
            return True
        except Exception as error:
            explain(error, self)
            raise

    def advance_singly(self, end: int) -> Iterator[None]:
        """Takes single steps on resident data up to step `end`; what it yields tells of each.

        It ends before a batch of which none like it was stepped, which `advance` is to take. It is
        what that does, less all that is known by then, in as few calls as can be: small models
        would notice each.
        """
        source, interrupts = self.source, self.interrupts
        if not (self._ready and source.gathers):
            return
        next_rows, split, fetched = source.stream.next_rows, self.strategy.split, source.fetched
        try:
            while self.step < end and self.source is source and not fetched:
                interrupts.is_held = True  # As `advance` does.
                try:
                    try:
                        rows = next_rows()
                    except StopIteration:
                        if self.source is source:  # Reading it may set anything.
                            self._end()
                        return
                    fetched.append((rows, None))
                    if (ready := self._ready.get(len(rows))) is None:
                        return
                    self._run(ready, [split(rows)], 1)
                    # What it holds on the devices, others may replace before the next step.
                    del ready
                    source.stepped(1)
                finally:
                    interrupts.is_held = False
                    if interrupts.is_pending:
                        interrupts.release()
                self._n_unlooked += 1
                if self._n_unlooked >= self._steps_per_look:
                    self._bound()
                yield
        except Exception as error:
            explain(error, self)
            raise

    def _end(self) -> None:
        """Notes that there are no more batches."""
        self.agreement.end("training", self.step, self._in_flight)
        self.source.ended = True

    def _step_as_before(self, n: int) -> bool | None:
        """Steps on the next batches, where such were stepped before; whether there was a batch.

        It is what `_dispatch` does, less all that is known by then: small models would notice.
        None where it is for `_dispatch` to do, which finds what was fetched.
        """
        if n > 1:
            return self._several_as_before(n)
        source = self.source
        if source.gathers:  # `advance_singly` has found none that is usual.
            return None
        try:
            item = source.fetch_one()
        except StopIteration:
            return False if source is self.source else None
        if source is not self.source:  # Reading it has set other data.
            return None
        key, leaves = self.intake.recall(item)
        if (ready := self._ready.get(key)) is None:
            return None
        split = self.strategy.split
        self._run(ready, [split(leaf) for leaf in leaves], 1)
        source.stepped(1)
        return True

    def _several_as_before(self, n: int) -> bool | None:
        """Likewise, on rows of resident data that come all at once; None where they do not."""
        stream = self.source.stream
        ready = self._ready.get((n, getattr(stream, "batch_size", 0)))
        if ready is None:
            return None
        step, position = self.step, stream.get_state()
        try:
            rows = stream.next_rows_of(n)
            if rows is None:
                return None
            self._run(ready, [self.strategy.split(rows, n)], n)
        except BaseException:
            if self.step == step:  # Their batches are still to come.
                stream.set_state(position)
            raise
        self.source.stepped(0)
        return True

    def _run(self, ready: _Ready, split: list[Any], n: int) -> None:
        """Runs the update on arrays of a batch, or of `n` batches."""
        if self._kept:
            self.secure_kept()
        batch = ready.structure.unflatten(split + ready.more)
        moving, still = self._held
        results = ready.update(moving, self.tally.totals, still, *ready.data, batch)
        moving, totals, self.grads, changed = results
        self._held = self._held.after(moving, changed) if changed else Held(moving, still)
        self.step += n
        self.tally.add(totals, n, ready.n_examples)

    def _bound(self) -> None:
        """Notes the latest step, and waits for one before it."""
        self._n_unlooked = 0
        # No later step uses the totals up: waiting for these waits for the step.
        for sums in self.tally.totals.values():
            self._in_flight.append(sums)
            break
        else:  # A step of the user's own that reports nothing.
            jax.block_until_ready(self._held.moving)
        if len(self._in_flight) > self._most_in_flight:
            self._in_flight.popleft().block_until_ready()

    @explained
    def wait(self) -> None:
        """Waits until the devices have done all steps."""
        jax.block_until_ready([*self._in_flight, *self.tally.totals.values(), *self._held.moving])

    def _portions(self, n: int) -> list[Portion]:
        """The next `n` batches if they share a program, else one; none at the end of the data."""
        source = self.source
        items = source.fetch(n)
        if source is not self.source:  # Reading it has set other data.
            return self._portions(n)
        portions = self.intake.portions(items, self._inspect)
        return portions if len(portions) == n else portions[:1]

    def _at_once(self, n: int) -> int:
        """How many of the next `n` steps are taken in one dispatch, which the next batch tells.

        It is to depend on nothing else: a run that goes on from here takes the same ones together.
        """
        if not self._may_unroll:
            return n
        source = self.source
        is_mixed = self.task.step is not None and not source.gathers
        if is_mixed or not self.intake.has_looked:
            portions = self.intake.portions(source.peek(), self._inspect)
            if source is not self.source:  # Reading it has set other data.
                return self._at_once(n)
            if is_mixed and portions:
                self.unrolls = self._own_step_convolves(portions[0])
        return min(n, MOST_UNROLLED) if self.unrolls else n

    def _own_step_convolves(self, portion: Portion) -> bool:
        found = self._convolves.get(portion.signature)
        if found is None:
            step, batch = portion.strategy.bind(make_step(self.task)), portion.batch
            with calls_explained(batch.inputs, batch.targets):
                traced = trace(step, shapes_of(self.state), shapes_of(batch))
            found = self._convolves[portion.signature] = traced.has_convolutions
        return found

    def _dispatch(self, portions: list[Portion], source: Source | None) -> None:
        """Runs the compiled update. The source lets its batches go once the new state is stored."""
        strategy, signature = portions[0].strategy, portions[0].signature
        n = len(portions)
        batch = self._split(portions)
        is_whole = strategy is self.strategy
        intake, held, totals = self.intake, self._held, self.tally.totals
        if not is_whole:
            held, totals = self._moved(strategy, held, totals)
        is_gathered = intake.resident is not None and is_whole and source is not None
        data = (intake.resident,) if is_gathered else ()
        arguments = (held.moving, totals, held.still, *data, batch)
        key = (n, signature, intake.resident_shapes if data else None)
        update = self.programs.compiled.get(key)
        if update is None:
            update = self.programs.compile(
                key,
                lambda: self._build(portions[0], arguments, n_steps=n),
                portions[0],
                step=self.step + 1,
                resident=data[0] if data else None,
            )
        self.secure_kept()
        moving, totals, grads, changed = update(*arguments)
        held = held.after(moving, changed)
        if not is_whole:
            held, totals = self._moved(self.strategy, held, totals)
        self._held, self.grads = held, grads
        self.step += n
        self.tally.add(totals, n, sum(portion.n_examples for portion in portions))
        self.agreement.stepped(key)
        if source is not None:
            source.stepped(n)
            if is_whole and source is self.source:
                self._remember(portions, update, data)

    def _remember(
        self, portions: list[Portion], update: Callable[..., Any], data: tuple[Any, ...]
    ) -> None:
        """Has batches like these be stepped with less ado the next time."""
        key, n = portions[0].key, len(portions)
        if any(portion.key is None or portion.key != key for portion in portions):
            return  # Such as a remainder, which has other weights than the next.
        if n > 1:
            key = n, key
            # A class of the user's own may give rows of its own.
            if not (data and type(self.source.stream) is ArrayStream):
                return
        # Of several processes, which may bring other batches, each notes what it does.
        if key in self._ready or (self.agreement.is_needed and not data):
            return
        batch = portions[0].batch if n == 1 else stack_batches([each.batch for each in portions])
        # The weights are the same in each step: they go to the devices but once.
        more = [] if batch.weights is None else [jnp.asarray(batch.weights)]
        more = self.strategy.split(more, n if n > 1 else 0)
        n_examples = sum(portion.n_examples for portion in portions)
        structure = jax.tree.structure(batch)
        self._ready[key] = _Ready(update, data, structure, more, n_examples)

    def _moved(self, strategy: Strategy, held: Held, totals: Any) -> tuple[Held, Any]:
        """What a step takes, where that strategy wants it; not copied where it is there already."""
        state, totals = strategy.share((self._form.together(held), totals))
        return self._form.apart(state), totals

    def _split(self, portions: list[Portion]) -> Any:
        """The batches as the update takes them: each device's part of one, or of several."""
        strategy, batch = portions[0].strategy, portions[0].batch
        if len(portions) == 1:
            return strategy.split(batch)
        batch = stack_batches([portion.batch for portion in portions])
        return strategy.split(batch, len(portions))

    def _build(self, portion: Portion, arguments: tuple[Any, ...], *, n_steps: int) -> Any:
        update = make_update(
            self.task,
            axis_name=portion.strategy.axis_name,
            virtual_replicas=getattr(portion.strategy, "virtual_replicas", None),
            n_steps=n_steps,
            unroll=self.unrolls,
            skip_empty=portion.is_weighted,
            norms=self.norms,
            **self._options,
        )
        update = on_held(update, self._form, portion.strategy.constrain)
        return portion.strategy.compile(update, arguments, n_donated=1)

    def cost(self, n: int | None) -> StepCost:
        """The operations of a step on `n` examples, on all devices together; `nan` if eager."""
        if runs_eagerly(self.strategy):
            return StepCost(math.nan, recomputes=False)
        step, example = make_step(self.task), self.intake.example(n, self._inspect)
        return cost_of(self.strategy.bind(step), shapes_of(self.state), shapes_of(example))

    def count_bytes(self, n: int | None) -> int:
        """The memory of a step on `n` examples, on each device; compiles it, and runs nothing."""
        portion = self.intake.as_regular(self.intake.example(n, self._inspect))
        moving, still = self._held
        arguments = (moving, self.tally.totals, still, portion.strategy.split(portion.batch))
        return memory_of(self._build(portion, arguments, n_steps=1))

    def _inspect(self, batch: Batch, data: Batch | None) -> str:
        """Looks at the first batch: why it may not be padded. Sets what is to be counted, too."""
        bind, norms = self.strategy.bind, self.norms
        if self.task.step is not None:
            step = make_step(self.task)
            traced = inspect_step(step, self.state, batch, data, bind)
            sums: Any = traced.shapes
            why_not = "the task has a step of its own"
        else:
            traced = inspect(
                self.task,
                self.state,
                batch,
                data,
                bind,
                self._traced,
                is_resumed=self.source.is_resumed,
            )
            result = traced.shapes
            grad_norm = self._options["grad_norm"]
            sums = result.sums | more_sums(self.task, result, grad_norm=grad_norm, norms=norms)
            why_not = self._why_not_pad(result.values)
            self._say_not_added(result.not_added)
            if not self._knows_products and (why := why_wide(self.task, self.state, batch, bind)):
                self._say(why)
            self._knows_products = True
        self.unrolls = self._may_unroll and traced.has_convolutions
        if self.tally.expect(sums):
            self._say("the metrics were changed in the middle of their span: it is counted anew")
            self.reset_totals()
        return why_not

    def _say_not_added(self, names: Iterable[str]) -> None:
        """Says once what the model leaves behind that may be meant as a term of the loss."""
        new = [name for name in names if name not in self._not_added]
        self._not_added.update(new)
        if new:
            self._say(
                f"the model leaves values in {', '.join(new)}, which are not added to the loss. "
                f"If they are terms of it: Model(..., losses={new}) or from_nnx(..., "
                f"losses={new}), or sow them in 'losses'"
            )

    def _why_not_pad(self, values: Any) -> str:
        if not self.task.pad:
            return "the task has pad=False"
        if values.ndim == 0:
            return "the loss returns a scalar, not one value per example"
        if jax.tree.leaves(self.state.model_state) and self.task.mutable not in (False, (), []):
            return "the model keeps statistics of what it sees, such as BatchNorm's"
        return ""


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def _secure(references: Sequence[weakref.ref[Later]]) -> None:
    for reference in references:
        if (kept := reference()) is not None:
            kept.secure()
