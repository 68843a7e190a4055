"""What callbacks a loop takes, and what they may return."""

import inspect
from typing import Any

from flaxfit.state._checkpoint import Checkpoint
from flaxfit.state._train_state import TrainState
from flaxfit.tree._functions import owner_of


def as_tuple(callbacks: Any) -> tuple[Any, ...]:
    """Callbacks as they are given: none, a single one or several."""
    return (callbacks,) if callable(callbacks) else tuple(() if callbacks is None else callbacks)


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
    if isinstance(returned.state, TrainState) and returned.state is not given.state:
        raise RuntimeError(
            f"The callback {_name(callback)} returned a checkpoint with another training state, "
            "which the loop would not train on. Change the loop instead, which a callback gets by "
            "attach(loop): loop.restore(state), or loop.set_hyperparams(learning_rate=...)."
        )


def _name(callback: Any) -> str:
    callback = inspect.unwrap(callback)
    return getattr(callback, "__name__", type(callback).__name__)
