"""Stepper: takes training steps, each from a batch of the stream to the state it leads to."""

import dataclasses
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit import _totals
from flaxfit._agreement import Agreement
from flaxfit._batch import Batch, is_weighted, n_examples, normalize
from flaxfit._cost import count_flops, memory_of
from flaxfit._explain import calls_explained, explained
from flaxfit._feed import Feed, Portion, stack_batches
from flaxfit._held import Form, Held, on_held
from flaxfit._inspect import inspect, inspect_step, shapes_of, structure_of
from flaxfit._interrupt import Interrupts
from flaxfit._later import Later
from flaxfit._optimizer_axes import with_optimizer
from flaxfit._own_rows import knows_rows, own_examples, own_rows
from flaxfit._own_step import check_strategy
from flaxfit._rules import flat
from flaxfit._snapshot import is_light
from flaxfit._source import Source
from flaxfit._state import TrainState
from flaxfit._step import compute, more_sums
from flaxfit._task import TrainTask
from flaxfit._update import make_step, make_update
from flaxfit._weights import weights_by_output
from flaxfit.data import ArrayStream
from flaxfit.optim import set_hyperparams
from flaxfit.optim._extended import carry_state
from flaxfit.optim._freeze import check_matches
from flaxfit.optim._hyperparams import names_of
from flaxfit.strategies import Strategy

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
        self.executables: dict[Any, Callable[..., Any]] = {}
        self._traced: dict[Any, Any] = {}
        self._compiled_for: Any = None
        self.is_preparing = False
        """Whether it inspects the first batch or compiles, which may take long."""
        self.batch_shapes: Batch | None = None
        self.norms: tuple[str, ...] = ()
        # How the state is taken apart, once there is one, and its arrays.
        self._form: Any = None
        self._held = Held([], [])
        self._kind_of_sums: Any = None
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
        self._feed: Feed | None = None
        self._batch_size = 0
        self._resident: Batch | None = None
        self._of_rows: dict[int, Portion] = {}
        """Portions of resident data that were made before, by the number of their rows."""
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
            self._count({})
            self.executables, self._feed, self._ready = {}, None, {}
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
        self.executables, self._traced, self._ready = {}, {}, {}

    def set_norms(self, patterns: Sequence[str]) -> None:
        """Reports the norms of parameters and gradients by these patterns, from now on."""
        if tuple(patterns) == self.norms:
            return
        if self.n_completed and self._feed is not None:
            raise RuntimeError(
                f"Cannot report other norms now: {self.n_completed} steps were counted since the "
                "latest checkpoint. Set them before training, or right after a checkpoint."
            )
        if self.task.step is not None:
            raise ValueError("The task has a step of its own: let it report the norms.")
        for pattern in patterns:
            check_matches("norms", pattern, self.state.params)
        self.norms = tuple(patterns)
        self.executables, self._feed, self._ready = {}, None, {}

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
            {path: f"{x.dtype}{list(x.shape)}" for path, x in flat(tree).items()}
            for tree in (self.state, state)
        )
        if own != new:
            paths = [path for path in {**own, **new} if own.get(path) != new.get(path)]
            lines = [f"  {p}: here {own.get(p, '-')}, given {new.get(p, '-')}" for p in paths[:30]]
            raise ValueError(
                f"Cannot go on from a state of another model or optimizer; {len(paths)} arrays "
                "differ:\n" + "\n".join(lines) + "\nIf other parameters were frozen then, set "
                "`freeze` as it was, restore, and set it back."
            )

    def _count(self, sums: Any) -> None:
        """Sets what is to be counted: sums of these shapes and dtypes."""
        kind = structure_of(sums)
        if kind == self._kind_of_sums:
            return
        # Placed once, and never donated: every count begins with the same zeros.
        zeros = self.strategy.share(_totals.zero_totals(sums))
        self._read, self._zeros = _totals.reader(sums), zeros
        self._sums, self._kind_of_sums = sums, kind  # Last: what fails before is done again.

    def reset_totals(self) -> None:
        """Begins to count anew."""
        self._totals: Any = self._zeros
        self.grads: Any = None
        self.n_completed = 0
        self.n_examples = 0
        self._known_metrics: dict[str, Any] = {}
        self.compile_time = 0.0
        self.inspection_time = 0.0

    def get_running(self, *, counts: bool) -> Any:
        """What a run needs beside state and position to go on exactly, as JSON.

        That is the size of the batches, as the next one may be a remainder, and between two
        checkpoints what was counted so far.
        """
        running: dict[str, Any] = {"batch_size": self._batch_size}
        if (n_virtual := getattr(self.strategy, "virtual_replicas", None)) is not None:
            running["virtual_replicas"] = n_virtual
        if counts and self.n_completed:
            host = {dtype: np.asarray(pair).tolist() for dtype, pair in self._totals.items()}
            totals = [{dtype: pair[i] for dtype, pair in host.items()} for i in (0, 1)]
            running |= {"n_steps": self.n_completed, "totals": totals, "metrics": self.metrics()}
        return running

    def set_running(self, running: Any) -> None:
        """Goes on from what `get_running` gave."""
        self._batch_size = running["batch_size"]
        before = running.get("virtual_replicas")
        now = getattr(self.strategy, "virtual_replicas", None)
        if before != now:
            self._say(
                f"the numbers do not go on bit for bit: virtual_replicas was {before}, now is {now}"
            )
        if "n_steps" not in running:
            return
        self.n_completed = running["n_steps"]
        sums, cut_off = running["totals"]
        self._totals = {d: np.asarray([sums[d], cut_off[d]], d) for d in sums}
        self._known_metrics = {
            name: np.asarray(value) if isinstance(value, list) else value
            for name, value in running["metrics"].items()
        }

    @explained
    def metrics(self) -> dict[str, Any]:
        """The metrics over all steps since the totals were reset; waits for the device."""
        if not self.n_completed:
            return {}
        if not self._sums:
            return self._known_metrics  # Those it goes on from: no batch has shown any sums.
        return compute(self._read(self._totals), self.task.metrics)

    def first_batch(self) -> Any:
        """The batch to be trained on next.

        Raises:
          ValueError: there is none.
        """
        fetched = self.source.peek()
        if not fetched:
            raise ValueError("The data holds no batches: there is nothing to train on.")
        return self.source.examples(fetched[0])

    @explained
    def advance(self, n: int, batch: Any = None) -> bool:
        """Dispatches `n` steps at once, or one where the next batches do not share a program.

        With a batch that is given it is one step, on that, and the stream stays where it is.

        Returns whether there was a batch to step.
        """
        # From here to the release an interrupt waits, so that no batch and no state is lost.
        self.interrupts.hold()
        try:
            is_usual = batch is None and self._ready and self.source.is_between_batches
            has_stepped = self._step_as_before(n) if is_usual else None
            if has_stepped is None:
                portions = self._portions(n) if batch is None else [self._given(batch)]
                has_stepped = bool(portions)
                if has_stepped:
                    self._dispatch(portions, self.source if batch is None else None)
            if not has_stepped:
                self.agreement.end("training", self.step, self._in_flight)
                self.source.ended = True
                return False
        finally:
            self.interrupts.release()
        self._n_unlooked += 1
        if self._n_unlooked >= self._steps_per_look:
            self._n_unlooked = 0
            self._bound()
        return True

    def _step_as_before(self, n: int) -> bool | None:
        """Steps on the next batches, where such were stepped before; whether there was a batch.

        It is what `_dispatch` does, less all that is known by then: small models would notice.
        None where it is for `_dispatch` to do, which finds what was fetched.
        """
        if n > 1:
            return self._several_as_before(n)
        source = self.source
        try:
            item = source.fetch_one()
        except StopIteration:
            return False if source is self.source else None
        if source is not self.source:  # Reading it has set other data.
            return None
        split = self.strategy.split
        if source.gathers:
            if (ready := self._ready.get(len(item))) is None:
                return None
            arrays = [split(item)]
        else:
            feed: Any = self._feed  # There is one, where any batch was stepped before.
            key, leaves = feed.recall(item)
            if (ready := self._ready.get(key)) is None:
                return None
            arrays = [split(leaf) for leaf in leaves]
        self._run(ready, arrays, n)
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
        results = ready.update(moving, self._totals, still, *ready.data, batch)
        moving, self._totals, self.grads, changed = results
        self._held = self._held.after(moving, changed) if changed else Held(moving, still)
        self.step += n
        self.n_completed += n
        self.n_examples += ready.n_examples

    def _bound(self) -> None:
        """Notes the latest step, and waits for one before it."""
        # No later step uses the totals up: waiting for these waits for the step.
        for sums in self._totals.values():
            self._in_flight.append(sums)
            break
        else:  # A step of the user's own that reports nothing.
            jax.block_until_ready(self._held.moving)
        if len(self._in_flight) > self._most_in_flight:
            self._in_flight.popleft().block_until_ready()

    @explained
    def wait(self) -> None:
        """Waits until the devices have done all steps."""
        jax.block_until_ready([*self._in_flight, *self._totals.values(), *self._held.moving])

    def _portions(self, n: int) -> list[Portion]:
        """The next `n` batches if they share a program, else one; none at the end of the data."""
        source = self.source
        items = source.fetch(n)
        if source is not self.source:  # Reading it has set other data.
            return self._portions(n)
        portions = [self._portion(item) for item in items]
        if n == 1:
            return portions
        is_alike = len(portions) == n and all(
            portion.signature == portions[0].signature for portion in portions[1:]
        )
        return portions if is_alike else portions[:1]

    def _portion(self, item: Any) -> Portion:
        """A fetched batch, ready for the update."""
        if self._feed is None:
            self._feed = self._make_feed(self.source.examples(item))
        if not self.source.takes_rows:
            return self._feed(item)
        known = self._of_rows.get(len(item))
        if known is not None:
            # Only the rows differ: nothing has to be looked at again for each step.
            return Portion(known.strategy, Batch((item,), (), known.batch.weights), *known[2:])
        portion = self._feed(Batch((item,)))
        if self._resident is not None and portion.strategy is self.strategy:
            portion = portion._replace(is_weighted=is_weighted(self._resident), key=None)
            portion = own_rows(portion)
            if n_examples(portion.batch) == len(item):
                portion = self._of_rows[len(item)] = portion._replace(key=len(item))
            return portion
        if knows_rows(self.source.stream):
            return own_examples(portion, self.source.stream.pick)
        # On fewer devices than hold the data.
        return self._remainder_feed(self.source.examples(item))

    def _given(self, batch: Any) -> Portion:
        """A batch that is none of the stream's, ready for the update."""
        if self._feed is None:
            fetched = self.source.peek() if self.source.has_data else []
            first = self.source.examples(fetched[0]) if fetched else batch
            self._feed = self._make_feed(first)
        batch = normalize(batch)
        if _has_weights_by_output(batch) != _has_weights_by_output(self.batch_shapes):
            raise ValueError(
                "Cannot train on this batch: it has weights by output, and those before have not, "
                "or the other way round. Give weights of 1 where there are none."
            )
        return self._given_feed(batch)

    def _dispatch(self, portions: list[Portion], source: Source | None) -> None:
        """Runs the compiled update. The source lets its batches go once the new state is stored."""
        strategy, signature = portions[0].strategy, portions[0].signature
        n = len(portions)
        batch = self._split(portions)
        is_whole = strategy is self.strategy
        held, totals = self._held, self._totals
        if not is_whole:
            held, totals = self._moved(strategy, held, totals)
        is_gathered = self._resident is not None and is_whole and source is not None
        data = (self._resident,) if is_gathered else ()
        arguments = (held.moving, totals, held.still, *data, batch)
        key = (n, signature, self._resident_shapes if data else None)
        update = self.executables.get(key)
        if update is None:
            update = self.executables[key] = self._compile(portions, arguments, *data)
        self.secure_kept()
        moving, totals, grads, changed = update(*arguments)
        held = held.after(moving, changed)
        if not is_whole:
            held, totals = self._moved(self.strategy, held, totals)
        self._held, self._totals, self.grads = held, totals, grads
        self.step += n
        self.n_completed += n
        self.n_examples += sum(portion.n_examples for portion in portions)
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

    def _compile(
        self, portions: list[Portion], arguments: tuple[Any, ...], resident: Batch | None = None
    ) -> Any:
        self._say("compiling…")
        began, self.is_preparing = time.perf_counter(), True
        strategy, batch = portions[0].strategy, portions[0].batch
        self.agreement.program(self.step + 1, batch, is_weighted=portions[0].is_weighted)
        with calls_explained(batch.inputs, batch.targets):
            update = self._build(portions[0], arguments, n_steps=len(portions))
        seconds = time.perf_counter() - began
        self.compile_time += seconds
        self.is_preparing = False
        leaves = jax.tree.leaves(batch[:2])
        shapes = [leaf.shape for leaf in leaves]
        if resident is not None:  # The batch is gathered from it.
            leaves = jax.tree.leaves(resident[:2])
            shapes = [shapes[0] + leaf.shape[1:] for leaf in leaves]
        self._announce(shapes, [str(leaf.dtype) for leaf in leaves], len(strategy.devices), seconds)
        return update

    def _announce(self, shapes: Any, dtypes: Any, n_devices: int, seconds: float) -> None:
        """Says what was compiled, and what has changed where it was compiled before."""
        first = self._compiled_for = self._compiled_for or (shapes, dtypes)
        now = ", ".join(map(str, shapes))
        before = ", ".join(map(str, first[0]))
        if now == before and dtypes != first[1]:
            now, before = f"{now} of {', '.join(dtypes)}", ", ".join(first[1])
        again = "again " * bool(self.executables)
        after = f" (the first were of {before})" if again and now != before else ""
        self._say(
            f"compiled the training step {again}in {seconds:.1f}s, for batches of {now} on "
            f"{n_devices} device(s){after}"
        )

    def _build(self, portion: Portion, arguments: tuple[Any, ...], *, n_steps: int) -> Any:
        update = make_update(
            self.task,
            axis_name=portion.strategy.axis_name,
            virtual_replicas=getattr(portion.strategy, "virtual_replicas", None),
            n_steps=n_steps,
            skip_empty=portion.is_weighted,
            norms=self.norms,
            **self._options,
        )
        update = on_held(update, self._form, portion.strategy.constrain)
        return portion.strategy.compile(update, arguments, n_donated=1)

    def count_flops(self, n: int | None) -> float:
        """The operations of a step on `n` examples, on all devices together."""
        step = make_step(self.task)
        return count_flops(
            self.strategy.bind(step), shapes_of(self.state), shapes_of(self._batch_of(n))
        )

    def count_bytes(self, n: int | None) -> int:
        """The memory of a step on `n` examples, on each device; compiles it, and runs nothing."""
        batch = self._batch_of(n)
        feed = Feed(
            self.strategy,
            pad=self._feed is not None and self._feed.pad,
            why_not="the task or its loss does not allow it",
            size=n_examples(batch),
            parts=self.task.accumulate,
        )
        portion = feed(batch)
        moving, still = self._held
        arguments = (moving, self._totals, still, portion.strategy.split(portion.batch))
        return memory_of(self._build(portion, arguments, n_steps=1))

    def _batch_of(self, n: int | None) -> Batch:
        """A batch of `n` examples, all zeros: memory that is taken only where it is written to."""
        if self._feed is None:
            self.first_batch()
            self._portion(self.source.peek()[0])
        size = n or self._batch_size
        size += -size % self.task.accumulate
        return jax.tree.map(lambda x: np.zeros((size, *x.shape[1:]), x.dtype), self.batch_shapes)

    def _make_feed(self, item: Any) -> Feed:
        """Looks at the first batch: the sums that it gives, and whether batches can be padded."""
        began, self.is_preparing = time.perf_counter(), True
        batch = normalize(item)
        self.batch_shapes = shapes_of(batch)
        source, stream = self.source, self.source.stream
        is_own = self.strategy.n_processes > 1 and not source.takes_rows
        if not is_own:
            self.agreement.data(source.stream_position())
        whole = stream.whole() if hasattr(stream, "whole") else None
        data = None if whole is None else normalize(whole)
        self._resident = self.strategy.place(data) if source.gathers else None
        is_free = source.gathers and len(self.strategy.devices) == 1
        self._steps_per_look = _RESIDENT_STEPS_PER_LOOK if is_free else 1
        self._most_in_flight = _RESIDENT_LOOKS_IN_FLIGHT if is_free else _STEPS_IN_FLIGHT
        leaves = jax.tree.leaves(self._resident)
        structure = jax.tree.structure(self._resident)
        # As a text, since each step looks its program up by it and a text keeps its hash.
        self._resident_shapes = repr((structure, *((leaf.shape, leaf.dtype) for leaf in leaves)))
        sums, why_not = self._inspect(batch, data)
        self._count(sums)
        is_same = jax.tree.map(np.shape, self._zeros) == jax.tree.map(np.shape, self._totals)
        if self.n_completed and not is_same:
            self._say("the metrics were changed in the middle of their span: it is counted anew")
            self.reset_totals()
        if not self.n_completed:
            self._totals = self._zeros
        # A first batch that is smaller than those of the stream is a remainder already.
        size = n_examples(batch)
        if not is_own:
            size = max(size, getattr(stream, "batch_size", 0))
        n = self._batch_size = self._batch_size or size
        parts = self.task.accumulate
        is_mixed = self.task.step is not None  # It looks at each batch itself.
        options: dict[str, Any] = {"why_not": why_not, "parts": parts, "is_mixed": is_mixed}
        self._remainder_feed = Feed(self.strategy, pad=False, size=n, **options)
        # Given batches may have any size: they are padded no further than to divide, or narrowed.
        self._given_feed = Feed(
            self.strategy,
            pad=not why_not,
            size=sys.maxsize if why_not else 1,
            is_own=self.strategy.n_processes > 1,
            **options,
        )
        self.inspection_time += time.perf_counter() - began
        self.is_preparing = False
        # Where no batch can be another than the first one, all do without weights of 1. A class of
        # the user's own may make of the arrays what it likes.
        is_plain = type(stream) is ArrayStream
        is_even = is_plain and stream.is_even and n == stream.batch_size
        return Feed(
            self.strategy,
            pad=not why_not,
            size=n,
            is_own=is_own,
            is_even=is_even,
            say=self._say,
            **options,
        )

    def _inspect(self, batch: Batch, data: Batch | None) -> tuple[Any, str]:
        """The shapes of the sums of a step, and why rows of weight 0 would do harm, if so."""
        bind, norms = self.strategy.bind, self.norms
        if self.task.step is not None:
            sums = inspect_step(make_step(self.task), self.state, batch, data, bind)
            return sums, "the task has a step of its own"
        result = inspect(
            self.task,
            self.state,
            batch,
            data,
            bind,
            self._traced,
            is_resumed=self.source.is_resumed,
        )
        more = more_sums(self.task, result, grad_norm=self._options["grad_norm"], norms=norms)
        return result.sums | more, self._why_not_pad(result.values)

    def _why_not_pad(self, values: Any) -> str:
        if not self.task.pad:
            return "the task has pad=False"
        if values.ndim == 0:
            return "the loss returns a scalar, not one value per example"
        if jax.tree.leaves(self.state.model_state) and self.task.mutable not in (False, (), []):
            return "the model keeps statistics of what it sees, such as BatchNorm's"
        return ""


def _has_weights_by_output(batch: Any) -> bool:
    return bool(weights_by_output(batch.targets))


def _secure(references: Sequence[weakref.ref[Later]]) -> None:
    for reference in references:
        if (kept := reference()) is not None:
            kept.secure()
