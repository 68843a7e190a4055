"""SaveFreq: a writer's own saves within an epoch."""

import functools
from typing import Any

from flaxfit.tree import whole_number


class SaveFreq:
    """Saves every n steps, if n is given, also between checkpoints.

    It skips a step that yields a checkpoint, which the writer saves anyway.
    """

    def __init__(self, save_freq: int | str, *, of_best: bool):
        is_epoch = save_freq == "epoch"
        self._n = 0 if is_epoch else whole_number("save_freq", save_freq, other="epoch")
        self._saved_at = 0
        if self._n and of_best:
            raise ValueError(
                "There is no monitored metric within an epoch: save_best_only=True needs "
                f"save_freq='epoch', got {save_freq}. For both, use two writers with separate "
                "folders."
            )

    def attach(self, loop: Any, writer: Any) -> None:
        """Watches the steps of a loop if n is given."""
        if self._n:
            self._saved_at = loop.step
            loop.on.after_step.append(functools.partial(self._look, loop, writer))

    def _look(self, loop: Any, writer: Any, step: int) -> None:
        if step - self._saved_at < self._n:
            return
        if loop.schedule.after(step - 1) == step:
            self._saved_at = step
        elif (now := loop.snapshot()) is not None:
            self._saved_at = step
            writer.save(now)
