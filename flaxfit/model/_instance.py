"""The NNX instance that a model was made of: what `fit` writes into it, and what users change."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from flaxfit import display
from flaxfit.modules._switch import handle_of
from flaxfit.tree import Function, Variables, flat

_OWNERS: weakref.WeakValueDictionary[int, "Instance"] = weakref.WeakValueDictionary()
"""By the `id` of an NNX instance, the `Instance` of the latest model made of it."""


class Instance:
    """Writes weights into the NNX instance of an `apply`, and watches what users change in it.

    Without an instance it does nothing.

    Args:
      apply: the `apply` of the task.
      name: the class of the module, for notices.
    """

    def __init__(self, apply: Function, name: str):
        self._name = name
        self._written: list[Any] | None = None
        """The arrays that the last `fit` has written."""
        self._attributes: Any = None
        self._is_fitting = False
        self.follow(apply)
        if self._handle is not None:
            self._watch(self._handle.module())

    def _watch(self, module: Any) -> None:
        """Watches the instance; says that its weights will be those of the model fitted last."""
        from flaxfit.modules._nnx_attributes import Attributes

        self._attributes = Attributes(module)
        other = _OWNERS.get(id(module))
        before = None if other is None else other._handle
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
        if self._handle is None or self._handle.assign is None:
            return
        try:
            self._written = self._handle.assign(variables())
        except Exception:
            if error is None:
                raise  # Else the step has failed with the arrays that it was given.

    def is_changed(self) -> bool:
        """Whether its attributes were changed since the last `follow`, or at first.

        Raises:
          ValueError: they were, and a `fit` is running.
        """
        if self._attributes is not None and self._attributes.were_changed():
            self._is_changed = True
        if self._is_changed and self._is_fitting:
            raise ValueError(
                f"The attributes of this {self._name} were changed during fit, whose programs "
                "cannot follow: change them between two calls of the model."
            )
        return self._is_changed

    @contextlib.contextmanager
    def fitting(self, *, is_watched: bool) -> Iterator[None]:
        """Marks that a `fit` is running; says at its end that it did not follow changes.

        Args:
          is_watched: whether there is code of the user's that may change attributes.
        """
        self._is_fitting = True
        try:
            yield
        finally:
            self._is_fitting = False
        if is_watched and self.is_changed():
            display.say(
                f"attributes of this {self._name} were changed during fit: they hold from the next "
                "call on"
            )

    def check(self, init: Function, variables: Variables) -> None:
        """Checks that the instance has the same variables as the model.

        Args:
          init: returns those of the instance.
          variables: the variables of the model.

        Raises:
          ValueError: some were added or removed, or have other shapes.
        """
        found = jax.eval_shape(init, None)
        found = {name: tree for name, tree in found.items() if not name.endswith("_axes")}
        now, own = (
            {path: jnp.shape(leaf) for path, leaf in flat(tree).items()}
            for tree in (found, variables)
        )
        differing = [path for path in sorted({**now, **own}) if now.get(path) != own.get(path)]
        if differing:
            listed = (f"{p}: {own.get(p, 'none')}, now {now.get(p, 'none')}" for p in differing[:5])
            raise ValueError(
                f"The variables of this {self._name} are no longer those of the Model "
                f"({'; '.join(listed)}): undo the change, or make another Model of the instance."
            )

    def follow(self, apply: Function) -> None:
        """Continues with a new `apply` of the instance as it is."""
        handle = handle_of(apply)
        self._handle = None if handle is None or handle.assign is None else handle
        self._is_changed = False

    def note_changes(self) -> None:
        """Says that changes of the weights since the last `fit` have no effect."""
        if self._written is None or self._attributes is None:
            return
        if not {*map(id, self._written)} <= {*map(id, self._attributes.arrays())}:
            self._written = None
            display.say(
                f"the weights of this {self._name} were changed since the last fit, which has no "
                "effect: the model continues from its own. Make another Model of the instance to "
                "train from these"
            )
