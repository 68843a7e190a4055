"""CallbackList: the callbacks of a loop, their order, and the checks of their results."""

import contextlib
import inspect
import re
from collections.abc import Callable
from typing import Any, get_origin

from flaxfit.state import Checkpoint, TrainState, callback_states
from flaxfit.tree import COUNTERPARTS, ArrayLike, Function, order_of, owner_of


def as_tuple(callbacks: Any) -> tuple[Any, ...]:
    """Returns the callbacks as a tuple; accepts None, one callback or several."""
    return (callbacks,) if callable(callbacks) else tuple(() if callbacks is None else callbacks)


class CallbackList:
    """The validated callbacks of a loop, in the order in which they run.

    >>> len(CallbackList(print).given), len(CallbackList(None).given)
    (1, 0)
    """

    def __init__(self, callbacks: Any = ()):
        self.given = as_tuple(callbacks)
        self.by_order: dict[str, list[Any]] = {"first": [], "normal": [], "last": []}
        """The callbacks by their `order`."""
        for callback in self.given:
            check_callback(callback)
            self.by_order[order_of(callback)].append(callback)

    def attach_first(self, loop: Any) -> None:
        """Attaches the callbacks of order "first", before the loop fetches a batch."""
        for callback in self.by_order["first"]:
            callback.attach(loop)

    def attach(self, loop: Any) -> None:
        """Attaches all callbacks to their loop."""
        for callback in self.given:
            if hasattr(callback, "attach"):
                callback.attach(loop)

    def restore(self, found: Any) -> list[str]:
        """Restores callback states from a checkpoint file; returns the names of failures."""
        states = dict(getattr(found, "callback_states", {}))
        if (history := getattr(found, "history", None)) is not None:
            states["History"] = history
        arrays = getattr(found, "callback_arrays", {})
        return callback_states.put_back(self.given, states, arrays)

    def close(self) -> None:
        """Closes all callbacks, even if one fails."""
        first, normal, last = self.by_order.values()
        with contextlib.ExitStack() as stack:
            # A callback that saves the state closes before one that changes it when closed. The
            # stack runs in reverse, so the callback that closes first is pushed last.
            for callback in reversed([*last, *normal, *first]):
                if hasattr(callback, "close"):
                    stack.callback(callback.close)


class Delivery:
    """A checkpoint on its way through the callbacks.

    If a callback raises an exception, `finish` continues with that callback when called again.

    Args:
      checkpoint: the checkpoint.
      callbacks: the callbacks to call, by their `order`.
      settle: completes the checkpoint before the callbacks of order "last".
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        callbacks: CallbackList,
        settle: Callable[[Checkpoint], Checkpoint],
    ):
        self._checkpoint, self._settle = checkpoint, settle
        self.tuned: list[tuple[str | int | None, dict[str, ArrayLike]]] = []
        """Hyperparameters set by callbacks, by group; not yet in the checkpoint."""
        first, normal, last = callbacks.by_order.values()
        self._waiting = [*first, *normal, settle, *last]

    def keep(self, callbacks: CallbackList) -> None:
        """Drops callbacks that the loop no longer has."""
        kept = (*callbacks.given, self._settle)
        self._waiting = [each for each in self._waiting if each in kept]

    def finish(
        self, own: Callable[[Checkpoint], Checkpoint], revision: Callable[[], tuple[int, ...]]
    ) -> Checkpoint:
        """Calls the remaining callbacks; returns the checkpoint with their changes.

        Args:
          own: copies the borrowed arrays of a checkpoint.
          revision: returns the revision of the loop, which changes when a callback sets the state.
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
            # Removed only now, so that a callback that raised is called again by the next
            # `finish`. The callback may have changed the list itself, through `keep`.
            if self._waiting and self._waiting[0] is callback:
                del self._waiting[0]
        return self._checkpoint


def check_callback(callback: Any) -> None:
    """Checks that a callback can be called with a checkpoint."""
    if isinstance(callback, type):
        raise TypeError(
            f"Pass an instance, callbacks=[{callback.__name__}(...)], not the class "
            f"{callback.__name__}."
        )
    if hasattr(callback, "set_model") and hasattr(callback, "on_epoch_end"):
        name = type(callback).__name__
        raise TypeError(
            f"Keras callbacks do not work with flaxfit, got {name}: use "
            f"{_counterpart(callback)}, or a function of a checkpoint instead of on_epoch_end, "
            "lambda checkpoint: print(checkpoint.step, checkpoint.metrics)."
        )
    owner = type(inspect.unwrap(callback))  # The class of the callback inside `every(...)`.
    hook = hook_of(owner)
    # A class of the library never calls its hooks; a user's `__call__` may.
    module = getattr(owner.__call__, "__module__", None)
    if not callable(callback) or (hook and str(module).startswith("flaxfit.")):
        advice = f" Pass {hook}, or define __call__." if hook else ""
        raise TypeError(
            "A callback must be a function Checkpoint -> Checkpoint | None, got "
            f"{owner.__name__}: {callback!r:.60}.{advice}"
        )
    if any(test(each) for test in _DEFERRED for each in (callback, type(callback).__call__)):
        raise TypeError(
            f"The callback {_name(callback)} is async or a generator, so a call does not run its "
            "body: use a plain function Checkpoint -> Checkpoint | None, without await and yield."
        )
    try:
        signature = inspect.signature(callback, follow_wrapped=False)
    except (TypeError, ValueError):  # A function written in C may have no signature.
        return
    if (keras := _keras_arguments(signature)) is not None:
        raise TypeError(
            f"The callback {_name(callback)}{signature} has the signature of a callback of Keras, "
            f"({keras}): a callback of flaxfit is a function of a checkpoint, such as lambda "
            "checkpoint: print(checkpoint.step, checkpoint.metrics). Or wrap it: "
            f"flaxfit.callbacks.Events({_KERAS[keras]}=...)."
        )
    try:
        signature.bind(None)
    except TypeError:
        raise TypeError(
            f"A callback takes one argument, a Checkpoint, got {_name(callback)}{signature}. Its "
            "metrics are checkpoint.metrics, its step is checkpoint.step."
        ) from None
    annotated = signature.return_annotation
    kind = get_origin(annotated) or annotated
    # Functions only: the return annotation of a combinator may be a general one.
    if inspect.isfunction(callback) and any(kind is each for each in _NEVER_RETURNED):
        raise _wrong_return(callback, f"is annotated to return {kind.__name__}", kind)


def hook_of(kind: type) -> str:
    """Returns the `Events` that replaces a hook of a class, as in Keras; "" if it has no hook."""
    found = next((name for name in dir(kind) if _HOOK.fullmatch(name)), "")
    event = found
    if found and not _EVENT.fullmatch(found):
        event = f"on_{'train_batch' if re.search('step|batch', found) else 'epoch'}_end"
    return event and f"flaxfit.callbacks.Events({event}=...)"


_HOOK = re.compile(
    "on_((train|test|predict|validation)_)?(train|test|predict|validation|fit|epoch|batch|step)"
    "_(begin|end|start)"
)
"""The hooks of Keras, Lightning and Hugging Face."""
_EVENT = re.compile(r"on_(epoch|train|train_batch|test|predict)_(begin|end)")

_DEFERRED = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)
_NEVER_RETURNED = (bool, int, float, str, dict, list, tuple)

_SAME = ("EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler", "CSVLogger")


def _counterpart(callback: object) -> str:
    """Returns the counterpart in flaxfit of a Keras callback, or of a subclass of one."""
    for kind in type(callback).__mro__:
        if kind.__name__ in COUNTERPARTS:
            return f"flaxfit's {COUNTERPARTS[kind.__name__]}"
        if kind.__name__ in _SAME:
            return f"flaxfit.callbacks.{kind.__name__}"
    return "that of flaxfit.callbacks (the page on Keras names each)"


_KERAS = {"epoch, logs": "on_epoch_end", "batch, logs": "on_train_batch_end"}


def _keras_arguments(signature: inspect.Signature) -> str | None:
    """Returns the arguments that Keras passes to such a function; None for other functions."""
    names = [name.lower() for name in list(signature.parameters)[:2]]
    if names[1:] != ["logs"]:
        return None
    return "batch, logs" if names[0] in ("batch", "step") else "epoch, logs"


def borrows(callback: Function) -> bool:
    """Returns whether a callback only reads a checkpoint, so that its arrays need no copy."""
    return getattr(callback, "borrows", False) or getattr(owner_of(callback), "borrows", False)


def unfreezes(callback: Function) -> bool:
    """Returns whether a callback unfreezes parameters; a run resumes with the saved `freeze`."""
    return getattr(owner_of(callback), "unfreezes", False)


def returned_by(callback: Function, checkpoint: Checkpoint) -> Checkpoint:
    """Calls a callback; returns its checkpoint, or the given one if it returned None."""
    changed = callback(checkpoint)
    if changed is None:
        return checkpoint
    if isinstance(changed, Checkpoint):
        return changed
    raise _wrong_return(callback, f"returned {type(changed).__name__}", type(changed))


def _wrong_return(callback: Function, what: str, kind: type) -> TypeError:
    advice = "To add a number: return checkpoint.with_metrics({...})."
    if kind is bool:
        advice = "To end training: return checkpoint.replace(stop=True)."
    return TypeError(
        f"The callback {_name(callback)} {what}; expected a Checkpoint or None. {advice}"
    )


def check_unchanged(callback: Function, given: Checkpoint, returned: Checkpoint) -> None:
    """Refuses another training state, which the loop would ignore.

    A callback may drop parts that need not be saved, such as by `state.for_inference()`.
    """
    is_same = vars(returned)["state"] is vars(given)["state"]  # `vars` does not read it: no copy.
    if not is_same and isinstance(returned.state, TrainState) and returned.state is not given.state:
        raise RuntimeError(
            f"The callback {_name(callback)} returned a checkpoint with another training state, "
            "which the loop would not train on. Change the loop instead, which a callback gets by "
            "attach(loop): loop.restore(state), or loop.set_hyperparams(learning_rate=...)."
        )


def _name(callback: Function) -> str:
    callback = inspect.unwrap(callback)
    return getattr(callback, "__name__", type(callback).__name__)
