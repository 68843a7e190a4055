"""RunFolder: the folder in which `fit` saves each epoch and finds an interrupted run."""

import dataclasses
import math
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from flaxfit.callbacks import EarlyStopping, SaveOnSignal
from flaxfit.callbacks._callback import Callback
from flaxfit.callbacks._history import History
from flaxfit.checkpoints import (
    CheckpointFile,
    CheckpointFileReader,
    CheckpointFileWriter,
    latest,
    list_steps,
)
from flaxfit.loop._train_loop import TrainLoop
from flaxfit.model._starting_point import Init
from flaxfit.tree._functions import owner_of


def finish(
    callbacks: Sequence[Callback], history: History, *, trained: bool, complete: bool
) -> None:
    """Ends a call of `fit` that has not failed, for the writers among its callbacks.

    It succeeded if it trained, to its last step or until an `EarlyStopping`, with a finite loss.
    """
    owners = [owner_of(each) for each in callbacks]
    is_ended = any(isinstance(each, EarlyStopping) and each.has_stopped for each in owners)
    losses = history.history.get("loss", ())
    is_finite = all(map(math.isfinite, losses[-1:]))
    for owner in owners:
        if isinstance(owner, CheckpointFileWriter):
            owner.finish(succeeded=trained and (complete or is_ended) and is_finite)


class _RunReader(CheckpointFileReader):
    """Reads the newest checkpoint of a run, without a position in the data if it is complete.

    Nothing is read of the data then, which may be shorter than it was.
    """

    def __init__(self, folder: str | os.PathLike[str], target: Init, epochs: int):
        super().__init__(folder, target)
        self._epochs = epochs

    def read(self, *template: Any, **options: Any) -> CheckpointFile | None:
        found = super().read(*template, **options)
        if found is None:
            return None
        history = found.history or {}
        n_done = history.get("initial_epoch", 0) + len(history.get("steps", ()))
        is_complete = found.stop or n_done >= self._epochs
        return dataclasses.replace(found, data_state=None) if is_complete else found


class RunFolder:
    """The folder of a run, or the writer that saves into it, checked against `resume` of `fit`."""

    def __init__(
        self,
        folder: str | os.PathLike[str] | CheckpointFileWriter,
        resume: bool | str = "auto",
    ):
        if resume not in ("auto", True, False):
            raise ValueError(f"resume must be 'auto', True or False, got {resume!r}.")
        # First of all: a writer completes a replacement that a killed process has begun.
        is_writer = isinstance(folder, CheckpointFileWriter)
        self.writer = folder if is_writer else CheckpointFileWriter(folder)
        folder = self.writer.output_dir
        found = latest(folder)
        if resume is True and found is None:
            raise FileNotFoundError(
                f"resume=True, but {os.fspath(folder)!r} holds no checkpoint. Use resume='auto' "
                "to start from scratch when there is none."
            )
        if resume is False and found is not None:
            raise ValueError(
                f"resume=False, and {os.fspath(folder)!r} holds the checkpoints of steps "
                f"{list_steps(folder)}. Use another folder, or resume='auto' to continue from them."
            )
        if resume is False and (names := sorted(entry.name for entry in folder.iterdir())):
            raise ValueError(
                f"resume=False, and {os.fspath(folder)!r} is not empty: it holds "
                f"{', '.join(names[:5])}. Use another folder."
            )
        self._folder = folder

    def reader(self, init: Init, epochs: int) -> CheckpointFileReader:
        """Returns the reader of the newest checkpoint; without one, a loop begins with `init`."""
        return _RunReader(self._folder, init, epochs)

    def epochs_left(
        self,
        loop: TrainLoop,
        history: History,
        epochs: int,
        initial_epoch: int,
        n_steps: int | None,
    ) -> int:
        """Returns how many epochs a resumed call has left.

        Raises:
          ValueError: the saved epochs had another number of steps, or began at another epoch; it
            names both numbers.
        """
        if history.initial_epoch != initial_epoch:
            raise ValueError(
                f"Cannot resume in {os.fspath(self._folder)!r} with initial_epoch="
                f"{initial_epoch}: the run began with {history.initial_epoch} and tracks its "
                "completed epochs itself. Pass the same initial_epoch and epochs, or another "
                "folder."
            )
        n_done = len(history.steps)
        is_other = n_steps is not None and n_done and history.n_steps != n_done * n_steps
        if is_other and not loop.stopped:
            raise ValueError(
                f"Cannot resume in {os.fspath(self._folder)!r} with {n_steps} steps per epoch: its "
                f"{n_done} epochs took {history.n_steps} steps. Give the same steps_per_epoch, "
                "data and batch_size, or another folder."
            )
        if loop.stopped or history.n_epochs >= epochs:
            loop.say(f"this run is complete: {history.n_epochs} epochs are done")
            return 0
        return epochs - history.n_epochs

    def guards(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Returns a `SaveOnSignal`, unless a callback or the program handles SIGTERM itself."""
        is_handled = any(isinstance(each, SaveOnSignal) for each in callbacks)
        handler = signal.getsignal(signal.SIGTERM)
        owner = getattr(handler, "__self__", None)
        is_left_over = isinstance(owner, SaveOnSignal) and owner.is_idle
        is_handled |= handler is not signal.SIG_DFL and not is_left_over
        is_main = threading.current_thread() is threading.main_thread()
        return [SaveOnSignal()] if is_main and not is_handled else []
