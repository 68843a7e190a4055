"""fit: the body of `Model.fit`, from its arguments to the history of the epochs."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator

import jax

from flaxfit import checkpoints, display
from flaxfit.callbacks import ProgressBar
from flaxfit.callbacks._callback import Callback
from flaxfit.callbacks._history import History
from flaxfit.callbacks._progress import ENDLESS
from flaxfit.data import DataStream
from flaxfit.data._libraries import is_hugging_face
from flaxfit.loop._callback_list import as_tuple
from flaxfit.loop._eval_loop import EvalLoop
from flaxfit.loop._train_loop import EndOfData, TrainLoop
from flaxfit.model._export import apply_to_export
from flaxfit.model._resume import RunFolder
from flaxfit.model._streams import in_order, length_of, prefetched, training_stream
from flaxfit.model._trainer import Trainer
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.state._train_state import TrainState
from flaxfit.tree._checks import whole_number
from flaxfit.tree._functions import order_of
from flaxfit.tree._types import Data


def check_arguments(
    verbose: int | str,
    epochs: int,
    batch_size: int | None,
    steps_per_epoch: int | None,
    steps_per_execution: int | str,
) -> None:
    """Checks the numbers among the arguments of `Model.fit`."""
    if verbose not in ("auto", 0, 1, 2):
        raise ValueError(f"verbose must be 'auto', 0, 1 or 2, got {verbose!r}.")
    whole_number("epochs", epochs)
    for name, n in {"batch_size": batch_size, "steps_per_epoch": steps_per_epoch}.items():
        if n is not None:
            whole_number(name, n)
    if steps_per_execution != "auto":
        whole_number("steps_per_execution", steps_per_execution, other="auto")


def fit(
    trainer: Trainer,
    evaluator: EvalLoop,
    data: Data,
    validation_data: Data,
    *,
    batch_size: int | None,
    epochs: int,
    steps_per_epoch: int | None,
    shuffle: bool | None,
    callbacks: Callback | Iterable[Callback] | None,
    verbose: int | str,
    steps_per_execution: int | str,
    checkpoint_dir: str | os.PathLike[str] | checkpoints.CheckpointFileWriter | None,
    resume: bool | str,
) -> History:
    """Trains for a number of epochs on what `prepare` returned; see `Model.fit`."""
    stream = training_stream(
        data,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=trainer.seed,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        n_before=trainer.n_epochs,
    )
    if isinstance(validation_data, tuple) or is_hugging_face(validation_data):
        validation_data = in_order(validation_data, batch_size)
    n_steps = steps_per_epoch or length_of(stream)
    users = as_tuple(callbacks)
    # What `load` has read is the start of this model, not of an interrupted call.
    is_fresh, init, folder = trainer.is_fresh, trainer.init, None
    if checkpoint_dir is not None:
        folder = RunFolder(checkpoint_dir, resume if is_fresh else "auto")
        init = folder.reader(init) if is_fresh else init
    trainer.instance.note_changes()
    loop = trainer.loop_over(
        init,
        prefetched(stream),
        n_steps=n_steps,
        steps_per_call=steps_per_execution,
        callbacks=[each for each in users if order_of(each) == "first"],
        stdout=bool(verbose),
    )
    found = loop.start if is_fresh else None
    evaluator.attach(loop)
    if hasattr(validation_data, "one_epoch") or not isinstance(validation_data, Iterator | None):
        # Before an epoch is spent on it.
        evaluator.check(loop.state_in_place, validation_data, in_phase=loop.in_phase)
    line = _first_line(trainer.name, loop, stream, validation_data, n_steps)
    trainer.history = history = History(trainer.name, unit="epoch", facts=line)
    for callback in users:
        if hasattr(callback, "attach_apply"):
            callback.attach_apply(apply_to_export(evaluator.task))
    every = [*users, history.append]
    if validation_data is not None:
        every.insert(0, Validation(evaluator, trainer.averaged, validation_data))
    if folder is not None:
        every = [*folder.guards(users), *every, folder.writer]
    if verbose:
        display.say(line)
        is_live = False if verbose == 2 else None
        n_before = 0 if found is None or not found.history else len(found.history["steps"])
        every.append(ProgressBar(unit="epoch", total=epochs, start=n_before, live=is_live))
    with contextlib.ExitStack() as stack:
        stack.push(lambda kind, error, traceback: trainer.write_back(error))
        stack.callback(_close_data, loop)
        stack.enter_context(loop)
        loop.callbacks = every
        if folder is not None and found is not None:
            trainer.n_epochs = len(history.steps)
            epochs = folder.epochs_left(loop, history, epochs, n_steps)
        if n_steps is None:
            _train_passes(trainer, loop, epochs)
            return history
        end = loop.first_checkpoint + (epochs - 1) * n_steps
        for checkpoint in loop.run_until(end, copy=False):
            del checkpoint  # A copy that a callback was given is not to be held while training.
            trainer.n_epochs += 1
        if loop.step < end and not loop.stopped:
            raise ValueError(
                f"The data ended after step {loop.step:,}, and {epochs} epochs of {n_steps:,} "
                f"steps end at step {end:,}. Give fewer steps_per_epoch or epochs, or data that "
                "lasts."
            )
    return history


def _train_passes(trainer: Trainer, loop: TrainLoop, epochs: int) -> None:
    """Trains for a number of passes over data of unknown length."""
    n_done, was_empty = 0, False
    while n_done < epochs:
        loop.first_checkpoint = loop.step + ENDLESS
        try:
            loop.next_checkpoint(copy=False)
        except EndOfData:
            if was_empty:
                raise ValueError(
                    f"The data ended after {n_done} of {epochs} epochs: give data that can be "
                    "passed over again, such as a list, a loader or a callable."
                ) from None
            was_empty = True  # A run may be resumed from the very end of a pass.
        else:
            n_done, was_empty = n_done + 1, False
            trainer.n_epochs += 1
            if loop.stopped:
                return
        if n_done < epochs:
            loop.data = loop.data  # Which starts another pass.


class Validation:
    """The callback that adds the metrics of validation data, with "val_" before their names."""

    borrows = True
    """It only reads the checkpoint."""

    def __init__(
        self, evaluator: EvalLoop, averaged: Callable[[TrainState], TrainState], data: Data
    ):
        self._evaluator, self._averaged, self._data = evaluator, averaged, data
        self.adds = evaluator.adds
        """The metrics that it adds; see `EvalLoop.adds`."""
        self.adds_more = evaluator.adds_more

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint with the metrics of its state added."""
        metrics = self._evaluator.measure(self._averaged(checkpoint.state), self._data)
        return checkpoint.with_metrics(metrics, "val_").replace(
            modes={**checkpoint.modes, **self.adds}
        )


def _first_line(
    name: str, loop: TrainLoop, stream: DataStream, validation_data: Data, n_steps: int | None
) -> str:
    params = loop.state_in_place.params
    return display.start_line(
        name,
        n_params=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        n_devices=len(loop.strategy.devices),
        platform=jax.default_backend(),
        batch_size=getattr(stream, "batch_size", None),
        n_train=getattr(stream, "n_examples", None),
        n_validation=getattr(validation_data, "n_examples", None),
        steps_per_epoch=n_steps,
    )


def _close_data(loop: TrainLoop) -> None:
    if hasattr(loop.data, "close"):
        loop.data.close()
