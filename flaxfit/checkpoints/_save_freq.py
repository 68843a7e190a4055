"""SaveFreq: the saves within an epoch, which a writer makes of its own."""

import functools
from typing import Any

from flaxfit.tree._checks import whole_number


class SaveFreq:
    """Saves every n steps, if n is given, also where no checkpoint is made.

    A step of which a checkpoint is made anyway is left to that.
    """

    def __init__(self, save_freq: int | str, *, of_best: bool):
        is_epoch = save_freq == "epoch"
        self._n = 0 if is_epoch else whole_number("save_freq", save_freq, other="epoch")
        self._saved_at = 0
        if self._n and of_best:
            raise ValueError(
                f"Within an epoch there are no metrics that tell the best: save_best_only=True "
                f"needs save_freq='epoch', got {save_freq}. To have both, give two writers, each "
                "with a folder of its own."
            )

    def attach(self, loop: Any, writer: Any) -> None:
        """Looks at the steps of a loop, if asked to."""
        if self._n:
            self._saved_at = loop.step
            loop.watchers.append(functools.partial(self._look, loop, writer))

    def _look(self, loop: Any, writer: Any, step: int) -> None:
        if step - self._saved_at < self._n:
            return
        if loop.schedule.after(step - 1) == step:
            self._saved_at = step
        elif (now := loop.snapshot()) is not None:
            self._saved_at = step
            writer.save(now)
