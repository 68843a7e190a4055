"""LogTo: passes the metrics of each checkpoint to a logger, whose failures never stop training."""

from collections.abc import Mapping
from typing import Protocol

import jax

from flaxfit.display import say
from flaxfit.state import Checkpoint
from flaxfit.tree import Function


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

    def log(self, step: int, values: Mapping[str, float], /) -> object:
        """Takes the numbers of a step."""
        ...

    def close(self) -> object:
        """Flushes and closes; `log` may be called again if training continues."""
        ...


class LogTo:
    """Passes the step and the metrics of each checkpoint to a logger.

    An exception in the logger does not stop training: the first one is reported, and the next
    checkpoint is passed on again. With several processes only the first one logs.

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

    Args:
      logger: an object with the methods of a `Logger`.
    """

    borrows = True

    def __init__(self, logger: Logger) -> None:
        missing = [name for name in ("log", "close") if not hasattr(logger, name)]
        if missing:
            raise TypeError(
                f"LogTo needs a logger with the methods log(step, values) and close(), but "
                f"{type(logger).__name__} has no {' and no '.join(missing)}."
            )
        self._logger = logger
        self._attempt = Attempt(type(logger).__name__)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        self._attempt(self._logger.log, checkpoint.step, checkpoint.scalars)
        return checkpoint

    def close(self) -> None:
        """Closes the logger."""
        self._attempt(self._logger.close)


class Attempt:
    """Calls functions whose failure must not stop training, and reports the first failure.

    Only the first process calls them.
    """

    def __init__(self, owner: str, failures: type[Exception] = Exception) -> None:
        self._owner = owner
        self._failures = failures
        self._has_failed = False

    def __call__(self, function: Function, *arguments: object) -> None:
        if jax.process_index():
            return
        try:
            function(*arguments)
        except self._failures as error:
            if not self._has_failed:
                self._has_failed = True
                say(
                    f"{self._owner} failed; training continues without it (reported once): "
                    f"{type(error).__name__}: {error}"
                )
