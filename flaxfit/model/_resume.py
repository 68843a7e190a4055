"""RunFolder: where `fit` saves each epoch, and finds what an interrupted call has left."""

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from flaxfit.callbacks import SaveOnSignal
from flaxfit.callbacks._history import History
from flaxfit.checkpoints import (
    CheckpointFile,
    CheckpointFileReader,
    CheckpointFileWriter,
    latest,
    list_steps,
)
from flaxfit.loop._train_loop import TrainLoop
from flaxfit.tree._types import PyTree


class RunFolder:
    """The folder of a run of `fit`.

    Args:
      folder: its path; made when it does not exist. Or the writer that saves into it.
      resume: "auto": resume from the newest checkpoint, if there is one; True: there must be one;
        False: the folder must be empty.

    Raises:
      FileNotFoundError: `resume=True`, and the folder holds no checkpoint.
      ValueError: `resume=False`, and it holds something; or another value of `resume`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | CheckpointFileWriter,
        resume: bool | str = "auto",
    ):
        if resume not in ("auto", True, False):
            raise ValueError(f"resume must be 'auto', True or False, got {resume!r}.")
        # Before looking: a writer finishes what a killed process has left half replaced.
        is_writer = isinstance(folder, CheckpointFileWriter)
        self.writer = folder if is_writer else CheckpointFileWriter(folder)
        folder = self.writer.output_dir
        found = latest(folder)
        if resume is True and found is None:
            raise FileNotFoundError(
                f"resume=True, and {os.fspath(folder)!r} holds no checkpoint. Use resume='auto' "
                "to start afresh when there is none."
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

    def init(self, init: Any) -> Any:
        """What a loop starts with: the newest checkpoint, else `init`, the model's."""
        return SavedState(CheckpointFileReader(self._folder, init))

    def _check_epochs(self, history: History, n_steps: int | None) -> None:
        """Refuses to go on with epochs of another number of steps than those of a history.

        Raises:
          ValueError: with both numbers.
        """
        n_epochs = len(history.steps)
        if n_steps is not None and n_epochs and history.n_steps != n_epochs * n_steps:
            raise ValueError(
                f"Cannot go on in {os.fspath(self._folder)!r} with {n_steps} steps per epoch: its "
                f"{n_epochs} epochs took {history.n_steps} steps. Give the same steps_per_epoch, "
                "data and batch_size, or another folder."
            )

    def epochs_left(
        self, loop: TrainLoop, history: History, epochs: int, n_steps: int | None
    ) -> int:
        """How many of a call's epochs are still to be trained, where a loop goes on with it.

        Raises:
          ValueError: its epochs had another number of steps; with both numbers.
        """
        n_done = len(history.steps)
        if not loop.stopped:
            self._check_epochs(history, n_steps)
        if loop.stopped or n_done >= epochs:
            loop.say(f"this run is complete: {n_done} epochs are done")
            return 0
        return epochs - n_done

    def guards(self, callbacks: Sequence[Any]) -> list[Any]:
        """A `SaveOnSignal`, where neither a callback nor the program handles SIGTERM itself."""
        is_handled = any(isinstance(each, SaveOnSignal) for each in callbacks)
        handler = signal.getsignal(signal.SIGTERM)
        owner = getattr(handler, "__self__", None)
        is_left_over = isinstance(owner, SaveOnSignal) and owner.is_idle
        is_handled |= handler is not signal.SIG_DFL and not is_left_over
        is_main = threading.current_thread() is threading.main_thread()
        return [SaveOnSignal()] if is_main and not is_handled else []


class SavedState:
    """A reader for `TrainLoop(init=...)` that remembers that it reads a saved state.

    Args:
      reader: what reads.
      only_state: whether a run of its own begins with the state, and nothing else is taken over.
    """

    def __init__(self, reader: CheckpointFileReader, *, only_state: bool = False):
        self.target = reader.target
        self._reader = reader
        self._only_state = only_state

    def read(self, template: PyTree) -> Any:
        """What the reader reads, or None."""
        found = self._reader.read(template)
        if found is None or not self._only_state:
            return found
        return CheckpointFile(
            step=found.step, state=found.state, metrics=found.metrics, path=found.path
        )
