"""fit: the body of `Model.fit`, from its arguments to its history."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from flaxfit import checkpoints, display
from flaxfit.callbacks import ProgressBar
from flaxfit.callbacks._callback import Callback
from flaxfit.callbacks._history import History
from flaxfit.callbacks._progress import ENDLESS
from flaxfit.data import DataStream
from flaxfit.display import show_one_line
from flaxfit.loop import EndOfData, EvalLoop, TrainLoop, as_tuple, by_one_thread, unfreezes
from flaxfit.model._resume import RunFolder, finish, guards
from flaxfit.model._streams import known_length, length_of, prefetched, training_stream
from flaxfit.model._tasks import apply_to_export
from flaxfit.model._trainer import Trainer
from flaxfit.model._validation import epochs_of, validation_of
from flaxfit.state import FitCall
from flaxfit.tree import Data, order_of, whole_number


def check_arguments(
    verbose: int | str,
    epochs: int,
    initial_epoch: int,
    steps_per_execution: int | str,
    **numbers: int | None,
) -> None:
    """Checks the numeric arguments of `Model.fit`."""
    if verbose not in ("auto", 0, 1, 2):
        raise ValueError(f"verbose must be 'auto', 0, 1 or 2, got {verbose!r}.")
    whole_number("epochs", epochs)
    whole_number("initial_epoch", initial_epoch, least=0)
    for name, n in numbers.items():
        if n is not None:
            whole_number(name, n)
    if steps_per_execution != "auto":
        whole_number("steps_per_execution", steps_per_execution, other="auto")


@by_one_thread
def fit(
    trainer: Trainer,
    evaluator: EvalLoop,
    data: Data,
    validation_data: Data,
    *,
    batch_size: int | None,
    epochs: int,
    initial_epoch: int,
    steps_per_epoch: int | None,
    validation_steps: int | None,
    validation_batch_size: int | None,
    validation_freq: Any,
    class_weight: Mapping[int, float] | str | None,
    shuffle: bool | None,
    callbacks: Callback | Iterable[Callback] | None,
    verbose: int | str,
    steps_per_execution: int | str,
    checkpoint_dir: str | os.PathLike[str] | checkpoints.CheckpointFileWriter | None,
    resume: bool | str,
) -> History:
    """Trains on data that `prepare` returned; see `Model.fit`."""
    trainer.check_trainable()
    is_validated = epochs_of(validation_freq)
    if validation_data is None:
        _refuse_unused(
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=None if np.array_equal(validation_freq, 1) else validation_freq,
        )
    history = History(trainer.name, unit="epoch", initial_epoch=initial_epoch)
    history.params = {"verbose": verbose, "epochs": epochs, "steps": steps_per_epoch}
    if initial_epoch:
        trainer.n_epochs = initial_epoch
    n_left = epochs - initial_epoch
    if n_left < 1:
        display.say(f"nothing to train: initial_epoch={initial_epoch} and epochs={epochs}")
        trainer.history = history
        return history
    with display.quiet(not verbose):
        stream = training_stream(
            data,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=trainer.starting_point.seed,
            epochs=n_left,
            steps_per_epoch=steps_per_epoch,
            n_before=trainer.n_epochs,
            class_weight=class_weight,
            form=trainer.task.roles,
        )
    validation = None
    if validation_data is not None:
        validation = validation_of(
            validation_data,
            evaluator=evaluator,
            averaged=trainer.averaged,
            batch_size=validation_batch_size or batch_size,
            is_given=validation_batch_size is not None,
            n_steps=validation_steps,
            n_times=sum(map(is_validated, range(initial_epoch + 1, epochs + 1))),
            is_due=lambda: is_validated(history.n_epochs + 1),
        )
    history.params["steps"] = n_steps = steps_per_epoch or length_of(stream)
    is_unknown = bool(verbose and steps_per_epoch) and known_length(stream) is None
    first_epoch_of_data = trainer.n_epochs
    users = as_tuple(callbacks)
    history.first_step, folder, saved = trainer.step, None, None
    if checkpoint_dir is not None:
        folder = RunFolder(checkpoint_dir, resume, trainer, epochs)
        saved = folder if folder.resumes else None
    loop = trainer.loop_over(
        saved,
        prefetched(stream),
        n_steps=n_steps,
        steps_per_call=steps_per_execution,
        callbacks=[each for each in users if order_of(each) == "first" or unfreezes(each)],
        stdout=bool(verbose),
    )
    evaluator.attach(loop)
    if validation is not None:
        validation.attach_to(loop)
    lines = display.start_lines(
        trainer.name,
        n_params=display.html.n_numbers(loop.state_in_place.params),
        n_devices=len(loop.strategy.devices),
        platform=jax.default_backend(),
        batch_size=getattr(stream, "batch_size", None),
        n_train=getattr(stream, "n_examples", None),
        n_validation=getattr(validation and validation.data, "n_examples", None),
        steps_per_epoch=n_steps,
    )
    history.facts = " · ".join(lines)
    trainer.history = history
    fit_call = FitCall(
        first_epoch=initial_epoch,
        epoch=lambda: history.n_epochs,
        n_steps=n_steps and n_left * n_steps,
        eval_apply=lambda: apply_to_export(evaluator.task),
    )
    every = [*users, history.append]
    if validation is not None:
        every.insert(0, validation)
    if folder is not None:
        every = [*guards(users), *every, folder.writer]
    bar = None
    if verbose:
        display.say(("\n" + " " * 9).join(lines))
        _say_if_longer(stream, steps_per_epoch)
        is_live = False if verbose == 2 else None
        bar = ProgressBar(unit="epoch", total=epochs, start=initial_epoch, live=is_live)
        every.append(bar)
    first_step, end = loop.step, None

    def finish_writers() -> None:
        # Without a known length, a pass that was cut short looks like a complete one.
        is_complete = not loop.stopped if end is None else loop.step >= end
        finish(every, history, trained=loop.step > first_step, complete=is_complete)
        if folder is not None:
            trainer.calls_done.add(folder.place)

    # The stack unwinds in reverse: it reports an interrupt, closes the loop and its callbacks,
    # finishes the writers if nothing failed, closes the data, and writes the NNX instance.
    with contextlib.ExitStack() as stack:
        instance = trainer.instance
        stack.enter_context(instance.fitting(is_watched=bool(users)))
        stack.push(lambda kind, error, where: instance.write(lambda: trainer.variables, error))
        stack.callback(_close_data, loop)
        stack.push(lambda kind, error, traceback: finish_writers() if kind is None else None)
        stack.enter_context(loop)
        stack.push(lambda kind, error, where: _say_if_interrupted(error, loop, every, verbose))
        loop.fit_call, loop.callbacks = fit_call, every
        # Without `saved`, `loop.start` comes from `Model.load`, not from an interrupted call.
        if saved is not None and loop.start is not None:
            trainer.n_epochs = first_epoch_of_data + len(history.steps)
            if bar is not None:
                bar.recall(history)
            n_left = saved.epochs_left(loop, history, epochs, initial_epoch, n_steps)
        if n_steps is None:
            _train_passes(trainer, loop, n_left)
            return history
        end = loop.first_checkpoint + (n_left - 1) * n_steps
        for checkpoint in loop.run_until(end, copy=False):
            del checkpoint  # Free the callback's copy before the next step.
            trainer.n_epochs += 1
            is_first, is_unknown = is_unknown and len(history.steps) == 1, False
            if is_first and getattr(loop.data, "epoch", 0) > first_epoch_of_data:
                display.say(
                    f"the data ended before steps_per_epoch={n_steps:,} and began again: an epoch "
                    "is longer than a pass"
                )
        if loop.step < end and not loop.stopped:
            raise ValueError(
                f"The data ended after step {loop.step:,}, and {n_left} epochs of {n_steps:,} "
                f"steps end at step {end:,}. Reduce steps_per_epoch or epochs, or give more data."
            )
    return history


def _refuse_unused(**options: Any) -> None:
    """Refuses validation options without validation data."""
    given = [f"{name}={value!r:.60}" for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            f"fit got {', '.join(given)}, but neither validation_data nor validation_split: pass "
            "one of them, or leave the options of validation out."
        )


def _say_if_interrupted(
    error: BaseException | None, loop: TrainLoop, callbacks: list[Any], verbose: int | str
) -> None:
    """Prints where an interrupt ended training, in one line instead of a traceback."""
    if not isinstance(error, KeyboardInterrupt):
        return
    for each in callbacks:
        if isinstance(each, ProgressBar):
            each.interrupt()
    notice = f"interrupted at step {loop.step:,}; weights kept; fit continues"
    if verbose:
        display.say(notice)
    show_one_line(error, notice, is_shown=bool(verbose))


def _say_if_longer(stream: DataStream, steps_per_epoch: int | None) -> None:
    """Prints a notice if an epoch is longer than a pass over the data."""
    n = None if steps_per_epoch is None else known_length(stream)
    if steps_per_epoch and n is not None and n < steps_per_epoch:
        display.say(
            f"a pass over the data has {n:,} batches: an epoch of steps_per_epoch="
            f"{steps_per_epoch:,} continues into the next"
        )


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
            was_empty = True  # Allowed once: a run may resume at the very end of a pass.
        else:
            n_done, was_empty = n_done + 1, False
            trainer.n_epochs += 1
            if loop.stopped:
                return
        if n_done < epochs:
            loop.data = loop.data  # The assignment starts another pass.


def _close_data(loop: TrainLoop) -> None:
    if hasattr(loop.data, "close"):
        loop.data.close()
