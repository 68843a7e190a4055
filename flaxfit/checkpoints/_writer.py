"""CheckpointFileWriter: a callback that saves each checkpoint, in the background by default."""

import math
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from flaxfit.checkpoints import _end, _folder, _lock
from flaxfit.checkpoints._contents import contents, holds
from flaxfit.checkpoints._orbax import StepWriter
from flaxfit.checkpoints._record import Record
from flaxfit.checkpoints._retention import Retention, supersede
from flaxfit.checkpoints._save_freq import SaveFreq
from flaxfit.checkpoints._step_name import StepName
from flaxfit.checkpoints._step_save import StepSave, cannot_save
from flaxfit.display import say
from flaxfit.distributed import from_main, is_main
from flaxfit.state import Checkpoint, collect
from flaxfit.tree import Array, Json

# One writer of this process begins at a time: between waiting for the others and registering its
# own save, no other writer may begin one in the same folder.
_turn = threading.Lock()


class CheckpointFileWriter:
    """Saves each checkpoint that it is called with, and returns it unchanged.

    A save is complete or absent: a kill at any instant leaves every earlier step as it was.
    Arrays are written in the background with the values that they have at the call; `close` and
    the end of the process wait for that. A failure in the background is raised by the next call
    or by `close`; at the end of the process it is printed, and the exit code is
    `ExitCode.UNSAVED`. Writers of one process take turns at a folder; while a process has a writer
    for a folder, no other process can make one.

    In the `callbacks` of a loop, at any place, it saves the checkpoint that all other callbacks
    return, the states of callbacks with `get_state` and `set_state`, and the metrics of
    `history.append`: a loop that resumes from it, with a `CheckpointFileReader` and the same
    callbacks, ends as if it had never been interrupted.

    Saving a step that the folder already holds does nothing if the content is the same, and
    replaces it otherwise. The first save of a run restarted at an earlier step renames the later
    steps to `superseded-<step>-<n>`, with a message.

    >>> import tempfile, jax.numpy as jnp, optax
    >>> from flaxfit.step._init_state import init_state
    >>> init = lambda rngs, x: {"params": {"w": jnp.ones(3)}}
    >>> state = init_state(init, optax.adam(0.1), 0, (jnp.ones(3),))
    >>> folder = tempfile.mkdtemp()
    >>> with CheckpointFileWriter(folder, keep=1, monitor="loss") as save:
    ...     for step, loss in enumerate([0.9, 0.3, 0.5, 0.4]):
    ...         checkpoint = save(Checkpoint(step=step, state=state, metrics={"loss": loss}))
    >>> _folder.steps(_folder.absolute(folder))
    [1, 3]

    Args:
      output_dir: the folder of the run; made if it does not exist.
      keep: the number of last steps to keep, at least 1; None keeps all.
      monitor: a metric whose best step is kept as well; of equal ones, the last is the best. None:
        no metric, or "val_loss" if an option below needs one.
      mode: "min", "max", or "auto", which knows the metrics and losses of flaxfit and the losses
        of Optax; other metrics need "min" or "max".
      keep_best: the number of best steps to keep; None: one, if a metric is monitored.
      save_best_only: whether to save only a checkpoint that is better than all before it in this
        folder; `save` saves any. A run that resumes from the folder begins at the last one saved.
      initial_value_threshold: with `save_best_only`, a value that the metric must also beat.
      save_freq: "epoch", or a number of steps: every this many steps a writer in `callbacks` also
        saves; a resumed run then continues within the epoch.
      name: a template of what follows the number of a step in the name of its folder: "120@03-0.25"
        by "{epoch:02d}-{val_loss:.2f}". Its fields are "step", "epoch" (from 1 as in Keras, in
        `fit`) and metrics; one that is not measured at a step is nan. Steps are read by number.
      verbose: 1 prints the folder of each step.
      asynchronous: whether to write in the background. Python 3.12.0 and 3.12.1 never do, as they
        cannot finish background work when a process ends.
      on_error: "raise" raises the error of a save that fails (a full disk); "warn" prints it, and
        the run continues without that checkpoint.
      delete_checkpoint: whether `finish` deletes all steps, and the folder if nothing else is in
        it. `Model.fit` calls it when it has trained to its last epoch, or an `EarlyStopping` has
        ended it; the end of a `with` block calls it unless by an exception or after a run that was
        stopped. With a loss of nan or inf the steps stay.

    Raises:
      BlockingIOError: another process saves into the folder.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        keep: int | None = 2,
        monitor: str | None = None,
        mode: str = "auto",
        keep_best: int | None = None,
        save_best_only: bool = False,
        initial_value_threshold: float | None = None,
        save_freq: int | str = "epoch",
        name: str | None = None,
        verbose: int = 0,
        asynchronous: bool = True,
        on_error: str = "raise",
        delete_checkpoint: bool = False,
    ) -> None:
        self._retention = Retention(
            keep, keep_best, monitor, mode, save_best_only, initial_value_threshold
        )
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error must be 'raise' or 'warn', got {on_error!r}.")
        self._save_freq, self._verbose = SaveFreq(save_freq, of_best=save_best_only), verbose
        self._name = StepName(name)
        self.output_dir: Path = _folder.of_run(output_dir)
        self.on_error = on_error
        self._deletes, self._is_unfinished = delete_checkpoint, False
        self.asynchronous: bool = asynchronous and not (3, 12) <= sys.version_info < (3, 12, 2)
        self._writer: StepWriter | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._saving: Future[None] | None = None
        self._loop: Any = lambda: None
        self.last_saved: int | None = None
        """The last step known to be on disk."""
        self.saved_revision: tuple[int, ...] | None = None
        """The `revision` of the loop at that step, if the loop called this writer."""
        self._found: list[int] = from_main("the folder of checkpoints", self._open)

    def _open(self) -> list[int]:
        """Makes and locks the folder; returns its steps."""
        _folder.make(self.output_dir)
        with _turn:
            self._take_turn()
            _folder.tidy(self.output_dir)
        return _folder.steps(self.output_dir)

    borrows = True
    """It copies the arrays that it writes in the background."""

    order = "last"
    """It saves the checkpoint that the other callbacks return."""

    def attach(self, loop: Any) -> None:
        """Attaches to a loop: saves its callbacks' states, too."""
        self._loop, self.last_saved, self.saved_revision = weakref.ref(loop), None, None
        self._is_unfinished = False
        self._retention.attach(loop, self)
        self._name.attach(loop, self)
        self._save_freq.attach(loop, self)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Saves a checkpoint and returns it."""
        self.wait()
        is_finite = math.isfinite(checkpoint.metrics.get("loss", 0.0))
        self._is_unfinished = checkpoint.stop or not is_finite
        if from_main("a choice", lambda: self._retention.is_wanted(self.output_dir, checkpoint)):
            self._save(checkpoint, revision=getattr(self._loop(), "revision", None))
        return checkpoint

    def save(
        self,
        checkpoint: Checkpoint,
        *,
        history: Json = None,
        callback_states: Mapping[str, Json] | None = None,
    ) -> Path:
        """Saves a checkpoint with a history and states of callbacks.

        >>> path = save.save(Checkpoint(step=5, state=state, metrics={"loss": 0.2}))

        Args:
          checkpoint: what to save.
          history: the metrics of the run so far; JSON. None: the metrics of a `History` among the
            callbacks of the loop.
          callback_states: the states of callbacks by name; JSON. None: the states of the
            loop's callbacks.

        Returns:
          The folder of the step, which exists once the save is complete.
        """
        return self._save(checkpoint, history, callback_states)

    def _save(
        self,
        checkpoint: Checkpoint,
        history: Json = None,
        callback_states: Mapping[str, Json] | None = None,
        *,
        revision: tuple[int, ...] | None = None,
    ) -> Path:
        self.wait()
        loop = self._loop()
        if checkpoint.is_borrowed and loop is not None:
            checkpoint = loop.owned(checkpoint)
        step = int(checkpoint.step)
        path = self.output_dir / self._name(checkpoint)
        old = _folder.step_path(self.output_dir, step)
        if self.last_saved == step:  # The step on disk may have other content.
            self.last_saved = self.saved_revision = None
        self._retention.look(checkpoint)
        states, state_arrays = collect(getattr(loop, "callbacks", ()))
        metrics = states.pop("History", None)
        arrays, record = contents(
            checkpoint,
            metrics if history is None else history,
            states if callback_states is None else callback_states,
            state_arrays,
            self._retention.monitor,
        )
        if from_main("a save", lambda: holds(old, record)):
            self.last_saved, self.saved_revision = step, revision
            return old
        if self._verbose:
            say(f"step {step:,} is saved as {path}")
        with _turn:
            self._begin(path, arrays, record, revision)
        if not self.asynchronous or checkpoint.is_borrowed:
            self.wait()  # The next step donates borrowed arrays.
        return path

    def wait(self) -> None:
        """Waits until the last save is on disk.

        >>> save.wait()

        Raises:
          RuntimeError: it failed, and `on_error` is "raise"; earlier steps are unchanged.
        """
        if self._saving is not None:
            wait([self._saving])  # If this is interrupted, `_saving` stays set.
            saving, self._saving = self._saving, None
            if (error := saving.exception()) is not None:
                self._fail(error)

    def close(self) -> None:
        """Waits for the last save, as `wait` does, and ends the background threads.

        A closed writer may be used again.
        """
        try:
            self.wait()
        finally:
            writer, executor = self._writer, self._executor
            self._writer = self._executor = self._lock = None
            _end.open_writers.discard(self)
            if writer is not None:
                writer.close()
            if executor is not None:
                executor.shutdown()

    def finish(self, *, succeeded: bool = True) -> None:
        """Ends a run: closes, and with `delete_checkpoint` deletes its steps if it succeeded.

        >>> save.finish()
        """
        self._is_unfinished = not succeeded
        try:
            self.wait()
            if self._deletes and succeeded:
                with _turn:
                    from_main("the end of a run", self._delete)
                self.last_saved = self.saved_revision = None
        finally:
            self.close()

    def _delete(self) -> None:
        if self.output_dir.is_dir():
            self._take_turn()
            _folder.remove(self.output_dir)

    def __enter__(self) -> "CheckpointFileWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        is_stopped = self._is_unfinished or getattr(self._loop(), "stopped", False)
        self.finish(succeeded=not is_stopped) if kind is None else self.close()

    def _take_turn(self) -> None:
        """Waits for the other writers of the folder, and locks it."""
        _end.wait_for_others(self.output_dir, self)
        self._lock = _lock.hold(self.output_dir)

    def _begin(
        self,
        path: Path,
        arrays: Mapping[str, Array],
        record: Record,
        revision: tuple[int, ...] | None,
    ) -> None:
        """Starts a save, and submits its completion to the background thread."""
        _end.close_at_end(self)
        self._writer = self._writer or StepWriter()
        self._executor = self._executor or ThreadPoolExecutor(1, "flaxfit-save")
        try:
            place = Path(from_main("the start of a save", lambda: self._prepare(record["step"])))
        except BlockingIOError:
            raise
        except Exception as error:
            self._tidy()
            self._fail(cannot_save(self.output_dir, record["step"], arrays, error))
            return
        save = StepSave(self._writer, place, path, arrays, record)
        self._saving = self._executor.submit(self._finish, save, revision)
        if save.failure is not None:
            self.wait()

    def _prepare(self, step: int) -> str:
        """Makes the temporary folder of a step for all processes; returns its path."""
        _folder.make(self.output_dir)
        self._take_turn()
        return str(_folder.begin(self.output_dir, step))

    def _fail(self, error: BaseException) -> None:
        if self.on_error == "raise":
            raise error
        say(f"{error}\nThe run continues without this checkpoint.")

    def _finish(self, save: StepSave, revision: tuple[int, ...] | None) -> None:
        """Finishes a save in the background, and deletes the steps that it replaces."""
        step = save.step
        try:
            save.finish()
        except Exception as error:
            self._tidy()
            raise cannot_save(self.output_dir, step, save.arrays, error) from error
        self.last_saved, self.saved_revision = step, revision
        if is_main():
            _folder.tidy(self.output_dir)
            found, self._found = self._found, []
            supersede(self.output_dir, step, found)
            self._retention.delete_old(self.output_dir, step)

    def _tidy(self) -> None:
        if is_main():
            _folder.tidy(self.output_dir)
