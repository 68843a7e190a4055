"""Trainer: the loop of a model, created on first use from its starting point."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flaxfit import checkpoints
from flaxfit.callbacks._callback import Callback
from flaxfit.callbacks._history import History
from flaxfit.callbacks._progress import ENDLESS
from flaxfit.checkpoints._reader import nothing_in
from flaxfit.data import DataStream, as_stream, one_pass
from flaxfit.data._batch import Batch, normalize
from flaxfit.data._stream import is_shared
from flaxfit.loop import (
    CallbackList,
    PlacedCompanions,
    TrainLoop,
    by_one_thread,
    check_thread,
    copier,
)
from flaxfit.model._instance import Instance
from flaxfit.model._starting_point import Init, StartingPoint
from flaxfit.model._weights import open_weights, state_alone
from flaxfit.optim._extended import generations_of
from flaxfit.optim._freeze import check_patterns
from flaxfit.state import Checkpoint, TrainState
from flaxfit.strategies import Strategy
from flaxfit.task import TrainTask, averaged_by, frozen_as, frozen_facts, with_generations
from flaxfit.tree import Data, InitFn, PyTree, Variables, without_mesh

_EXAMPLES = {"optimizer": "optax.adam(1e-3)", "loss": "'mse'"}


class Trainer:
    """Owns the `TrainLoop` of a model, created on first use from a `StartingPoint`."""

    def __init__(
        self,
        name: str,
        init: InitFn,
        task: TrainTask,
        strategy: Strategy,
        *,
        seed: int,
        snapshot: str,
    ):
        copier(snapshot, strategy)  # Raises an error here rather than in the first `fit`.
        self.name = name
        """The class of the module."""
        self.strategy = strategy
        self.starting_point = StartingPoint(init, task, strategy, seed)
        """The start of the loop; it holds no state while a loop exists."""
        self.loop: TrainLoop | None = None
        self.history: History | None = None
        """The history of the latest `fit`, also when it was interrupted."""
        self.n_epochs = 0
        """The number of epochs trained."""
        self.calls_done: set[tuple[str, int]] = set()
        """The folders and first steps of calls of `fit` that were not interrupted."""
        self.trainable = True
        """Whether the model may be trained; `freeze` selects the frozen parameters."""
        self.lacks: list[str] = []
        """The missing arguments without which the model cannot be trained."""
        self.instance = Instance(task.apply, name)
        self._snapshot = snapshot
        self._no_data: object = None
        """The empty stream of the loop while it trains on single batches."""

    @property
    def task(self) -> TrainTask:
        """The training task without data, with the parameters frozen that callbacks froze."""
        start = self.starting_point
        if self.loop is not None:
            start.task = frozen_as(start.task, self.loop.task)
        return start.task

    @property
    def _present(self) -> TrainLoop | StartingPoint:
        """The holder of the state."""
        return self.starting_point if self.loop is None else self.loop

    @property
    def is_fresh(self) -> bool:
        """Whether a saved run may be resumed: nothing was trained or loaded by `load`."""
        return self.loop is None and not self.starting_point.is_continued

    @property
    def has_weights(self) -> bool:
        """Whether there is a state."""
        return self.loop is not None or self.starting_point.has_weights

    @property
    def step(self) -> int:
        """The number of completed updates."""
        return self._present.step

    @property
    def state(self) -> TrainState:
        """The training state, a copy; setting it continues from another one."""
        check_thread(self)
        return self._present.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._present.restore(state)

    @property
    def state_in_place(self) -> TrainState:
        """The training state, not copied: the next step donates it."""
        return self.state if self.loop is None else self.loop.state_in_place

    @property
    def _companions(self) -> PlacedCompanions:  # As a loop's, for an `EvalLoop`.
        return self._present._companions

    def checkpoint(self) -> Checkpoint:
        """Returns the present state, with companions if checkpoints hold them."""
        state, saved = self.state, self._companions.saved
        running = frozen_facts(self.task, lambda: state.params)
        return Checkpoint(
            step=int(state.step), state=state, metrics={}, companions=saved, running=running
        )

    @property
    def input_shapes(self) -> PyTree:
        """The shapes and dtypes of the model's first inputs; None before."""
        found = self._present.input_shapes
        return self.starting_point.input_shapes if found is None else found

    @property
    def revision(self) -> object:
        """Identifies the current state in place, which a step donates."""
        return id(self._present), self._present.revision

    def averaged(self, state: TrainState) -> TrainState:
        """Returns the state with the average of its parameters, if the state has one."""
        check_thread(self)
        return averaged_by(self.task, state)

    @property
    def variables(self) -> Variables:
        """A copy of the variables, with the average of the parameters if one is kept."""
        variables = self.averaged(self.state_in_place).variables
        return variables if self.loop is None else self.strategy.collect(variables)

    def freeze(self, patterns: Any) -> None:
        """Freezes the parameters that match these patterns, and trains all others.

        Patterns that do not fit the model raise a ValueError and change nothing.
        """
        known = self.starting_point.known
        if self.loop is not None:
            self.loop.freeze = patterns
        else:
            task = dataclasses.replace(self.task, freeze=patterns)
            if known is not None:  # Check now: a loaded state is converted only by `fit`.
                check_patterns(task.freeze, known.params)
            self.continue_with(task, is_same=True, quiet=True)
        self.trainable = True

    def check_trainable(self) -> None:
        """Refuses to train a model whose parameters are all frozen."""
        if not self.trainable:
            raise ValueError(
                "There is nothing to train: model.trainable is False. Set it to True, or "
                "model.freeze to the patterns of the parameters that are not trained."
            )

    @without_mesh()
    def load(self, folder: str | os.PathLike[str], which: str | int) -> None:
        """Loads the state of a checkpoint; see `Model.load`."""
        reader = checkpoints.CheckpointFileReader(folder, which=which)
        found = reader.read(None if self.loop is None else self.loop.state)
        if found is None:
            raise nothing_in(reader.folder)
        if self.loop is None:
            self.starting_point.load(found, folder)
            return
        fields = {"step": found.step, "metrics": found.metrics, "companions": found.companions}
        fields["running"] = {"late": (found.running or {}).get("late", ())}
        self.loop.restore(Checkpoint(state=found.state, **fields))

    @without_mesh()
    def load_weights(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Loads weights from a file; see `Model.load_weights`."""
        put, is_whole = open_weights(path, **options)
        start = self.starting_point
        if self.loop is not None or start.has_state:
            self.state = put(self.state).replace_optimizer(self.task.optimizer)
        else:
            start.add_weights(put, state_alone(path, start.seed) if is_whole else None)

    def begin(self, inputs: Callable[[], PyTree], *, notes_shapes: bool = False) -> None:
        """Makes the state of the model, with loaded weights if there are any.

        A loaded state is compared with the model. `inputs` returns the inputs of a batch; it is
        called only if their shapes are needed, or with `notes_shapes`, for `summary`.
        """
        if self.loop is None:
            self.starting_point.begin(inputs, notes_shapes=notes_shapes)

    def begin_with(self, data: Data, *, notes_shapes: bool = False) -> Data:
        """Like `begin`, with the inputs of the first batch; returns the data with that batch."""
        first: list[PyTree] = []
        batches = one_pass(data)

        def inputs() -> PyTree:
            first.extend(itertools.islice(batches, 1))
            if not first:
                raise ValueError("Cannot initialize the model: the data holds no batches.")
            item = self.task.roles.inputs_of(first[0])
            return normalize(item, is_whole=self.task.keeps_whole).inputs

        self.begin(inputs, notes_shapes=notes_shapes)
        is_stream = hasattr(data, "one_epoch") and getattr(data, "is_repeatable", True)
        if not first or is_stream or not isinstance(data, Iterator):
            return data
        return as_stream(itertools.chain(first, batches), shared=is_shared(batches))

    def loop_over(
        self,
        saved: checkpoints.CheckpointFileReader | None,
        data: DataStream,
        *,
        n_steps: int | None,
        steps_per_call: int | str,
        callbacks: Sequence[Callback],
        stdout: bool,
    ) -> TrainLoop:
        """Returns the loop over this data, with a checkpoint after each epoch of `n_steps`.

        It resumes from the checkpoint that `saved` reads, if given. Callbacks are attached before
        the first batch is fetched. `stdout` has an effect only when the loop is created.
        """
        if self.loop is None or saved is not None:
            init = saved or self.starting_point.init
            self.loop = self._start_loop(init, data, callbacks=callbacks, stdout=stdout)
        else:
            self.loop.data = data
            CallbackList(callbacks).attach_first(self.loop)
        n_done = self.loop.n_completed_steps  # The steps of an unfinished epoch.
        self.loop.steps_per_call = steps_per_call
        self.loop.n_steps_per_checkpoint = n_steps or ENDLESS
        self.loop.first_checkpoint = self.loop.step - n_done + (n_steps or ENDLESS)
        return self.loop

    @by_one_thread
    def step_on(self, batch: Batch) -> Checkpoint:
        """Trains one step on a batch; the checkpoint is readable until the next step.

        It drops the data, counts and callbacks that an interrupted `fit` left in the loop.
        """
        self.check_trainable()
        if self.loop is None:
            init = self.starting_point.init
            self.loop = self._start_loop(init, None, input_sample=batch, stdout=True)
        elif self.loop.callbacks or self.loop.data is not self._no_data:
            self.loop.callbacks, self.loop.data = (), None
        self._no_data = self.loop.data
        return self.loop.next_step(batch, copy=False)

    def continue_with(self, task: TrainTask, *, is_same: bool, quiet: bool = False) -> None:
        """Switches to another task of the same model, keeping the weights; see `continued`."""
        task = with_generations(task, generations_of(self.task.optimizer))
        self.starting_point.continue_with(task, self.loop, is_same=is_same, quiet=quiet)
        self.loop = None

    def follow_module(self, task: TrainTask, init: InitFn) -> None:
        """Switches to a task of the same module, after a change of its attributes.

        Variables that do not match the present weights raise a ValueError and change nothing.
        """
        if self.loop is not None or self.starting_point.known is not None:
            self.instance.check(init, self.state_in_place.variables)
        self.starting_point.fresh = init
        self.continue_with(task, is_same=True, quiet=True)
        self.instance.follow(task.apply)

    def _start_loop(self, init: Init, data: Data, **options: Any) -> TrainLoop:
        """Returns the loop of the model, which has its own copy of the state."""
        loop = self.make_loop(init, data, snapshot=self._snapshot, **options)
        self.starting_point.release()
        return loop

    def make_loop(self, init: Init, data: Data, **options: Any) -> TrainLoop:
        """Returns a loop with the present companions of the model."""
        self.check_trainable()
        if self.lacks:
            missing = " and ".join(f"no {name}" for name in self.lacks)
            raise ValueError(
                f"Cannot train this Model, which was given {missing}: call compile("
                f"{', '.join(f'{name}={_EXAMPLES[name]}' for name in self.lacks)}) first, or "
                "Model(...) with the same arguments."
            )
        task, seed = dataclasses.replace(self.task, data=data), self.starting_point.seed
        options["compilation_cache"] = None  # `Model` has configured it.
        loop = TrainLoop(init, task, seed, strategy=self.strategy, **options)
        # Companions of a resumed checkpoint take precedence.
        if not self.is_fresh and not getattr(loop.start, "companions", None):
            self._companions.refresh()
            loop._companions.restore(self._companions.variables)
        return loop
