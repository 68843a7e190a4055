"""Events: functions at Keras's events, `(epoch, logs)`, `(batch, logs)` or `(logs)`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flaxfit.callbacks._callback import attached
from flaxfit.callbacks._epochs import Epochs
from flaxfit.display import is_scalar
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint
from flaxfit.tree import Json

Function = Callable[..., Any]


class Events:
    """Calls functions when training, an epoch or a batch begins and ends, as Keras does.

    `evaluate` and `predict` also take it in `callbacks`, for their own events.

    `logs` is a new dict of the scalar metrics, empty when something begins; epochs count from 0 or
    `initial_epoch`, batches from 0 in each epoch. In a `TrainLoop` an epoch lasts from one
    checkpoint to the next. Return values are ignored: to end training or add a metric, pass a
    function of a checkpoint as the callback.

    An epoch begins before its first step, not after the last one. `on_train_end` is called for
    whatever reason training ends. With several processes, each calls the functions.

    >>> events = Events(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))
    >>> checkpoint = events(Checkpoint(step=1, state=None, metrics={"loss": 0.5}))
    0 0.5

    Args:
      on_epoch_begin: a function `(epoch, logs)`.
      on_epoch_end: a function `(epoch, logs)`, whose logs include validation.
      on_train_begin: a function `(logs)`.
      on_train_end: a function `(logs)`, with the logs of the last epoch.
      on_train_batch_begin: a function `(batch, logs)`. This and the next event run one step per
        dispatch.
      on_train_batch_end: a function `(batch, logs)`, with the means of the epoch so far, for which
        it waits for the device.
      on_test_begin: a function `(logs)`, before validation and `evaluate`.
      on_test_end: a function `(logs)` of the metrics of `evaluate`, or of validation, before
        `on_epoch_end`.
      on_predict_begin: a function `(logs)`, before `predict`.
      on_predict_end: a function `(logs)`, after it.

    Raises:
      TypeError: a function does not take these arguments, or an event is unknown.
    """

    borrows = True

    def __init__(
        self,
        on_epoch_begin: Function | None = None,
        on_epoch_end: Function | None = None,
        on_train_begin: Function | None = None,
        on_train_end: Function | None = None,
        on_train_batch_begin: Function | None = None,
        on_train_batch_end: Function | None = None,
        *,
        on_test_begin: Function | None = None,
        on_test_end: Function | None = None,
        on_predict_begin: Function | None = None,
        on_predict_end: Function | None = None,
        **others: Function | None,
    ) -> None:
        for name in others:
            if name.startswith(("on_test_", "on_predict_")):
                raise TypeError(
                    f"Events has no {name}: batches are not seen there. Iterate over "
                    "model.predictions(x), which yields each batch with its outputs."
                )
            raise TypeError(
                f"Events has no {name}; it has on_epoch_, on_train_, on_train_batch_, on_test_ and "
                "on_predict_ begin and end."
            )
        self._functions: dict[str, Function | None] = {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
            "on_test_begin": on_test_begin,
            "on_test_end": on_test_end,
            "on_predict_begin": on_predict_begin,
            "on_predict_end": on_predict_end,
        }
        for name, function in self._functions.items():
            if function is not None:
                _check(name, function)
        self._epochs, self._loop = Epochs(), None
        self._is_open = False
        """Whether training has begun."""
        self._logs: dict[str, float] = {}
        self._first_step = 0
        """The number of steps before the current epoch."""

    def attach(self, loop: TrainLoop) -> None:
        """Begins training."""
        self._loop, self._first_step = loop, loop.step
        begins, ends = map(self._functions.get, ("on_train_batch_begin", "on_train_batch_end"))
        if (begins or ends) and loop.steps_per_call > 1:
            raise ValueError(
                f"Batch events see every step, but {loop.steps_per_call} run per dispatch: "
                "remove steps_per_execution (in a loop, steps_per_call)."
            )
        self._epochs.attach(loop, self._begin_epoch)
        if begins is not None:
            loop.on.before_step.append(lambda step: begins(step - self._first_step, {}))
        if ends is not None:
            loop.on.after_step.append(self._end_batch)
        loop.on.before_validation.append(lambda: self.notify("on_test_begin", {}))
        self._open()

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint unchanged."""
        self._logs = {name: float(value) for name, value in checkpoint.scalars.items()}
        tested = {
            name.removeprefix("val_"): value
            for name, value in self._logs.items()
            if name.startswith("val_")
        }
        if tested:
            self.notify("on_test_end", tested)
        self.notify("on_epoch_end", self._epochs.number, dict(self._logs))
        self._first_step = checkpoint.step
        return checkpoint

    def notify(self, event: str, *arguments: Any) -> None:
        """Calls the function of an event, if there is one.

        >>> Events(on_test_begin=lambda logs: print("begins")).notify("on_test_begin", {})
        begins
        """
        function = self._functions[event]
        if function is not None:
            function(*arguments)

    def close(self) -> None:
        """Calls `on_train_end`, once each time training ends."""
        is_open, self._is_open = self._is_open, False
        if is_open:
            self.notify("on_train_end", dict(self._logs))

    def get_state(self) -> dict[str, Json]:
        """Returns what a resumed run needs: the count of epochs."""
        return self._epochs.get_state()

    def set_state(self, state: Mapping[str, Json]) -> None:
        self._epochs.set_state(state)

    def _open(self) -> None:
        if not self._is_open:
            self._is_open, self._logs = True, {}
            self.notify("on_train_begin", {})

    def _begin_epoch(self, epoch: int) -> None:
        self._open()
        self._first_step = attached(self._loop, "Events", "watches").step
        self.notify("on_epoch_begin", epoch, {})

    def _end_batch(self, step: int) -> None:
        metrics = attached(self._loop, "Events", "watches").running_metrics()
        logs = {name: float(value) for name, value in metrics.items() if is_scalar(value)}
        self.notify("on_train_batch_end", step - self._first_step - 1, logs)


def _check(name: str, function: Function) -> None:
    """Checks that a function takes the arguments of its event."""
    arguments = [*(each for each in ("epoch", "batch") if each in name), "logs"]
    advice = f"{name} is called with ({', '.join(arguments)})"
    if not callable(function):
        raise TypeError(f"{advice}, got {function!r:.60}, which is not a function.")
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:  # Written in C, and silent about it.
        return
    except TypeError:
        raise TypeError(
            f"{advice}, got a function of {inspect.signature(function)}. A function of a "
            "checkpoint is a callback itself: callbacks=[function]."
        ) from None
