"""Instance: writes weights into the NNX instance of a model, and follows the user's changes."""

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
"""By the `id` of an NNX instance, the `Instance` of the latest model made from it."""


class Instance:
    """Writes weights into the NNX instance of an `apply`, and detects changes by the user.

    It does nothing if the `apply` has no instance.
    """

    def __init__(self, apply: Function, name: str):
        self._name = name
        self._written: list[Any] | None = None
        """The arrays that the last `fit` wrote."""
        self._attributes: Any = None
        self._is_fitting = False
        self.follow(apply)
        if self._handle is None:
            return
        from flaxfit.modules._nnx_attributes import Attributes

        module = self._handle.module()
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
        """Writes the variables after a `fit`; does not replace an `error` that ended it."""
        if self._handle is None or self._handle.assign is None:
            return
        try:
            self._written = self._handle.assign(variables())
        except Exception:
            if error is None:
                raise  # With `error`, a failed step may have consumed the donated weights.

    def is_changed(self) -> bool:
        """Returns whether attributes were changed since the last `follow`."""
        if self._attributes is not None and self._attributes.were_changed():
            self._is_changed = True
        if self._is_changed and self._is_fitting:
            raise ValueError(
                f"The attributes of this {self._name} were changed during fit, which runs programs "
                "compiled before the change: change attributes between calls of the model."
            )
        return self._is_changed

    @contextlib.contextmanager
    def fitting(self, *, is_watched: bool) -> Iterator[None]:
        """Marks that a `fit` is running; reports changes during it at its end, if `is_watched`."""
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
        """Checks that `init` of the instance returns variables like those of the model."""
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
                f"The variables of this {self._name} no longer match the Model "
                f"({'; '.join(listed)}): undo the change, or make another Model of the instance."
            )

    def follow(self, apply: Function) -> None:
        """Switches to a new `apply`, made of the changed instance."""
        handle = handle_of(apply)
        self._handle = None if handle is None or handle.assign is None else handle
        self._is_changed = False

    def note_changes(self) -> None:
        """Prints a notice if weights were changed since the last `fit`, which has no effect."""
        if self._written is None or self._attributes is None:
            return
        if not {*map(id, self._written)} <= {*map(id, self._attributes.arrays())}:
            self._written = None
            display.say(
                f"the weights of this {self._name} were changed since the last fit, which has no "
                "effect: the model continues from its own. Make another Model of the instance to "
                "train from these"
            )
