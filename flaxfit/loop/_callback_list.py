"""The callbacks of a loop: which it takes, in which order they run, and what they may return."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from flaxfit.state import _callback_states
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.state._train_state import TrainState
from flaxfit.tree._functions import order_of, owner_of


def as_tuple(callbacks: Any) -> tuple[Any, ...]:
    """Callbacks as they are given: none, a single one or several."""
    return (callbacks,) if callable(callbacks) else tuple(() if callbacks is None else callbacks)


# The orders of callbacks, as they are closed.
_CLOSED = ("last", "normal", "first")


class CallbackList:
    """Callbacks that a loop was given, each of them checked.

    >>> len(CallbackList(print).given), len(CallbackList(None).given)
    (1, 0)
    """

    def __init__(self, callbacks: Any = ()):
        self.given = as_tuple(callbacks)
        for callback in self.given:
            check_callback(callback)
            order_of(callback)  # Which checks it.

    def attach_first(self, loop: Any) -> None:
        """Attaches those that are to know the loop before it fetches a batch."""
        for callback in self.given:
            if order_of(callback) == "first":
                callback.attach(loop)

    def attach(self, loop: Any) -> None:
        """Tells the callbacks which loop they belong to."""
        for callback in self.given:
            if hasattr(callback, "attach"):
                callback.attach(loop)

    def restore(self, found: Any) -> list[str]:
        """Restores what they remember from a checkpoint file; returns what could not be."""
        states = dict(getattr(found, "callback_states", {}))
        if (history := getattr(found, "history", None)) is not None:
            states["History"] = history
        arrays = getattr(found, "callback_arrays", {})
        return _callback_states.put_back(self.given, states, arrays)

    def close(self) -> None:
        """Closes all of them, even if one fails."""
        # Those that save the state come before those that change it when they are closed.
        given = sorted(self.given, key=lambda each: _CLOSED.index(order_of(each)))
        with contextlib.ExitStack() as stack:
            for callback in reversed(given):
                if hasattr(callback, "close"):
                    stack.callback(callback.close)


class Delivery:
    """A checkpoint on its way through the callbacks.

    If a callback raises an exception, `finish` continues with that callback when called again.

    Args:
      checkpoint: the checkpoint.
      callbacks: the callbacks that get it, by their `order`.
      settle: changes the checkpoint before those of the order "last" get it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        callbacks: CallbackList,
        settle: Callable[[Checkpoint], Checkpoint],
    ):
        self._checkpoint, self._settle = checkpoint, settle
        self.is_outdated = False
        """Whether a callback has set hyperparameters, which the checkpoint does not have."""
        called = {order: [] for order in ("first", "normal", "last")}
        for callback in callbacks.given:
            called[order_of(callback)].append(callback)
        self._waiting = [*called["first"], *called["normal"], settle, *called["last"]]

    def keep(self, callbacks: CallbackList) -> None:
        """Leaves out those that the loop has no longer."""
        kept = (*callbacks.given, self._settle)
        self._waiting = [each for each in self._waiting if each in kept]

    def finish(
        self, own: Callable[[Checkpoint], Checkpoint], revision: Callable[[], Any]
    ) -> Checkpoint:
        """Shows the checkpoint to the callbacks that wait for it.

        Args:
          own: copies what a checkpoint borrows.
          revision: of the loop: another one after a callback has set the state.

        Returns:
          The checkpoint as the callbacks have changed it.
        """
        while self._waiting:
            callback = self._waiting[0]
            if callback is self._settle:
                self._checkpoint = self._settle(self._checkpoint)
            else:
                given = self._checkpoint if borrows(callback) else own(self._checkpoint)
                before = revision()
                self._checkpoint = returned_by(callback, given)
                if revision() == before:
                    check_unchanged(callback, given, self._checkpoint)
            if self._waiting and self._waiting[0] is callback:
                del self._waiting[0]
        return self._checkpoint


def check_callback(callback: Any) -> None:
    """Checks that a callback can be called with a checkpoint.

    >>> check_callback(lambda epoch, logs: None)
    Traceback (most recent call last):
    TypeError: A callback takes one argument, a Checkpoint, got <lambda>(epoch, logs)...

    Raises:
      TypeError: it is no function, or one of other arguments.
    """
    if isinstance(callback, type):
        raise TypeError(
            f"A callback must be an object, got the class {callback.__name__}: make one, "
            f"{callback.__name__}(...)."
        )
    if not callable(callback):
        raise TypeError(
            "A callback must be a function Checkpoint -> Checkpoint | None, got "
            f"{type(callback).__name__}: {callback!r:.60}."
        )
    try:
        signature = inspect.signature(callback, follow_wrapped=False)
    except (TypeError, ValueError):  # Written in C, and silent about it.
        return
    try:
        signature.bind(None)
    except TypeError:
        raise TypeError(
            f"A callback takes one argument, a Checkpoint, got {_name(callback)}{signature}. Its "
            "metrics are checkpoint.metrics, its step is checkpoint.step."
        ) from None


def borrows(callback: Any) -> bool:
    """Whether a callback only reads a checkpoint, and so needs no copy of its arrays.

    >>> borrows(print)
    False
    """
    return getattr(callback, "borrows", False) or getattr(owner_of(callback), "borrows", False)


def returned_by(callback: Any, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as a callback returns it.

    Raises:
      TypeError: it returns something else than a checkpoint or None.
    """
    changed = callback(checkpoint)
    if changed is None:
        return checkpoint
    if isinstance(changed, Checkpoint):
        return changed
    advice = "To add a number: return checkpoint.with_metrics({...})."
    if isinstance(changed, bool):
        advice = "To end training: return checkpoint.replace(stop=True)."
    raise TypeError(
        f"The callback {_name(callback)} returned {type(changed).__name__}; expected a Checkpoint "
        f"or None. {advice}"
    )


def check_unchanged(callback: Any, given: Checkpoint, returned: Checkpoint) -> None:
    """Checks that a callback has changed nothing that the loop would not train on.

    It may drop what is not to be saved, such as by `state.for_inference()`.

    Raises:
      RuntimeError: it has changed the training state.
    """
    is_same = vars(returned)["state"] is vars(given)["state"]  # Reads no state that is borrowed.
    if not is_same and isinstance(returned.state, TrainState) and returned.state is not given.state:
        raise RuntimeError(
            f"The callback {_name(callback)} returned a checkpoint with another training state, "
            "which the loop would not train on. Change the loop instead, which a callback gets by "
            "attach(loop): loop.restore(state), or loop.set_hyperparams(learning_rate=...)."
        )


def _name(callback: Any) -> str:
    callback = inspect.unwrap(callback)
    return getattr(callback, "__name__", type(callback).__name__)
