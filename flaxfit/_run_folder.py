"""RunFolder: where `fit` saves each epoch, and finds what an interrupted call has left."""

import dataclasses
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from flaxfit._checkpoint import Checkpoint
from flaxfit._history import History
from flaxfit.callbacks import SaveOnSignal
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter, latest, list_steps

_STOPPED = "stopped"


class RunFolder:
    """The folder of a run of `fit`.

    Args:
      folder: its path; made when it does not exist.
      resume: "auto": go on from the newest checkpoint, if there is one; True: there must be one;
        False: there must be none.

    Raises:
      FileNotFoundError: `resume=True`, and the folder holds no checkpoint.
      ValueError: `resume=False`, and it holds some; or another value of `resume`.
    """

    def __init__(self, folder: str | os.PathLike[str], resume: bool | str = "auto"):
        if resume not in ("auto", True, False):
            raise ValueError(f"resume must be 'auto', True or False, got {resume!r}.")
        # Before looking: a writer finishes what a killed process has left half replaced.
        self.writer = CheckpointFileWriter(folder)
        found = latest(folder)
        if resume is True and found is None:
            raise FileNotFoundError(
                f"resume=True, and {os.fspath(folder)!r} holds no checkpoint. Use resume='auto' "
                "to start afresh when there is none."
            )
        if resume is False and found is not None:
            raise ValueError(
                f"resume=False, and {os.fspath(folder)!r} holds the checkpoints of steps "
                f"{list_steps(folder)}. Use another folder, or resume='auto' to go on from them."
            )
        self._folder = folder

    def init(self, init: Any, *, keeps_position: bool) -> Any:
        """What a loop starts with: the newest checkpoint, else `init`.

        Args:
          init: the model's.
          keeps_position: whether the position in the data is taken over; not where each epoch is
            a stream of its own.
        """
        return SavedState(CheckpointFileReader(self._folder, init), keeps_position)

    def saving(self, history: History, callbacks: Sequence[Any]) -> "Saving":
        """A callback that saves, beside the checkpoint, the history and what callbacks remember."""
        return Saving(self.writer, history, callbacks)

    def guards(self, callbacks: Sequence[Any]) -> list[Any]:
        """A `SaveOnSignal`, where neither a callback nor the program handles SIGTERM itself."""
        is_handled = any(isinstance(each, SaveOnSignal) for each in callbacks)
        is_handled |= signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        is_main = threading.current_thread() is threading.main_thread()
        return [SaveOnSignal()] if is_main and not is_handled else []

    def take_over(self, found: Any, history: History, callbacks: Sequence[Any]) -> bool:
        """Puts back the history and what callbacks remember; whether the run had been stopped."""
        if found.history is not None:
            history.set_state(found.history)
        for name, each in _with_state(callbacks).items():
            if name in found.callback_states:
                each.set_state(found.callback_states[name])
        return bool(found.callback_states.get(_STOPPED, False))


class Saving:
    """A callback that saves all that a run of `fit` needs to go on."""

    def __init__(self, writer: CheckpointFileWriter, history: History, callbacks: Sequence[Any]):
        self._writer = writer
        self._history = history
        self._callbacks = callbacks

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Saves the checkpoint and returns it."""
        self.save(checkpoint)
        return checkpoint

    def save(self, checkpoint: Checkpoint) -> None:
        """Saves a checkpoint, also one that the callbacks have not seen."""
        states = {name: each.get_state() for name, each in _with_state(self._callbacks).items()}
        states[_STOPPED] = checkpoint.stop
        history = self._history.get_state()
        self._writer.save(checkpoint, history=history, callback_states=states)

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._writer.close()


class SavedState:
    """A reader for `TrainLoop(init=...)` that may leave the position in the data alone.

    Args:
      reader: what reads.
      keeps_position: whether the position is taken over.
      mid_epoch: whether it is taken over at least from the middle of an epoch, where the position
        is one in that epoch's own stream.
    """

    def __init__(
        self, reader: CheckpointFileReader, keeps_position: bool, *, mid_epoch: bool = True
    ):
        self.target = reader.target
        self._reader = reader
        self._keeps_position = keeps_position
        self._mid_epoch = mid_epoch

    def read(self, template: Any) -> Any:
        """What the reader reads, or None."""
        found = self._reader.read(template)
        # In the middle of an epoch the position is one in its own stream.
        is_within = found is not None and "n_steps" in (found.running or {})
        if found is None or self._keeps_position or (self._mid_epoch and is_within):
            return found
        return dataclasses.replace(found, data_state=None, running=None)


def _with_state(callbacks: Sequence[Any]) -> dict[str, Any]:
    """The callbacks that remember something, by their place and their type."""
    return {
        f"{i}-{type(each).__name__}": each
        for i, each in enumerate(callbacks)
        if hasattr(each, "get_state") and hasattr(each, "set_state")
    }
