"""RunFolder: the folder where `fit` saves epochs and finds an interrupted run."""

import dataclasses
import math
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from flaxfit import display
from flaxfit.callbacks import EarlyStopping, SaveOnSignal
from flaxfit.callbacks._callback import Callback
from flaxfit.callbacks._history import History
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter, list_steps
from flaxfit.checkpoints._retention import newest_history
from flaxfit.loop import TrainLoop
from flaxfit.model._trainer import Trainer
from flaxfit.tree import owner_of


def finish(
    callbacks: Sequence[Callback], history: History, *, trained: bool, complete: bool
) -> None:
    """Tells the writers among the callbacks of `fit` that it ended, and whether it succeeded.

    It succeeded if it trained to its last step, or until an `EarlyStopping`, with a finite loss.
    """
    owners = [owner_of(each) for each in callbacks]
    is_ended = any(isinstance(each, EarlyStopping) and each.has_stopped for each in owners)
    losses = history.history.get("loss", ())
    is_finite = all(map(math.isfinite, losses[-1:]))
    for owner in owners:
        if isinstance(owner, CheckpointFileWriter):
            owner.finish(succeeded=trained and (complete or is_ended) and is_finite)


class RunFolder(CheckpointFileReader):
    """Reads the newest checkpoint of a folder, and checks that it belongs to this call of `fit`.

    A checkpoint that does not record where its call began (of a loop) counts as one of a call that
    began at step 0.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | CheckpointFileWriter,
        resume: bool | str,
        trainer: Trainer,
        epochs: int,
    ):
        if resume not in ("auto", True, False):
            raise ValueError(f"resume must be 'auto', True or False, got {resume!r}.")
        # First: creating a writer completes a replacement that a killed process left unfinished.
        is_writer = isinstance(folder, CheckpointFileWriter)
        self.writer = folder if is_writer else CheckpointFileWriter(folder)
        folder, step, is_fresh = self.writer.output_dir, trainer.step, trainer.is_fresh
        # A trained model provides shapes only: the checkpoint provides the values.
        start = trainer.starting_point
        super().__init__(folder, start.init if is_fresh else start.fresh)
        self._first_step, self._epochs = step, epochs
        self._name = name = repr(os.fspath(folder))
        self.place = os.path.realpath(folder), step
        """The folder with links resolved, and the step of the model."""
        steps = list_steps(folder)
        if resume is False and (held := sorted(entry.name for entry in folder.iterdir())):
            raise ValueError(
                f"resume=False, and {name} is not empty: it holds {', '.join(held[:5])}. Use "
                "another folder, or resume='auto' to continue from its checkpoints."
            )
        history = newest_history(self.folder)
        began = None if history is None else history.get("first_step") or 0
        if is_fresh and began not in (None, step):
            raise ValueError(
                f"Cannot resume in {name}: this model is at step {step:,}, but the newest "
                f"checkpoint there is of a call of fit that began at step {began:,}. Run the "
                "earlier calls first, with a folder of their own; or call model.load("
                f"{name}), to continue from that checkpoint."
            )
        # Damaged files are reported by the reader.
        self.resumes = is_fresh or began == step
        """Whether there may be a checkpoint to resume from; otherwise the call starts here."""
        if resume is True and not (self.resumes and steps):
            raise FileNotFoundError(
                f"resume=True, but {name} holds no checkpoint of a call of fit that began at step "
                f"{step:,}, where the model is. Use resume='auto' to train without one."
            )
        if began == step and self.place in trainer.calls_done:
            raise ValueError(
                f"Cannot train in {name} again from step {step:,}: an earlier call of fit on this "
                "model began at the same step and saved there. Use another folder."
            )

    def read(self, *template: Any, **options: Any) -> Any:
        found = super().read(*template, **options)
        if found is None:
            return None
        history = found.history or {}
        if (history.get("first_step") or 0) != self._first_step:
            raise ValueError(
                f"Cannot resume in {self._name}: its newest intact checkpoint, of step "
                f"{found.step:,}, is of another call of fit. Use another folder."
            )
        n_done = history.get("initial_epoch", 0) + len(history.get("steps", ()))
        if n_done < self._epochs and not found.stop:
            return found
        # The run is complete and reads no data, which may be shorter now than the saved position.
        return dataclasses.replace(found, data_state=None)

    def epochs_left(
        self,
        loop: TrainLoop,
        history: History,
        epochs: int,
        initial_epoch: int,
        n_steps: int | None,
    ) -> int:
        """Returns the number of epochs that a resumed call has left."""
        if history.initial_epoch != initial_epoch:
            raise ValueError(
                f"Cannot resume in {self._name} with initial_epoch={initial_epoch}: the run began "
                f"with {history.initial_epoch} and tracks its completed epochs itself. Pass the "
                "same initial_epoch and epochs, or another folder."
            )
        n_done = len(history.steps)
        is_other = n_steps is not None and n_done and history.n_steps != n_done * n_steps
        if is_other and not loop.stopped:
            raise ValueError(
                f"Cannot resume in {self._name} with {n_steps} steps per epoch: its {n_done} "
                f"epochs took {history.n_steps} steps. Give the same steps_per_epoch, data and "
                "batch_size, or another folder."
            )
        n_done = history.n_epochs
        if n_done >= epochs:
            loop.say(f"this run is complete: {n_done} epochs are done")
        elif loop.stopped:
            states = [s for s in loop.start.callback_states.values() if isinstance(s, dict)]
            reasons = (f", as {line}" for each in states for line in each.get("endings", ()))
            # Printed even with verbose=0, since fewer epochs are trained than requested.
            display.say(
                f"this run is complete: a callback ended it after {n_done} of {epochs} epochs"
                f"{''.join(reasons)}. To train on, call model.load({self._name}) and fit("
                f"initial_epoch={n_done}, epochs={epochs}) with another folder"
            )
        return 0 if loop.stopped else max(0, epochs - n_done)


def guards(callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns a `SaveOnSignal`, unless a callback or the program handles SIGTERM itself."""
    handler = signal.getsignal(signal.SIGTERM)
    owner = getattr(handler, "__self__", None)
    is_left_over = isinstance(owner, SaveOnSignal) and owner.is_idle
    is_handled = handler is not signal.SIG_DFL and not is_left_over
    is_handled |= any(isinstance(each, SaveOnSignal) for each in callbacks)
    is_main = threading.current_thread() is threading.main_thread()
    return [SaveOnSignal()] if is_main and not is_handled else []
