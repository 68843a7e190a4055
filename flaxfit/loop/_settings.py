"""Settings: what can be set while a training loop is under way."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

from flaxfit.display import count, number, place, plural
from flaxfit.display._html import arrays, card, n_numbers, table
from flaxfit.loop._callback_list import CallbackList
from flaxfit.loop._run_state import RunState
from flaxfit.loop._schedule import Schedule
from flaxfit.loop._steps_per_call import StepsPerCall
from flaxfit.loop._tuning import follows_schedule, freeze, present_hyperparams, tune
from flaxfit.optim._hyperparams import group_name
from flaxfit.task._repr import describe_loss
from flaxfit.task._task import TrainTask
from flaxfit.tree._types import ApplyFn, ArrayLike, Data

_FIELDS = ("params", "model_state", "opt_state")
_OPTIONS = {field.name for field in dataclasses.fields(TrainTask)}
_RATES = ("lr", "learning_rate")


class Settings(RunState):
    """The part of `TrainLoop` that is set between two steps; all of it affects the next step."""

    schedule: Schedule
    """Which steps yield a checkpoint; can be set."""
    first_epoch: int | None = None
    """The number of the first epoch of `fit`, from 0; None: there are no epochs."""
    eval_apply: Callable[[], ApplyFn] | None = None
    """Returns the model in evaluation mode, in `fit`; None: the loop does not know it."""
    _callbacks: CallbackList
    _is_finishing: bool = False
    _not_taken_over: Sequence[str] = ()

    def __repr__(self) -> str:
        n_params = count(n_numbers(self.state_in_place.params))
        return (
            f"TrainLoop({describe_loss(self.task.loss)}, step={self.step}, n_steps={self.n_steps}, "
            f"n_steps_per_checkpoint={self.n_steps_per_checkpoint}, {self._stepper.strategy}, "
            f"{n_params} params)"
        )

    def _repr_html_(self) -> str:
        """Where it is, which steps yield checkpoints, and its arrays, as a notebook shows them."""
        schedule, state, devices = (
            self.schedule,
            self.state_in_place,
            self._stepper.strategy.devices,
        )
        first, second = schedule.first, schedule.first + schedule.every
        facts = [
            f"{count(n_numbers(state.params))} params",
            plural(len(devices), f"{devices[0].platform} device"),
            f"checkpoints at step {count(first)}, {count(second)}, … (first_checkpoint={first}, "
            f"n_steps_per_checkpoint={schedule.every})",
        ]
        last = {} if self._last is None else self._last.scalars
        parts = [table([[name, number(value)] for name, value in last.items()])] if last else []
        parts += [arrays(name, getattr(state, name), state.axes) for name in _FIELDS]
        return card(f"TrainLoop at step {place(self.step, self.n_steps).strip()}", facts, *parts)

    # Optimizer and task.

    @property
    def task(self) -> TrainTask:
        """The task that is trained, with the current `freeze` and `norms`."""
        return self._stepper.task

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The optimizer's hyperparameters by name, or for groups by group and name.

        An `OptimizerDef`, a `MultiOptimizer` and `optax.inject_hyperparams` have them. A scheduled
        one has the value of the latest step. Of a plain optimizer that ends in a scaling by a
        number, such as `optax.adam(1e-3)`, it is the learning rate.
        """
        return present_hyperparams(self._stepper)

    def group_name(self, group: str | int) -> str:
        """The name of a group of the optimizer, given by name or position.

        Raises:
          ValueError: the group does not exist; the error lists the groups.
        """
        return group_name(self._stepper.state.opt_state, group)

    def follows_schedule(self, name: str, *, group: str | int | None = None) -> bool:
        """Whether a hyperparameter follows a schedule, in a group or anywhere."""
        return follows_schedule(self._stepper, name, group)

    def set_hyperparams(self, *, group: str | int | None = None, **values: ArrayLike) -> None:
        """Sets hyperparameters from the next step on, without recompilation.

        A value overrides a schedule until None clears it. Setting the learning rate of a plain
        optimizer for the first time moves it into the state, and compiles the step again.

        >>> import numpy as np, optax
        >>> from flaxfit import TrainLoop, TrainTask
        >>> x = np.ones((8, 1), np.float32)
        >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
        >>> apply = lambda v, x, **_: (v["params"] * x, {})
        >>> loop = TrainLoop(
        ...     lambda rngs, x: {"params": np.zeros(1, np.float32)},
        ...     TrainTask(apply, optimizer, "mse", (x, 2 * x)), 0, n_steps=3, stdout=False,
        ... )
        >>> for checkpoint in loop:
        ...     loop.set_hyperparams(learning_rate=0.5 * loop.hyperparams["learning_rate"])
        >>> round(loop.hyperparams["learning_rate"], 4)
        0.0125

        Args:
          group: the group of a `MultiOptimizer`, by name or position; None: all groups.
          **values: numbers by name.

        Raises:
          ValueError: the optimizer has no such hyperparameter or group; the error lists them.
        """
        tune(self._stepper, group, values)
        if self._due is not None:
            self._due.tuned.append((group, values))

    @property
    def freeze(self) -> Sequence[str]:
        """Patterns of the parameters that are not trained; can be set.

        The update is compiled again, and the moments of the other parameters are kept.
        """
        return self.task.freeze

    @freeze.setter
    def freeze(self, patterns: str | Sequence[str]) -> None:
        freeze(self._stepper, patterns)

    @property
    def norms(self) -> Sequence[str]:
        """Patterns of the parameters whose norms are reported; can be set.

        Setting them between two checkpoints restarts the count.
        """
        return self.task.norms

    @norms.setter
    def norms(self, patterns: str | Sequence[str]) -> None:
        self._stepper.set_norms(patterns)

    # Steps and checkpoints.

    @property
    def n_steps(self) -> int | None:
        """The step at which iteration ends; can be set."""
        return self.schedule.last

    @n_steps.setter
    def n_steps(self, value: int | None) -> None:
        self.schedule = dataclasses.replace(self.schedule, last=value)

    @property
    def n_steps_per_checkpoint(self) -> int:
        """The number of steps between checkpoints; can be set."""
        return self.schedule.every

    @n_steps_per_checkpoint.setter
    def n_steps_per_checkpoint(self, value: int) -> None:
        self.schedule = dataclasses.replace(self.schedule, every=value)

    @property
    def first_checkpoint(self) -> int:
        """The step of the first checkpoint; can be set."""
        return self.schedule.first

    @first_checkpoint.setter
    def first_checkpoint(self, value: int) -> None:
        self.schedule = dataclasses.replace(self.schedule, first=value)

    @property
    def steps_per_call(self) -> int:
        """The number of steps per dispatch, for "auto" the chosen one; can be set."""
        return self._stepper.steps_per_call.number

    @steps_per_call.setter
    def steps_per_call(self, value: int | str) -> None:
        self._stepper.steps_per_call = StepsPerCall(value)

    # Data and callbacks.

    @property
    def data(self) -> Data:
        """The stream of batches; set it to continue with other data and a new count."""
        return self._stepper.cursor.stream

    @data.setter
    def data(self, data: Data) -> None:
        self._stepper.set_data(data)
        self._forget_delivery()
        self._reset()
        self._last = None  # Its position and batch size are those of the data before.
        self.stopped = self._is_finishing = self._is_at_start = False

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """The callbacks; setting them attaches them to the loop."""
        return self._callbacks.given

    @callbacks.setter
    def callbacks(self, callbacks: Any) -> None:
        self._callbacks = CallbackList(callbacks)
        if self._due is not None:
            self._due.keep(self._callbacks)
        self.watchers: list[Callable[[int], None]] = []
        """Functions of the step, called after each dispatch. They must not read the device.

        With `steps_per_call="auto"` a dispatch takes one step if there are any.
        """
        self.dispatch_watchers: list[Callable[[int], None]] = []
        """As `watchers`, for functions that need not see each step."""
        self.starters: list[Callable[[int], None]] = []
        """Functions of the step, called before the first step after each checkpoint."""
        self.step_starters: list[Callable[[int], None]] = []
        """Functions of the step, called before each dispatch, which then is of one step if
        `steps_per_call` is "auto"."""
        self.test_starters: list[Callable[[], None]] = []
        """Functions without arguments, called before each validation."""
        self._callbacks.attach(self)
        if self._is_at_start and self.start is not None:
            self._not_taken_over = self._callbacks.restore(self.start)

    def close(self) -> None:
        """Closes all callbacks; the end of an iteration does so by itself.

        >>> loop.close()
        """
        self._callbacks.close()

    def finish(self) -> None:
        """Ends the run after the current step, whatever `n_steps` is.

        That step yields the last checkpoint, with `stop=True`. It can be called from a watcher, a
        callback, another thread, or the `for` over the loop, where no step is being taken and no
        further checkpoint comes.

        >>> import numpy as np, optax
        >>> from flaxfit import TrainLoop, TrainTask
        >>> x = np.ones((8, 1), np.float32)
        >>> task = TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse", (x, x))
        >>> init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
        >>> loop = TrainLoop(init, task, 0, n_steps=10, n_steps_per_checkpoint=5, stdout=False)
        >>> loop.watchers.append(lambda step: loop.finish() if step == 3 else None)
        >>> [(checkpoint.step, checkpoint.stop) for checkpoint in loop]
        [(1, False), (3, True)]
        """
        if self._phase or self.n_completed_steps:
            self._is_finishing = True
        else:
            self.stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __setattr__(self, name: str, value: object) -> None:
        is_ours = type(self).__module__.startswith("flaxfit.")  # Others keep what they like.
        if is_ours and (name in _OPTIONS or name in _RATES) and not hasattr(type(self), name):
            advice = f"use TrainLoop(loop.state, dataclasses.replace(loop.task, {name}=...))"
            if name in _RATES:
                advice = "use loop.set_hyperparams(learning_rate=...)"
            words = f"A TrainLoop has no {name} to set: {advice}."
            raise AttributeError(words, name=name, obj=self)
        super().__setattr__(name, value)
