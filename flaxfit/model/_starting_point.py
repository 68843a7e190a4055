"""StartingPoint: the state of a model before it has a loop: fresh, loaded, or continued."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import optax

from flaxfit import checkpoints
from flaxfit.checkpoints._compare import check_fits
from flaxfit.checkpoints._tree import descriptions, leaves_of, unflatten
from flaxfit.display import say
from flaxfit.loop import PlacedCompanions, TrainLoop, agreed_shardings, eagerly, read_for
from flaxfit.model._weights import Load, WarmStart
from flaxfit.optim._extended import continued_state
from flaxfit.optim._generations import Generations, from_json
from flaxfit.optim._plain_rate import matched
from flaxfit.state import TrainState, with_opt_state
from flaxfit.step import init_state
from flaxfit.strategies import Strategy
from flaxfit.task import TrainTask, are_same, with_generations
from flaxfit.tree import InitFn, PyTree, shapes_of, without_mesh


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A reader for a loop: the state of a checkpoint, without history, position and callbacks."""

    target: InitFn
    found: checkpoints.CheckpointFile
    loaded: TrainState
    """The state, as nested dicts until `compile` needs the optimizer's types."""

    def read(self, template: TrainState) -> checkpoints.CheckpointFile:
        """Returns the checkpoint with the types of the template; a mismatch is a ValueError."""
        state, path = self._fill(template), self.found.path
        return checkpoints.CheckpointFile(step=self.found.step, state=state, metrics={}, path=path)

    def _fill(self, template: TrainState) -> TrainState:
        on_disk, frozen = descriptions(self.loaded), (self.found.running or {}).get("frozen")
        check_fits(on_disk, descriptions(template), self.found.path, frozen=frozen)
        return unflatten(leaves_of(self.loaded), template)

    def typed(self, task: TrainTask) -> TrainState | None:
        """Returns the state with the types of a task's optimizer; None if it does not fit."""

        def template(optimizer: optax.GradientTransformation) -> PyTree:
            return jax.eval_shape(lambda: self.loaded.replace_optimizer(optimizer))

        with contextlib.suppress(ValueError):
            return read_for(self._fill, template, task)[0]
        return None


Init = InitFn | TrainState | checkpoints.CheckpointFileReader | Loaded
"""The first argument of a `TrainLoop`."""


class StartingPoint:
    """The task, the seed and the state that the next loop of a model starts from.

    The members that read and replace its state are named as those of a `TrainLoop`.
    """

    def __init__(self, fresh: InitFn, task: TrainTask, strategy: Strategy, seed: int):
        self.fresh, self.task, self.seed = fresh, task, seed
        self.is_continued = False
        """Whether it was loaded by `load` or comes from a loop: no saved run replaces it."""
        self.input_shapes: PyTree = None
        """The shapes and dtypes of the inputs used for initialization; None before that."""
        self.revision = 0
        """The number of times that a state was set."""
        self._strategy = strategy
        self._given: WarmStart | Loaded | TrainState | None = None
        """The weights of files, or a state, that replace fresh parameters."""
        self._placed: PlacedCompanions | None = None
        """The companions of the task, or of a loaded checkpoint."""
        self._unchecked: str | os.PathLike[str] | None = None
        """The folder of a loaded state whose shapes are not yet compared with the model."""

    @property
    def init(self) -> Init:
        """The first argument of the loop."""
        return self.fresh if self._given is None else self._given

    @property
    def known(self) -> TrainState | None:
        """The given or loaded state, if any; the state of a file may lack an optimizer state."""
        return self._given if isinstance(self._given, TrainState | None) else self._given.loaded

    @property
    def has_state(self) -> bool:
        """Whether there is a full state, not only weights."""
        return isinstance(self._given, Loaded | TrainState)

    @property
    def has_weights(self) -> bool:
        """Whether a state can be made without inputs."""
        return self.known is not None or self._gives_weights

    @property
    def _gives_weights(self) -> bool:
        return getattr(self.fresh, "gives_weights", False)

    @property
    def step(self) -> int:
        """The number of completed updates."""
        return 0 if self.known is None else int(self.known.step)

    @property
    def state(self) -> TrainState:
        """The training state."""
        if self.known is not None:
            return self.known
        if self._gives_weights:
            with eagerly(self._strategy), without_mesh():
                return self._make(self.init, self.task.optimizer, ())
        raise RuntimeError(
            "This model has no weights yet: call build(x), fit, evaluate, predict or load before "
            "save or state."
            if self._given is None
            else "The shapes of the model, which the loaded weights must fit, are not known yet: "
            "call predict, evaluate or fit before save or state."
        )

    @property
    def _companions(self) -> PlacedCompanions:
        self._placed = self._placed or PlacedCompanions(self.task, self._strategy)
        return self._placed

    def restore(self, state: TrainState) -> None:
        """Starts from another state."""
        self._given = state
        self.revision += 1

    def load(self, found: checkpoints.CheckpointFile, folder: str | os.PathLike[str]) -> None:
        """Starts from the state of a checkpoint, and from its companions if it has any."""
        placed = PlacedCompanions(self.task, self._strategy)
        placed.restore(found.companions)
        self.restore(found.state)
        file = dataclasses.replace(found, state=None, callback_arrays={}, companions={})
        self._given = Loaded(self.fresh, file, found.state)
        self._placed, self._unchecked, self.is_continued = placed, folder, True
        self.task = with_generations(self.task, from_json((found.running or {}).get("late", ())))

    def add_weights(self, load: Load, loaded: TrainState | None) -> None:
        """Loads weights of a file into fresh parameters; `loaded` is as in `WarmStart`."""
        warm = self._given if isinstance(self._given, WarmStart) else WarmStart(self.fresh)
        self._given = warm.then(load, loaded)

    def begin(self, inputs: Callable[[], PyTree], *, notes_shapes: bool = False) -> None:
        """Makes the state, with loaded weights if there are any; see `Trainer.begin`."""
        with eagerly(self._strategy), without_mesh():
            if isinstance(self._given, WarmStart) or not self.has_weights:
                given, shardings = inputs(), agreed_shardings(self._strategy)
                made = self._make(self.init, self.task.optimizer, given, shardings=shardings)
                self.restore(made)
                self.input_shapes = shapes_of(given)
            elif self.known is not None and self._unchecked is not None:
                given, none = inputs(), optax.identity()
                fresh = jax.eval_shape(lambda: self._make(self.fresh, none, given))
                own, expected = (descriptions({"params": x.params}) for x in (self.known, fresh))
                advice = "Load it into the model that was saved."
                check_fits(own, expected, self._unchecked, advice=advice)
                self._unchecked = None
            elif notes_shapes:
                self.input_shapes = shapes_of(inputs())

    def _make(
        self, init: Any, optimizer: optax.GradientTransformation, inputs: PyTree, **options: Any
    ) -> TrainState:
        streams = ("params", *self.task.rngs)
        return init_state(init, optimizer, self.seed, inputs, collections=streams, **options)

    def continue_with(
        self, task: TrainTask, loop: TrainLoop | None, *, is_same: bool, quiet: bool
    ) -> None:
        """Switches to another task of the same model, keeping the state of a loop if given."""
        given = state = self._given if loop is None else loop.state
        if isinstance(given, Loaded):
            state = given.typed(self.task) or given.typed(task)
            # A state that fits neither is left to the loop, which refuses it; a new optimizer
            # takes at least its weights.
            state = state or (None if is_same else given.loaded)
        if isinstance(state, TrainState):
            state, generations = continued(state, task, is_same=is_same, quiet=quiet)
            task = with_generations(task, generations)
            is_file = isinstance(given, Loaded)
            self._given = dataclasses.replace(given, loaded=state) if is_file else state
        if loop is not None:
            shapes = loop.input_shapes
            self.input_shapes = self.input_shapes if shapes is None else shapes
            self._placed, self.is_continued = loop._companions, True
        if not are_same(task.companions, self.task.companions):
            self._placed = None
        self.task = task

    def release(self) -> None:
        """Releases the state, once a loop has its own copy."""
        self._given = self._placed = self._unchecked = None


def continued(
    state: TrainState, task: TrainTask, *, is_same: bool, quiet: bool = False
) -> tuple[TrainState, Generations]:
    """Converts a state to the optimizer of a task, which may be another one or have new options.

    Also returns the parameters that were unfrozen after the first update. With `is_same` the user's
    optimizer is that of the state, and its hyperparameters stay. Prints whether the optimizer state
    was kept, unless no step was trained or only `freeze` was set (`quiet`).
    """
    optimizer = task.optimizer
    if task.step is None:  # The rate of a plain optimizer may have been moved into the state.
        optimizer, _ = matched(optimizer, state.opt_state)
    opt_state, is_kept, generations = continued_state(
        state.opt_state, optimizer, state.params, state.model_state, is_same=is_same
    )
    if int(state.step) and not quiet:
        kept = "the weights and the optimizer state are kept"
        schedules = optax.tree.get_all_with_path(opt_state, "ScaleByScheduleState")
        if not is_same and (place := max((int(each.count) for _, each in schedules), default=0)):
            kept += f"; its schedule continues at step {place:,}"
        fresh = "the weights are kept; the optimizer state differs and starts from scratch"
        say(f"compiled at step {int(state.step):,}: {kept if is_kept else fresh}")
    return with_opt_state(state, opt_state), generations
