"""CallReader: reads the checkpoints of one call of `fit`, beside which there may be others."""

import dataclasses
import os
from typing import Any

from flaxfit.checkpoints import _folder
from flaxfit.checkpoints._file import CheckpointFile
from flaxfit.checkpoints._reader import CheckpointFileReader, list_steps
from flaxfit.checkpoints._record import read_record
from flaxfit.checkpoints._seal import Damaged
from flaxfit.distributed._processes import from_main


class CallReader(CheckpointFileReader):
    """Reads the newest checkpoint of the call of `fit` that began at a step.

    Args:
      folder: the folder of the run.
      first_step: the step at which the call began.
      epochs: the epochs at which the call ends. The position in the data of a complete call is left
        out: nothing is read of the data then, which may be shorter than it was.
      is_fresh: whether that is the start of a model. Checkpoints that do not say where their call
        began, of loops and of older versions, are of such a call.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        first_step: int,
        *,
        epochs: int | None = None,
        is_fresh: bool,
    ) -> None:
        super().__init__(folder)
        self._first_step, self._epochs, self._is_fresh = first_step, epochs, is_fresh

    def read(self, *template: Any, **options: Any) -> CheckpointFile | None:
        found = super().read(*template, **options)
        if found is None or self._epochs is None:
            return found
        history = found.history or {}
        n_done = history.get("initial_epoch", 0) + len(history.get("steps", ()))
        is_complete = found.stop or n_done >= self._epochs
        return dataclasses.replace(found, data_state=None) if is_complete else found

    def newest(self) -> int | None:
        """Returns the newest step of the call whose record is intact; None if there is none."""
        steps = list_steps(self.folder)[::-1]

        def find() -> int | None:
            return next((step for step in steps if self._began(step) == self._first_step), None)

        return from_main("the checkpoints of a call of fit", find)

    def others(self) -> list[int]:
        """Returns the steps at which other calls began that have saved into the folder."""

        def find() -> list[int]:
            began = {self._began(step) for step in _folder.steps(self.folder)}
            return sorted(each for each in began if each not in (None, self._first_step))

        return from_main("the other calls of fit in a folder", find)

    def _is_wanted(self, step: int) -> bool:
        wanted = (self._first_step, None)
        return from_main("the call of a checkpoint", lambda: self._began(step) in wanted)

    def _began(self, step: int) -> int | None:
        """The step at which the call of a checkpoint began; None if its record is damaged."""
        try:
            history = read_record(_folder.step_path(self.folder, step))["history"]
        except Damaged:
            return None
        began = history.get("first_step") if isinstance(history, dict) else None
        if began is None:
            return self._first_step if self._is_fresh else 0
        return began
