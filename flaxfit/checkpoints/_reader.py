"""CheckpointFileReader: reads the newest, best or a given checkpoint; skips damaged ones."""

import functools
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flaxfit.checkpoints import _end, _file, _folder
from flaxfit.checkpoints._record import Record, read_record
from flaxfit.checkpoints._retention import intact_records, ranking
from flaxfit.checkpoints._seal import Damaged
from flaxfit.display import say, short_errors
from flaxfit.distributed import exchange, from_main
from flaxfit.state import InferenceState, TemplateOf, TrainState
from flaxfit.tree import PyTree


class _Gone(Exception):
    """A step was deleted after the folder was listed."""


class CheckpointFileReader:
    """Reads one checkpoint of a folder; `TrainLoop(init=...)` takes a reader to resume from it.

    It waits for the saves that writers of this process have started in the folder.

    Every array is compared with its saved digest. A damaged checkpoint is
    reported, renamed to `corrupt-<step>-<n>`, and the next one is read: the one before it, or
    the next best. If none is intact, or if only folders named like steps are left that hold no
    checkpoint, that is an error: a run never restarts silently. A step that is given by number has
    no substitute: its damage or absence is an error. So is an I/O error, after which it stays.

    >>> import tempfile
    >>> CheckpointFileReader(tempfile.mkdtemp()).read() is None
    True

    Args:
      folder: the folder of the run, as given to `CheckpointFileWriter`.
      target: for the loop, the model's `init` or a `TrainState`: it describes the state, and starts
        the run if the folder holds no checkpoint.
      which: "latest", "best" (by the metric that the writer monitored), or a step.
      strict: whether a damaged checkpoint is an error at once, and is not renamed.
    """

    takes_template_of = True
    """Whether `read` takes a `TemplateOf`; custom readers need not."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        target: PyTree = None,
        *,
        which: str | int = "latest",
        strict: bool = False,
    ) -> None:
        if isinstance(which, str) and which not in ("latest", "best"):
            raise ValueError(f"which must be 'latest', 'best' or a step, got {which!r}.")
        self.folder: Path = _folder.absolute(folder)
        self.target = target
        self.which = which if isinstance(which, str) else operator.index(which)
        self.strict = strict

    def read(
        self,
        template: _file.Template = None,
        *,
        partial: str | Sequence[str] | None = None,
    ) -> _file.CheckpointFile | None:
        """Reads the checkpoint; returns None if the folder holds none or does not exist.

        >>> import tempfile, numpy as np, optax
        >>> from flaxfit import Checkpoint
        >>> from flaxfit.checkpoints import save
        >>> state = TrainState.create(optax.identity(), {"params": {"w": np.ones(2)}})
        >>> folder = tempfile.mkdtemp()
        >>> path = save(folder, Checkpoint(step=7, state=state, metrics={}))
        >>> CheckpointFileReader(folder).read().step
        7

        Args:
          template: a state that says what to expect and where to put it; its leaves may be
            `jax.ShapeDtypeStruct`s, and dtypes are never changed. With an `InferenceState` only
            its fields are read. None: the reader's target, if it is a state; else optimizer states
            are returned as nested dicts.
          partial: as in `restore`.

        Raises:
          TypeError: the template is not a state.
          ValueError: the checkpoint does not match the template (every difference is listed), the
            step does not exist, or all checkpoints are damaged.
        """
        if template is None and isinstance(self.target, TrainState):
            template = self.target
        if not isinstance(template, TrainState | InferenceState | TemplateOf | None):
            raise TypeError(
                f"A checkpoint is read into a state, got {type(template).__name__}: "
                f"{template!r:.60}. Make one with flaxfit.init_state(init, optimizer, key, inputs)."
            )
        if partial is not None and template is None:
            raise ValueError("partial= needs a target whose other values are kept.")
        _end.wait_for_others(self.folder)
        from_main("the entries of a folder of checkpoints", self._report_foreign)
        try:
            return self._read(template, partial)
        except _Gone:  # Another process deleted the step after saving a newer one: list again.
            return self.read(template, partial=partial)

    def _read(
        self, template: _file.Template, partial: str | Sequence[str] | None
    ) -> _file.CheckpointFile | None:
        steps, damaged = from_main("the checkpoints of a folder", self._candidates)
        for step in steps:
            found, problem = None, None
            try:
                found = _file.read(_folder.step_path(self.folder, step), template, partial)
            except Damaged as error:
                problem = str(error)
            problems = exchange("reading a checkpoint", problem, seconds=3600)
            problem = next(filter(None, problems), None)
            if problem is None:
                return found
            reject = functools.partial(self._set_corrupt_aside, step, problem)
            name = from_main("a damaged checkpoint", reject)
            if name is None:
                raise _Gone
            damaged.append(name)
        set_aside = from_main("the damaged checkpoints of a folder", self._no_steps)
        damaged += [name for name in set_aside if name not in damaged]
        if damaged:
            raise ValueError(
                f"Cannot resume from {self.folder}: it holds no intact checkpoint, only "
                f"{', '.join(damaged)}. To start from scratch, move these away."
            )
        return None

    def _report_foreign(self) -> None:
        """Reports entries named like steps that hold none: a checkpoint may be lost."""
        names = ", ".join(path.name for path in _folder.foreign(self.folder))
        if names and self.strict:
            raise ValueError(f"{self.folder} contains entries that are not checkpoints: {names}.")
        if names:
            say(f"{self.folder} contains entries that are not checkpoints: {names}; not used")

    def _candidates(self) -> tuple[list[int], list[str]]:
        """Returns the steps to try, in order, and the names of damaged ones."""
        steps = _folder.steps(self.folder)
        if isinstance(self.which, int):
            if self.which not in steps:
                raise ValueError(
                    f"There is no checkpoint of step {self.which} in {self.folder}: it holds "
                    f"{', '.join(map(str, steps)) or 'none'}."
                )
            return [self.which], []
        if self.which == "latest":
            return steps[::-1], []
        records, damaged = {}, []
        for step in steps:
            try:
                records[step] = read_record(_folder.step_path(self.folder, step))
            except Damaged as error:
                damaged.append(self._set_corrupt_aside(step, str(error)))
        if None in damaged:
            raise _Gone
        return _ranked(self.folder, records), damaged

    def _set_corrupt_aside(self, step: int, problem: str) -> str | None:
        """Renames and reports a damaged step; returns its name, or None if it was deleted."""
        path = _folder.step_path(self.folder, step)
        if not path.exists():
            return None
        if self.strict or isinstance(self.which, int):
            raise ValueError(f"The checkpoint {path} is damaged: {problem}.")
        try:
            name = _folder.set_aside(self.folder, step, "corrupt").name
            what = f"is now {name}"
        except FileNotFoundError:
            return None
        except OSError as error:
            name, what = path.name, f"cannot be renamed ({error.strerror})"
        say(
            f"the checkpoint of step {step} in {self.folder} is damaged: {problem}; it is not "
            f"used, and {what}"
        )
        return name

    def _no_steps(self) -> list[str]:
        """Returns the names of entries that were, or may have been, checkpoints."""
        paths = _folder.aside(self.folder, "corrupt") + _folder.aside(self.folder, "replaced")
        return [path.name for path in (*paths, *_folder.foreign(self.folder))]


@short_errors
def restore(
    folder: str | os.PathLike[str],
    target: TrainState | InferenceState | None = None,
    *,
    which: str | int = "latest",
    partial: str | Sequence[str] | None = None,
    strict: bool = False,
) -> TrainState:
    """Reads the state of a checkpoint.

    >>> import tempfile, jax.numpy as jnp, optax
    >>> from flaxfit.step._init_state import init_state
    >>> from flaxfit.checkpoints import save
    >>> init = lambda rngs, x: {"params": {"w": jnp.ones(3)}}
    >>> state = init_state(init, optax.adam(0.1), 0, (jnp.ones(3),))
    >>> path = save(folder := tempfile.mkdtemp(), state)
    >>> restore(folder, state).params["w"]
    Array([1., 1., 1.], dtype=float32)

    Args:
      folder: the folder of the run.
      target: a state that says what to expect and where to put it, as in
        `CheckpointFileReader.read`. Without one, optimizer states are returned as nested dicts.
      which: "latest", "best" or a step.
      partial: patterns of the parameters (and of the model's other collections) to read from the
        file, for a warm start: they match whole "/"-joined paths within the model, such as
        "encoder/.*". The rest, with step, optimizer state and key, are the target's.
      strict: whether a damaged checkpoint is an error at once, and is not renamed.

    Raises:
      FileNotFoundError: the folder holds no checkpoint.
      ValueError: the checkpoint does not match the target or `partial`, or all are damaged.
    """
    reader = CheckpointFileReader(folder, which=which, strict=strict)
    found = reader.read(target, partial=partial)
    if found is None:
        raise nothing_in(reader.folder)
    return found.state


def nothing_in(folder: Path) -> FileNotFoundError:
    """Returns the error for a folder without a checkpoint, or for a file."""
    advice = " It is a file: load_weights reads weights." if folder.is_file() else ""
    return FileNotFoundError(f"There is no checkpoint in {folder}.{advice}")


def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Lists the steps in a folder, in order.

    >>> import tempfile
    >>> list_steps(tempfile.mkdtemp())
    []
    """
    path = _folder.absolute(folder)
    _end.wait_for_others(path)
    return _folder.steps(path)


def latest(folder: str | os.PathLike[str]) -> int | None:
    """Returns the last step in a folder, or None.

    >>> import tempfile
    >>> latest(tempfile.mkdtemp()) is None
    True
    """
    return next(reversed(list_steps(folder)), None)


def best(folder: str | os.PathLike[str]) -> int | None:
    """Returns the step with the best monitored metric (the last of ties), or None.

    >>> import tempfile
    >>> best(tempfile.mkdtemp()) is None
    True

    Raises:
      ValueError: there are checkpoints, but no metric was monitored.
    """
    path = _folder.absolute(folder)
    ranked = _ranked(path, intact_records(path, list_steps(path)))
    return next(iter(ranked), None)


def _ranked(folder: Path, records: Mapping[int, Record]) -> list[int]:
    """Ranks the steps, best first, by the newest record's monitored metric."""
    if not records:
        return []
    monitor = records[max(records)]["monitor"]
    if monitor is None:
        raise ValueError(
            f"There is no best checkpoint in {folder}: its writer monitored no metric. "
            'Pass monitor= to CheckpointFileWriter, or read which="latest".'
        )
    steps = ranking(records, monitor)
    if not steps:
        raise ValueError(
            f"There is no best checkpoint in {folder}: none of its steps has a finite value of "
            f'{monitor["name"]!r}. Read which="latest".'
        )
    return steps
