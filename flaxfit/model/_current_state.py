"""Current: the state that a model has at present, in its loop or, before there is one, loaded."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from flaxfit import checkpoints
from flaxfit.callbacks._progress import ENDLESS
from flaxfit.checkpoints._compare import check_params
from flaxfit.loop._train_loop import TrainLoop
from flaxfit.model._resume import SavedState
from flaxfit.model._weights import WarmStart, open_weights, state_alone
from flaxfit.state._train_state import TrainState
from flaxfit.step._init_state import init_state
from flaxfit.task._task import TrainTask


class Current:
    """What a model was trained to, or what its first loop will begin from.

    Args:
      init: a linen `init`, for fresh parameters.
    """

    def __init__(self, init: Any):
        self.init = init
        """What the first loop begins from: fresh parameters, weights of a file, a saved state."""
        self.loop: TrainLoop | None = None
        """The one loop of the model, once it was trained."""
        self._fresh = init
        self._loaded: TrainState | None = None
        self._is_given = False
        self._unchecked: Any = None

    @property
    def is_fresh(self) -> bool:
        """Whether a run may be resumed instead: nothing was trained, nor loaded by `load`."""
        return self.loop is None and not self._is_given

    @property
    def has_weights(self) -> bool:
        """Whether there is a state."""
        return self.loop is not None or self._loaded is not None

    @property
    def step(self) -> int:
        """How many updates were done."""
        if self.loop is not None:
            return self.loop.step
        return 0 if self._loaded is None else int(self._loaded.step)

    @property
    def state(self) -> TrainState:
        """A copy of the state, which stays valid. Set it to continue from another one.

        Raises:
          RuntimeError: there is none.
        """
        if self.loop is not None:
            return self.loop.state
        if self._loaded is not None:
            return self._loaded
        raise RuntimeError(
            "This model has no weights yet: call fit (epochs=1 is enough) or load before "
            "evaluate, predict, save or state."
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

    @property
    def state_in_place(self) -> TrainState:
        """The state, not copied, for what is done with it before a next step."""
        return self.state if self.loop is None else self.loop.state_in_place

    def load(self, folder: str | os.PathLike[str], which: str | int) -> None:
        """Takes over the state of a checkpoint, as `Model.load` tells."""
        if self.loop is not None:
            self.loop.restore(checkpoints.restore(folder, self.loop.state, which=which))
            return
        self._loaded, self._is_given = checkpoints.restore(folder, which=which), True
        self._unchecked = folder
        # Read again by the first `fit`, which knows what the optimizer's state looks like.
        reader = checkpoints.CheckpointFileReader(folder, self._fresh, which=int(self._loaded.step))
        self.init = SavedState(reader, only_state=True)

    def load_weights(
        self,
        path: str | os.PathLike[str],
        optimizer: Any,
        seed: int,
        /,  # A translator may have options of these names.
        *,
        partial: str | Sequence[str] | None,
        translator: Any,
        prefix: str,
        **opts: Any,
    ) -> None:
        """Takes over weights from a file, as `Model.load_weights` tells."""
        put = open_weights(path, partial=partial, translator=translator, prefix=prefix, **opts)
        warm = self.init if isinstance(self.init, WarmStart) else WarmStart(self._fresh)
        if self.loop is not None or (self._loaded is not None and self.init is not warm):
            self.state = put(self.state).replace_optimizer(optimizer)
            return
        self.init, self._loaded = warm.then(put), None
        is_own = partial is None and translator is None and not prefix
        if is_own and os.fspath(path).endswith(".safetensors"):
            self._loaded = state_alone(path, seed)

    def begin(self, task: TrainTask, seed: int, inputs: Callable[[], Any]) -> None:
        """Makes the state of a model whose weights were loaded, as a `fit` would begin with it.

        What `load` has read is compared with the model.

        Raises:
          ValueError: what was loaded is of another model; every difference is listed.
        """
        if self.loop is not None:
            return
        streams = ("params", *task.rngs)
        if isinstance(self.init, WarmStart):
            self.state = init_state(self.init, task.optimizer, seed, inputs(), collections=streams)
        elif self._loaded is not None and self._unchecked is not None:
            given = inputs()
            fresh = jax.eval_shape(
                lambda: init_state(self._fresh, optax.identity(), seed, given, collections=streams)
            )
            check_params(self._loaded.params, fresh.params, self._unchecked)
            self._unchecked = None

    def loop_over(
        self,
        init: Any,
        task: TrainTask,
        seed: int,
        *,
        n_steps: int | None,
        steps_per_call: int | str,
        callbacks: Sequence[Any],
        **options: Any,
    ) -> TrainLoop:
        """The one loop, set to go over the data of a task with a checkpoint each epoch.

        Args:
          init: what the first loop begins from.
          task: what to train; of a loop that is there already, only its data is new.
          seed: as of the model.
          n_steps: how many steps an epoch has, where that is known.
          steps_per_call: as of a `TrainLoop`.
          callbacks: those that guard what comes before the first step.
          **options: those of a `TrainLoop`, where there is none yet.
        """
        n_done = 0
        if self.loop is None:
            self.loop = TrainLoop(init, task, seed, callbacks=callbacks, grad_norm=False, **options)
            self.init, self._loaded = self._fresh, None  # The loop has its own copy.
            n_done = self.loop.n_completed_steps  # Of an epoch that was not finished.
        else:
            self.loop.data = task.data
            for callback in callbacks:
                callback.attach(self.loop)
        self.loop.steps_per_call = steps_per_call
        self.loop.n_steps_per_checkpoint = n_steps or ENDLESS
        self.loop.first_checkpoint = self.loop.step - n_done + (n_steps or ENDLESS)
        return self.loop
