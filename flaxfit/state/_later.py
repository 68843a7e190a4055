"""Later: a value that is made only if it is asked for, of things that may soon be gone."""

import threading
from collections.abc import Callable
from typing import Any

import jax

# Settings that a `with` may change for a thread.
_GUARD, _WIDE = "jax_transfer_guard_host_to_device", "jax_enable_x64"


class Later:
    """Makes its value in two parts, when they are needed: what saves it, and what ends it.

    >>> numbers = [1, 2]
    >>> later = Later(lambda: (copy := list(numbers), lambda: sum(copy))[1])
    >>> later.secure()
    >>> numbers.clear()
    >>> later.value
    3

    Args:
      begin: takes what is needed, and returns a function that makes the value of it. Both are
        called outside any mesh and transfer guard. `begin` may be called within a function that
        JAX traces: to leave that for each copy costs more than some copies do.
    """

    def __init__(self, begin: Callable[[], Callable[[], Any]]):
        self._begin: Callable[[], Callable[[], Any]] | None = begin
        self._end: Callable[[], Any] | None = None
        self._value: Any = None
        # A thread may ask for it just when another one uses up what it is made of; the handler of
        # a signal, while this very thread is at it (in no mesh that it enters itself, though).
        self._lock = threading.RLock()

    def secure(self) -> None:
        """Takes what the value is made of: from here on, that may change."""
        if self._begin is not None:
            _elsewhere(self._take)

    @property
    def value(self) -> Any:
        """The value, which is made when it is asked for first."""
        # Each part is stored before the one before it is let go: at no time are both missing.
        if self._begin is not None or self._end is not None:
            apart(self._make)
        return self._value

    def _take(self) -> None:
        with self._lock:
            if self._begin is not None:
                end = self._begin()
                if self._begin is not None:  # A handler of a signal may have been here meanwhile.
                    self._end = end
                    self._begin = None

    def _make(self) -> None:
        with self._lock:
            self._take()
            if self._end is not None:
                value = self._end()
                if self._end is not None:
                    self._value = value
                    self._end = None


def apart(function: Callable[[], None]) -> None:
    """Calls a function as if it were called by itself, wherever this is.

    That may be within a function that JAX traces, a mesh or a transfer guard.

    >>> seen = []
    >>> program = jax.jit(lambda x: apart(lambda: seen.append(jax.numpy.ones(()) + 1)) or x)
    >>> program(1.0), float(seen[0])
    (Array(1., dtype=float32, weak_type=True), 2.0)
    """

    def call() -> None:
        with jax.ensure_compile_time_eval():
            function()

    _elsewhere(call)


def _elsewhere(function: Callable[[], None]) -> None:
    """Calls a function outside any mesh and transfer guard."""
    if jax.sharding.get_abstract_mesh().empty and not _has_transfer_guard():
        function()
        return
    is_wide, errors = getattr(jax.config, _WIDE), []

    def call() -> None:
        try:
            with jax.enable_x64(is_wide), jax.transfer_guard("allow"):
                function()
        except BaseException as error:
            errors.append(error)

    # A mesh is that of a thread, and so is a guard that is not set for all of them.
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _has_transfer_guard() -> bool:
    """Whether arrays may not pass to the devices unless they are put there."""
    return getattr(jax.config, _GUARD) not in (None, "allow", "log")
