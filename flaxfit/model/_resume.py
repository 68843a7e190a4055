"""RunFolder: the folder in which `fit` saves each epoch and finds an interrupted run."""

import math
import os
import signal
import threading
from collections.abc import Collection, Sequence

from flaxfit import display
from flaxfit.callbacks import EarlyStopping, SaveOnSignal
from flaxfit.callbacks._callback import Callback
from flaxfit.callbacks._history import History
from flaxfit.checkpoints import CheckpointFileWriter, list_steps
from flaxfit.checkpoints._call_reader import CallReader
from flaxfit.loop._train_loop import TrainLoop
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


class RunFolder:
    """The folder of a run, or the writer that saves into it, checked against `resume` of `fit`.

    Args:
      folder: the folder or the writer.
      resume: as in `fit`.
      step: the step of the model.
      epochs: as in `fit`.
      is_fresh: whether the model has not been trained or loaded.
      done: the `place`s of the earlier calls of `fit` on this model.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | CheckpointFileWriter,
        resume: bool | str = "auto",
        step: int = 0,
        *,
        epochs: int | None = None,
        is_fresh: bool = True,
        done: Collection[tuple[str, int]] = (),
    ):
        if resume not in ("auto", True, False):
            raise ValueError(f"resume must be 'auto', True or False, got {resume!r}.")
        # First of all: a writer completes a replacement that a killed process has begun.
        is_writer = isinstance(folder, CheckpointFileWriter)
        self.writer = folder if is_writer else CheckpointFileWriter(folder)
        self._folder = folder = self.writer.output_dir
        self.place = os.path.realpath(folder), step
        """The folder, links resolved, and the step of the model."""
        if resume is False:
            self._check_empty()
        reader = CallReader(folder, step, epochs=epochs, is_fresh=is_fresh)
        found = reader.newest()
        if found is None and is_fresh and (others := reader.others()):
            raise ValueError(
                f"Cannot resume in {os.fspath(folder)!r}: this model is at step {step:,}, and the "
                "checkpoints there are of calls of fit that began at step "
                f"{', '.join(map(str, others))}. Run the earlier calls first, with a folder of "
                f"their own; or call model.load({os.fspath(folder)!r}), to continue from the "
                "newest checkpoint."
            )
        # Damage is reported by the reader.
        is_empty = not is_fresh or not list_steps(folder)
        if found is None and resume is True and is_empty:
            what = "no checkpoint"
            if not is_fresh:
                what += f" of a call of fit that began at step {step:,}, where the model is"
            raise FileNotFoundError(
                f"resume=True, but {os.fspath(folder)!r} holds {what}. Use resume='auto' to "
                f"{'start from scratch' if is_fresh else 'train on'} when there is none."
            )
        if found is not None and self.place in done:
            raise ValueError(
                f"Cannot train in {os.fspath(folder)!r} again from step {step:,}: an earlier call "
                "of fit on this model began at the same step and saved there, so that a restart "
                "could not tell the two apart. Use another folder."
            )
        self.reader = reader if is_fresh or found is not None else None
        """Reads the checkpoint to resume from; None if a trained model begins a call."""

    def _check_empty(self) -> None:
        folder = self._folder
        if steps := list_steps(folder):
            raise ValueError(
                f"resume=False, and {os.fspath(folder)!r} holds the checkpoints of steps "
                f"{steps}. Use another folder, or resume='auto' to continue from them."
            )
        if names := sorted(entry.name for entry in folder.iterdir()):
            raise ValueError(
                f"resume=False, and {os.fspath(folder)!r} is not empty: it holds "
                f"{', '.join(names[:5])}. Use another folder."
            )

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
        if history.n_epochs >= epochs:
            loop.say(f"this run is complete: {history.n_epochs} epochs are done")
            return 0
        if loop.stopped:
            # Even with verbose=0: less is trained than was asked for.
            display.say(self._why_stopped(loop, history.n_epochs, epochs))
            return 0
        return epochs - history.n_epochs

    def _why_stopped(self, loop: TrainLoop, n_done: int, epochs: int) -> str:
        """Says by what a run was ended, as far as its callbacks have saved that, and what to do."""
        states = loop.start.callback_states.values()
        reasons = [
            line for each in states if isinstance(each, dict) for line in each.get("endings", ())
        ]
        return (
            f"this run is complete: a callback ended it after {n_done} of {epochs} epochs"
            f"{''.join(f', as {line}' for line in reasons)}. To train on, call model.load("
            f"{os.fspath(self._folder)!r}) and fit(initial_epoch={n_done}, epochs={epochs}) with "
            "another folder"
        )

    def guards(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Returns a `SaveOnSignal`, unless a callback or the program handles SIGTERM itself."""
        is_handled = any(isinstance(each, SaveOnSignal) for each in callbacks)
        handler = signal.getsignal(signal.SIGTERM)
        owner = getattr(handler, "__self__", None)
        is_left_over = isinstance(owner, SaveOnSignal) and owner.is_idle
        is_handled |= handler is not signal.SIG_DFL and not is_left_over
        is_main = threading.current_thread() is threading.main_thread()
        return [SaveOnSignal()] if is_main and not is_handled else []
