"""CheckpointFileWriter: a callback that saves each checkpoint, in the background by default."""

import functools
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from flaxfit.checkpoints import _end, _file, _folder, _lock
from flaxfit.checkpoints._clear import delete_old, set_later_aside
from flaxfit.checkpoints._failure import cannot_save, tell_all
from flaxfit.checkpoints._file import with_digests
from flaxfit.checkpoints._orbax import StepWriter, savable, write_record
from flaxfit.checkpoints._record import read_record
from flaxfit.checkpoints._seal import Damaged
from flaxfit.display import say
from flaxfit.distributed._processes import from_main, is_main
from flaxfit.metrics._monitor import Monitor, check_mode
from flaxfit.state._callback_states import collect
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._types import Json, PyTree

_turn = threading.Lock()


class CheckpointFileWriter:
    """Saves each checkpoint that it is called with, and returns it untouched.

    A save is complete or absent: a kill at any instant leaves every earlier step as it was.
    Arrays are written in the background, as they are at the call, whatever is done to them
    after it; `close` waits for that, and so does the end of the process. Whatever fails in the
    background is raised by the next call or by `close`; at the end of the process it is printed,
    and the exit code is `ExitCode.UNSAVED`. Writers of one process take turns at a folder; while
    a process has one, no other process can make one for that folder.

    In the `callbacks` of a loop it saves what all other callbacks have made of a checkpoint,
    wherever it stands among them, and beside it what they remember (those with `get_state` and
    `set_state`) and what `history.append` has gathered: a loop that resumes from it, with a
    `CheckpointFileReader` and the same callbacks, ends as if it had never been interrupted.

    Saving a step that the folder holds already does nothing if the content is the same, and
    replaces it otherwise. A run that starts again at an earlier step sets the later steps of the
    run before it aside (`superseded-<step>-<n>`) with its first save, and says so.

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
      output_dir: the folder of the run; made when it does not exist.
      keep: how many of the last steps are kept; None keeps all. Must be at least 1.
      monitor: a metric whose best step is kept as well; among equals, the last is the best.
      mode: "min", "max", or "auto", which knows the metrics and losses of flaxfit and the losses
        of Optax; other metrics need "min" or "max".
      asynchronous: whether to write in the background. Python 3.12.0 and 3.12.1 cannot end
        background work when a process ends, so there it is never done.
      on_error: what a save that fails (a full disk) does: "raise" an error, or "warn" and let the
        run go on without it. The next checkpoint is tried again.

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
        asynchronous: bool = True,
        on_error: str = "raise",
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"Cannot keep {keep} checkpoints: keep must be at least 1, or None.")
        check_mode(mode)
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error must be 'raise' or 'warn', got {on_error!r}.")
        self.output_dir = _folder.absolute(output_dir)
        self.keep = keep
        self.on_error = on_error
        self._monitor = None if monitor is None else Monitor(monitor, mode, "CheckpointFileWriter")
        self.monitor: dict[str, str] | None = None
        """The metric whose best step is kept and its mode, known with the first checkpoint."""
        self.asynchronous = asynchronous and not (3, 12) <= sys.version_info < (3, 12, 2)
        self._writer: StepWriter | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._saving: Future[None] | None = None
        self._loop: Any = lambda: None
        self.last_saved: int | None = None
        """The last step of which it is known that it is on disk."""
        self.saved_revision: Any = None
        """The `revision` of the loop whose checkpoint that was, where it was called with it."""
        self._found: list[int] = from_main("the folder of checkpoints", self._open)

    def _open(self) -> list[int]:
        """Makes and locks the folder, and tells which steps it holds."""
        if self.output_dir.is_file():
            raise NotADirectoryError(
                f"Checkpoints go into a folder, and {self.output_dir} is a file: name another path."
            )
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"Cannot make the folder of checkpoints ({error.strerror}): name another path",
                str(self.output_dir),
            ) from error
        with _turn:
            self._take_turn()
            _folder.tidy(self.output_dir)
        return _folder.steps(self.output_dir)

    borrows = True
    """It copies what it writes in the background."""

    order = "last"
    """It saves what the other callbacks have made of a checkpoint."""

    def attach(self, loop: Any) -> None:
        """Saves, from here on, what the callbacks of a loop remember."""
        self._loop, self.last_saved, self.saved_revision = weakref.ref(loop), None, None
        if self._monitor is not None:
            self._monitor.attach(loop, self)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Saves a checkpoint and returns it."""
        self._save(checkpoint, revision=getattr(self._loop(), "revision", None))
        return checkpoint

    def save(
        self,
        checkpoint: Checkpoint,
        *,
        history: Json = None,
        callback_states: Mapping[str, Json] | None = None,
    ) -> Path:
        """Saves a checkpoint and, beside it, what else a run needs to go on.

        Args:
          checkpoint: what to save.
          history: the metrics of the run so far; JSON. None: what a `History` among the callbacks
            of the loop has gathered.
          callback_states: what callbacks remember, by their names; JSON. None: what those of the
            loop do.

        Returns:
          The folder of the step, which is there once the save is complete.
        """
        return self._save(checkpoint, history, callback_states)

    def _save(
        self,
        checkpoint: Checkpoint,
        history: Json = None,
        callback_states: Mapping[str, Json] | None = None,
        *,
        revision: Any = None,
    ) -> Path:
        self.wait()
        loop = self._loop()
        if checkpoint.is_borrowed and loop is not None:
            checkpoint = loop.owned(checkpoint)
        step = int(checkpoint.step)
        path = _folder.step_path(self.output_dir, step)
        if self.last_saved == step:  # What is on disk may not be this.
            self.last_saved = self.saved_revision = None
        self._check_monitor(checkpoint)
        states, kept = collect(getattr(loop, "callbacks", ()))
        gathered = states.pop("History", None)
        arrays, record = _file.contents(
            checkpoint,
            gathered if history is None else history,
            states if callback_states is None else callback_states,
            self.monitor,
            kept,
        )
        if from_main("a save", lambda: self._holds(step, record)):
            self.last_saved, self.saved_revision = step, revision
            return path
        with _turn:
            self._begin(step, arrays, record, revision)
        if not self.asynchronous or checkpoint.is_borrowed:
            self.wait()  # The next step uses up what is borrowed.
        return path

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          RuntimeError: it failed, and `on_error` is "raise"; the steps before it are as they were.
        """
        if self._saving is not None:
            wait([self._saving])  # If this is interrupted, the save is still known.
            saving, self._saving = self._saving, None
            if (error := saving.exception()) is not None:
                self._fail(error)

    def close(self) -> None:
        """Waits for the last save, as `wait`, and ends the background threads.

        A closed writer may be used again.
        """
        try:
            self.wait()
        finally:
            writer, executor = self._writer, self._executor
            self._writer = self._executor = self._lock = None
            _end.let_go(self)
            if writer is not None:
                writer.close()
            if executor is not None:
                executor.shutdown()

    def __enter__(self) -> "CheckpointFileWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take_turn(self) -> None:
        """Waits for the other writers of the folder; their failures stay theirs."""
        _end.wait_for_others(self.output_dir, self)
        self._lock = _lock.hold(self.output_dir)

    def _begin(
        self, step: int, arrays: Mapping[str, PyTree], record: Mapping[str, Json], revision: Any
    ) -> None:
        """Has copied what may change, and the rest done in the background.

        Orbax's own beginning, too, where it can: else the caller waits for the threads that it
        starts, which are at work at once.
        """
        writer, executor = self._start()
        try:
            place = Path(from_main("the start of a save", lambda: self._prepare(step)))
        except BlockingIOError:
            raise
        except Exception as error:
            self._tidy()
            failure = cannot_save(self.output_dir, step, arrays, error)
            failure.__cause__ = error
            self._fail(failure)
            return
        arrays = {name: savable(array) for name, array in arrays.items()}
        is_kept, failure = _file.is_kept(record), None
        if not is_kept:
            try:
                writer.start(place, arrays)
            except Exception as error:
                failure = error  # The other processes are to hear of it.
        finish = functools.partial(
            self._finish, writer, place, arrays, record, revision, is_kept, failure
        )
        self._saving = executor.submit(finish)
        if failure is not None:
            self.wait()

    def _prepare(self, step: int) -> str:
        """Makes the place for a step, which another process may be told of."""
        # Were it to find out by itself, Orbax would leave threads that wait for minutes.
        _folder.make(self.output_dir)
        self._take_turn()
        return str(_folder.begin(self.output_dir, step))

    def _fail(self, error: BaseException) -> None:
        if self.on_error == "raise":
            raise error
        say(f"{error}\nThe run goes on without this checkpoint.")

    def _start(self) -> tuple[StepWriter, ThreadPoolExecutor]:
        _end.close_at_end(self)
        self._writer = self._writer or StepWriter()
        self._executor = self._executor or ThreadPoolExecutor(1, "flaxfit-save")
        return self._writer, self._executor

    def _check_monitor(self, checkpoint: Checkpoint) -> None:
        if self._monitor is None:
            return
        self.monitor = {"name": self._monitor.name, "mode": self._monitor.resolve(checkpoint.modes)}
        if self._monitor.name not in checkpoint.metrics:
            say(
                f"the checkpoint of step {checkpoint.step} lacks the monitored metric "
                f"{self._monitor.name!r} (it holds {', '.join(checkpoint.metrics) or 'none'}): "
                "it cannot be the best"
            )

    def _holds(self, step: int, record: Mapping[str, Json]) -> bool:
        """Whether a step on disk has this record, and by its digests the same arrays."""
        path = _folder.step_path(self.output_dir, step)
        try:
            return path.exists() and read_record(path) == with_digests(record)
        except Damaged:
            return False

    def _finish(
        self,
        writer: StepWriter,
        place: Path,
        arrays: Mapping[str, PyTree],
        record: Mapping[str, Json],
        revision: Any,
        is_kept: bool,
        failure: Exception | None,
    ) -> None:
        step = record["step"]
        # With the folder, as each writer has a thread of its own, and these may change places.
        topic = f"in {place.parent}"
        try:
            try:
                if is_kept:
                    writer.start(place, _file.kept(arrays, record))
                writer.wait()  # First: this thread's own work would hold up the one that trains.
                record = with_digests(record)
            except Exception as error:
                failure = failure or error
            tell_all(topic, failure)
            from_main(f"the end of a save {topic}", lambda: self._complete(writer, place, record))
        except Exception as error:
            self._tidy()
            raise cannot_save(self.output_dir, step, arrays, error) from error
        self.last_saved, self.saved_revision = step, revision
        if is_main():
            self._clear(step)

    def _complete(self, writer: StepWriter, place: Path, record: Mapping[str, Json]) -> None:
        writer.finish(place)
        write_record(place, record)
        _folder.complete(self.output_dir, record["step"], place)

    def _tidy(self) -> None:
        if is_main():
            _folder.tidy(self.output_dir)

    def _clear(self, step: int) -> None:
        """Removes what a completed save has made superfluous."""
        _folder.tidy(self.output_dir)
        found, self._found = self._found, []
        set_later_aside(self.output_dir, step, found)
        if self.keep is not None:
            delete_old(self.output_dir, step, self.keep, self.monitor)
