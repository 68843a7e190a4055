"""LogTo: hands the metrics of every checkpoint to a logger, whose failures never stop training."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from flaxfit.display import say
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._types import Function, PyTree


class Logger(Protocol):
    """Anything that takes numbers by name: what `LogTo` needs of a logger.

    >>> class Print:
    ...     def log(self, step, values):
    ...         print(step, dict(values))
    ...     def close(self):
    ...         pass
    >>> logger: Logger = Print()
    >>> logger.log(3, {"loss": 0.5})
    3 {'loss': 0.5}
    """

    def log(self, step: int, values: Mapping[str, float], /) -> Any:
        """Takes the numbers of a step."""
        ...

    def close(self) -> Any:
        """Finishes what was begun; a later `log` may come when training goes on."""
        ...


class LogTo:
    """Hands the step and the metrics of every checkpoint to a logger.

    An exception in the logger does not stop training: the first one is reported, and the next
    checkpoint is handed to it again. With several processes only the first one logs.

    >>> class Keep(list):
    ...     def log(self, step, values):
    ...         self.append((step, values["loss"]))
    ...     def close(self):
    ...         self.append("closed")
    >>> kept = Keep()
    >>> log = LogTo(kept)
    >>> checkpoint = log(Checkpoint(step=1, state=None, metrics={"loss": 0.5}))
    >>> log.close()
    >>> kept
    [(1, 0.5), 'closed']
    """

    borrows = True
    """It only reads what a checkpoint holds."""

    def __init__(self, logger: Logger) -> None:
        """Names the logger."""
        missing = [name for name in ("log", "close") if not hasattr(logger, name)]
        if missing:
            raise TypeError(
                f"LogTo needs a logger with the methods log(step, values) and close(), but "
                f"{type(logger).__name__} has no {' and no '.join(missing)}."
            )
        self._logger = logger
        self._attempt = Attempt(type(logger).__name__)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint; its numbers are logged."""
        self._attempt(self._logger.log, checkpoint.step, checkpoint.scalars)
        return checkpoint

    def close(self) -> None:
        """Closes the logger."""
        self._attempt(self._logger.close)


class Attempt:
    """Calls what may fail without harm to training, and reports the first failure.

    In the first process only; the others do nothing.
    """

    def __init__(self, owner: str, failures: type[Exception] = Exception) -> None:
        self._owner = owner
        self._failures = failures
        self._has_failed = False

    def __call__(self, function: Function, *arguments: PyTree) -> None:
        """Calls the function with the arguments."""
        if jax.process_index():
            return
        try:
            function(*arguments)
        except self._failures as error:
            if not self._has_failed:
                self._has_failed = True
                say(
                    f"{self._owner} failed, training goes on without it (reported once): "
                    f"{type(error).__name__}: {error}"
                )
