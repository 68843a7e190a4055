"""every: run a callback at some of the checkpoints."""

from typing import Any

from flaxfit._checkpoint import Checkpoint
from flaxfit.callbacks._callback import Callback


def every(n: int, callback: Callback) -> "Every":
    """Runs a callback only at the checkpoints whose step is divisible by `n`.

    The loop decides where checkpoints are: `first_checkpoint=n_steps_per_checkpoint` puts them
    at multiples. Other checkpoints pass unchanged.

    >>> steps = []
    >>> callback = every(10, lambda checkpoint: steps.append(checkpoint.step))
    >>> for step in range(0, 30, 5):
    ...     checkpoint = callback(Checkpoint(step=step, state=None, metrics={}))
    >>> steps
    [0, 10, 20]
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"every needs a number of steps of at least 1, got {n!r}.")
    if not callable(callback):
        raise TypeError(f"every needs a callable of a checkpoint, got {callback!r}.")
    return Every(n, callback)


class Every:
    """A callback that passes some checkpoints on to another one; see `every`."""

    def __init__(self, n: int, callback: Callback) -> None:
        self._n = n
        self._callback = callback

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """What the callback makes of the checkpoint, or the checkpoint itself."""
        if checkpoint.step % self._n:
            return checkpoint
        changed = self._callback(checkpoint)
        return checkpoint if changed is None else changed

    def __getattr__(self, name: str) -> Any:
        """What else the callback has (attach, close, get_state, ...) and only that.

        Names with an underscore are its own business, and would recurse in a copy.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._callback, name)
