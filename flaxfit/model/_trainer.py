"""Trainer: the one loop of a model, or the state that its first loop will begin with."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import optax

from flaxfit import checkpoints
from flaxfit.callbacks._callback import Callback
from flaxfit.callbacks._history import History
from flaxfit.callbacks._progress import ENDLESS
from flaxfit.checkpoints._compare import check_params
from flaxfit.checkpoints._reader import nothing_in
from flaxfit.data import DataStream, as_stream, one_pass
from flaxfit.data._batch import Batch, normalize
from flaxfit.data._stream import is_shared
from flaxfit.loop._callback_list import CallbackList
from flaxfit.loop._ownership import copier
from flaxfit.loop._placed_companions import PlacedCompanions
from flaxfit.loop._train_loop import TrainLoop
from flaxfit.model._continued import StateReader, continued
from flaxfit.model._instance import Instance
from flaxfit.model._weights import WarmStart, open_weights, state_alone
from flaxfit.optim._freeze import check_patterns
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.state._train_state import TrainState
from flaxfit.step._init_state import init_state
from flaxfit.step._validate import shapes_of
from flaxfit.strategies import Strategy
from flaxfit.strategies._eager import eagerly
from flaxfit.task._companions import are_same
from flaxfit.task._task import TrainTask, averaged_by
from flaxfit.tree._context_mesh import without_mesh
from flaxfit.tree._types import Data, InitFn, PyTree, Variables

Init = InitFn | TrainState | checkpoints.CheckpointFileReader | StateReader
"""What a `TrainLoop` begins with."""


_EXAMPLES = {"optimizer": "optax.adam(1e-3)", "loss": "'mse'"}


class Trainer:
    """Trains a task in one loop, and holds the state to begin with until there is a loop."""

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
        copier(snapshot, strategy)  # Refused here rather than by the first `fit`.
        self.name = name
        """The class of the module."""
        self.task = task
        self.strategy = strategy
        self.seed = seed
        self.init: Init = init
        """What the first loop begins with: fresh parameters, weights of a file, a saved state."""
        self.loop: TrainLoop | None = None
        self.history: History | None = None
        """The history of the latest `fit`, also when it was interrupted."""
        self.n_epochs = 0
        """The number of epochs trained."""
        self._snapshot = snapshot
        self._fresh = init
        self._loaded: TrainState | None = None
        self._is_given = False
        self._n_given = 0
        """How often a state was given while there was no loop."""
        self.trainable = True
        """Whether the model may be trained; `freeze` says which of its parameters are."""
        self._placed: PlacedCompanions | None = None
        """The companions of the task, or of a loaded checkpoint, while there is no loop."""
        self.lacks: list[str] = []
        """What the model was not given and cannot be trained without."""
        self._shapes: PyTree = None
        """The shapes of the inputs that made the parameters."""
        self._no_data: object = None
        """The stream of the loop while it is given single batches."""
        self.instance = Instance(task.apply, name)
        self._unchecked: str | os.PathLike[str] | None = None
        """The folder of a loaded state whose shapes are not yet compared with the model."""

    @property
    def is_fresh(self) -> bool:
        """Whether a saved run may be resumed: nothing was trained, or loaded by `load`."""
        return self.loop is None and not self._is_given

    @property
    def has_weights(self) -> bool:
        """Whether there is a state."""
        return self.loop is not None or self._loaded is not None or _gives_weights(self.init)

    @property
    def step(self) -> int:
        """The number of completed updates."""
        if self.loop is not None:
            return self.loop.step
        return 0 if self._loaded is None else int(self._loaded.step)

    @property
    def state(self) -> TrainState:
        """The training state, a copy; setting it continues from another one."""
        if self.loop is not None:
            return self.loop.state
        if self._loaded is not None:
            reader = self.init
            return reader.state(self._loaded) if isinstance(reader, StateReader) else self._loaded
        if _gives_weights(self.init):
            init: Any = self.init
            optimizer, streams = self.task.optimizer, ("params", *self.task.rngs)
            with eagerly(self.strategy):
                return init_state(init, optimizer, self.seed, (), collections=streams)
        raise RuntimeError(
            "This model has no weights yet: call build(x), fit, evaluate, predict or load before "
            "save or state."
            if not isinstance(self.init, WarmStart)
            else "The shapes that the loaded weights have to fit are not known yet: call predict, "
            "evaluate or fit before save or state."
        )

    @state.setter
    def state(self, state: TrainState) -> None:
        if self.loop is not None:
            self.loop.restore(state)
        else:
            self.init = self._loaded = state
            self._n_given += 1

    @property
    def state_in_place(self) -> TrainState:
        """The training state, not copied: the next step uses it up."""
        return self.state if self.loop is None else self.loop.state_in_place

    @property
    def _companions(self) -> PlacedCompanions:
        if self.loop is not None:
            return self.loop._companions
        self._placed = self._placed or PlacedCompanions(self.task, self.strategy)
        return self._placed

    def checkpoint(self) -> Checkpoint:
        """The present state with its companions, if checkpoints hold them."""
        state, saved = self.state, self._companions.saved
        return Checkpoint(step=int(state.step), state=state, metrics={}, companions=saved)

    @property
    def input_shapes(self) -> PyTree:
        """The shapes and dtypes of the first inputs that the model was given; None before."""
        found = None if self.loop is None else self.loop.input_shapes
        return self._shapes if found is None else found

    @property
    def revision(self) -> object:
        """Identifies the present state in place, which a step uses up."""
        return self._n_given if self.loop is None else (id(self.loop), self.loop.revision)

    def averaged(self, state: TrainState) -> TrainState:
        """Returns the state with the average of its parameters, if one is kept.

        Weights loaded from a file have no average, and are used themselves.
        """
        return averaged_by(self.task, state)

    @property
    def variables(self) -> Variables:
        """A copy of the variables, with the average of the parameters if one is kept."""
        variables = self.averaged(self.state_in_place).variables
        return variables if self.loop is None else self.strategy.collect(variables)

    def write_back(self, error: BaseException | None) -> None:
        """Writes the weights into an nnx instance that was given; `error` has ended the `fit`."""
        self.instance.write(lambda: self.variables, error)

    def freeze(self, patterns: Any) -> None:
        """Freezes the parameters that match these patterns, and trains all others.

        Raises:
          ValueError: they do not fit the model; nothing has changed then.
        """
        task = dataclasses.replace(self.task, freeze=patterns)
        if self.loop is not None:
            self.loop.freeze = patterns
            self.task = task
        else:
            if self._loaded is not None:  # Which may be read again, and checked, only by `fit`.
                check_patterns(task.freeze, self._loaded.params)
            self.continue_with(task, is_same=True, quiet=True)
        self.trainable = True

    def check_trainable(self) -> None:
        """Refuses to train a model whose parameters are all frozen."""
        if not self.trainable:
            raise ValueError(
                "There is nothing to train: model.trainable is False. Set it to True, or "
                "model.freeze to the patterns of the parameters that are not trained."
            )

    def load(self, folder: str | os.PathLike[str], which: str | int) -> None:
        """Loads the state of a checkpoint; see `Model.load`."""
        reader = checkpoints.CheckpointFileReader(folder, which=which)
        found = reader.read(None if self.loop is None else self.loop.state)
        if found is None:
            raise nothing_in(reader.folder)
        fields = {"step": found.step, "metrics": found.metrics, "companions": found.companions}
        if self.loop is not None:
            self.loop.restore(Checkpoint(state=found.state, **fields))
            return
        placed = PlacedCompanions(self.task, self.strategy)
        placed.restore(found.companions)
        self._loaded, self._placed, self._is_given = found.state, placed, True
        self._n_given += 1
        self._unchecked = folder
        # Read again by the first `fit`, which knows what the optimizer's state looks like.
        reader = checkpoints.CheckpointFileReader(folder, self._fresh, which=int(self._loaded.step))
        self.init = StateReader(reader)

    def load_weights(
        self,
        path: str | os.PathLike[str],
        /,  # A translator may have options of this name.
        *,
        partial: str | Sequence[str] | None,
        translator: Any,
        prefix: str,
        **opts: Any,
    ) -> None:
        """Loads weights from a file; see `Model.load_weights`."""
        put = open_weights(path, partial=partial, translator=translator, prefix=prefix, **opts)
        warm = self.init if isinstance(self.init, WarmStart) else WarmStart(self._fresh)
        if self.loop is not None or (self._loaded is not None and self.init is not warm):
            self.state = put(self.state).replace_optimizer(self.task.optimizer)
            return
        self.init, self._loaded = warm.then(put), None
        is_own = partial is None and translator is None and not prefix
        if is_own and os.fspath(path).endswith(".safetensors"):
            self._loaded = state_alone(path, self.seed)

    def begin(self, inputs: Callable[[], PyTree], *, notes_shapes: bool = False) -> None:
        """Makes the state of the model, with loaded weights if there are any.

        A state that was loaded is compared with the model. `inputs` returns the inputs of a batch,
        and is called only if their shapes are needed, or noted for `summary`.

        Raises:
          ValueError: the weights or the state are of another model; every difference is listed.
        """
        if self.loop is not None:
            return
        task, streams = self.task, ("params", *self.task.rngs)
        with eagerly(self.strategy), without_mesh():
            if isinstance(self.init, WarmStart) or not self.has_weights:
                given, fresh = inputs(), cast(Any, self.init)
                self.state = init_state(
                    fresh,
                    task.optimizer,
                    self.seed,
                    given,
                    collections=streams,
                    shardings=self.strategy.shardings,
                )
                self._shapes = shapes_of(given)
            elif self._loaded is not None and self._unchecked is not None:
                given, none = inputs(), optax.identity()
                fresh = jax.eval_shape(
                    lambda: init_state(self._fresh, none, self.seed, given, collections=streams)
                )
                check_params(self._loaded.params, fresh.params, self._unchecked)
                self._unchecked = None
            elif notes_shapes:
                self._shapes = shapes_of(inputs())

    def begin_with(self, data: Data, *, notes_shapes: bool = False) -> Data:
        """As `begin`, with the inputs of the first batch; returns the data with that batch."""
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
        init: Init,
        data: DataStream,
        *,
        n_steps: int | None,
        steps_per_call: int | str,
        callbacks: Sequence[Callback],
        stdout: bool,
    ) -> TrainLoop:
        """Returns the loop over this data, with a checkpoint after each epoch of `n_steps`.

        The callbacks are attached before the first batch is fetched. `init` and `stdout` matter
        only to the first loop.
        """
        n_done = 0
        if self.loop is None:
            self.loop = self._start_loop(init, data, callbacks=callbacks, stdout=stdout)
            n_done = self.loop.n_completed_steps  # Of an epoch that was not finished.
        else:
            self.loop.data = data
            CallbackList(callbacks).attach_first(self.loop)
        self.loop.steps_per_call = steps_per_call
        self.loop.n_steps_per_checkpoint = n_steps or ENDLESS
        self.loop.first_checkpoint = self.loop.step - n_done + (n_steps or ENDLESS)
        return self.loop

    def step_on(self, batch: Batch) -> Checkpoint:
        """Trains one step on a batch; the checkpoint can be read until the next step.

        What an interrupted `fit` has left of its data, its count and its callbacks is dropped.
        """
        self.check_trainable()
        if self.loop is None:
            self.loop = self._start_loop(self.init, None, input_sample=batch.inputs, stdout=True)
        elif self.loop.callbacks or self.loop.data is not self._no_data:
            self.loop.callbacks, self.loop.data = (), None
        self._no_data = self.loop.data
        return self.loop.next_step(batch, copy=False)

    def continue_with(self, task: TrainTask, *, is_same: bool, quiet: bool = False) -> None:
        """Trains another task of the same model from now on, from the present weights.

        `is_same` says whether that has the same optimizer, maybe with other options; `quiet` is as
        of `continued`.
        """
        before, is_loaded = self.task, self._loaded is not None and self.init is self._loaded
        if self.loop is not None or is_loaded:
            state = continued(self.state, task, is_same=is_same, quiet=quiet)
            self._shapes, self._is_given = self.input_shapes, self._is_given or not self.is_fresh
            self.init = self._loaded = state
        elif isinstance(self.init, StateReader):
            self.init = self.init.followed_by(task, before, is_same, quiet)
        placed = self._placed if self.loop is None else self.loop._companions
        self._placed = placed if are_same(task.companions, before.companions) else None
        self.task, self.loop = task, None

    def follow_module(self, task: TrainTask, init: InitFn) -> None:
        """Continues with a task of the same module, whose attributes were changed.

        Raises:
          ValueError: it has other variables than the present weights; nothing has changed then.
        """
        if self.loop is not None or self._loaded is not None:
            self.instance.check(init, self.state_in_place.variables)
        self.init = init if self.init is self._fresh else self.init
        self._fresh = init
        self.continue_with(task, is_same=True, quiet=True)
        self.instance.follow(task.apply)

    def _start_loop(self, init: Init, data: Data, **options: Any) -> TrainLoop:
        """Returns the one loop of the model, which has its own copy of the state."""
        loop = self.make_loop(init, data, snapshot=self._snapshot, **options)
        self.init, self._loaded, self._placed = self._fresh, None, None
        return loop

    def make_loop(self, init: Init, data: Data, **options: Any) -> TrainLoop:
        """Returns a loop with the companions of the model, which a checkpoint may have brought."""
        self.check_trainable()
        if self.lacks:
            missing = " and ".join(f"no {name}" for name in self.lacks)
            raise ValueError(
                f"Cannot train this Model, which was given {missing}: call compile("
                f"{', '.join(f'{name}={_EXAMPLES[name]}' for name in self.lacks)}) first, or "
                "Model(...) with the same arguments."
            )
        task = dataclasses.replace(self.task, data=data)
        options["compilation_cache"] = None  # The model has set it.
        loop = TrainLoop(init, task, self.seed, strategy=self.strategy, **options)
        if not self.is_fresh:  # Else `init` may be a checkpoint, which has its own.
            loop._companions.restore(self._companions.variables)
        return loop


def _gives_weights(init: object) -> bool:
    """Whether an `init` needs no inputs to return the weights."""
    return getattr(getattr(init, "fresh", init), "gives_weights", False)
