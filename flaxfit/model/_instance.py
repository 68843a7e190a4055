"""The nnx instance that a model was made of: the weights that `fit` writes into it."""

import weakref
from collections.abc import Callable
from typing import Any

import jax

from flaxfit import display
from flaxfit.modules._switch import handle_of
from flaxfit.tree._types import Function, Variables

_OWNERS: weakref.WeakValueDictionary[int, "Instance"] = weakref.WeakValueDictionary()
"""What the latest model has made of each nnx instance, by its `id`."""


class Instance:
    """Writes trained weights into the nnx instance of an `apply`; without one it does nothing.

    Args:
      apply: that of the task.
      name: the class of the module, for notices.
    """

    def __init__(self, apply: Function, name: str):
        self._apply, self._name = apply, name
        self._written: list[Any] | None = None
        """The arrays that the last `fit` has written."""
        self._note_shared()

    def _note_shared(self) -> None:
        """Says that the weights of the instance will be those of the model fitted last."""
        handle = handle_of(self._apply)
        if handle is None or handle.assign is None:
            return
        module = handle.module()
        other = _OWNERS.get(id(module))
        before = None if other is None else handle_of(other._apply)
        if before is not None and before.module() is module:
            display.say(
                f"another Model has this {self._name} as its module: each trains a copy of its "
                "weights, and the instance holds those of the Model that was fitted last"
            )
        _OWNERS[id(module)] = self

    def write(self, variables: Callable[[], Variables], error: BaseException | None) -> None:
        """Writes the variables after a `fit`.

        Args:
          variables: returns them.
          error: what has ended the `fit`; another error does not replace it.
        """
        handle = handle_of(self._apply)
        if handle is None or handle.assign is None:
            return
        try:
            self._written = handle.assign(variables())
        except Exception:
            if error is None:
                raise  # Else the step has failed with the arrays that it was given.

    def note_changes(self) -> None:
        """Says that changes of the instance since the last `fit` have no effect."""
        handle = handle_of(self._apply)
        module = None if handle is None else handle.module()
        if self._written is None or module is None:
            return
        if not {*map(id, self._written)} <= {*map(id, _arrays_of(module))}:
            display.say(
                f"the weights of this {self._name} were changed since the last fit, which has no "
                "effect: the model continues from its own. Make another Model of the instance to "
                "train from these"
            )


def _arrays_of(module: Any) -> list[Any]:
    """The arrays of an nnx instance that training changes; those of random streams are its own."""
    from flax import nnx

    return jax.tree.leaves(nnx.state(module, nnx.Not(nnx.RngState)))
