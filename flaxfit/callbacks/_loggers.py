"""CSVLogger and JSONLogger: write the metrics of each checkpoint as a row of a file."""

import contextlib
import csv
import io
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from flaxfit.callbacks._epochs import Epochs
from flaxfit.callbacks._log_to import Attempt
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint
from flaxfit.tree import Json, local_path


class _RowLogger(ABC):
    """Base class of loggers that append a row of text to a file at each checkpoint."""

    borrows = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = local_path(path)
        self._file: TextIO | None = None
        self._step = 0
        self._epochs = Epochs()
        self._is_begun = False
        """Whether this run has written to the file."""
        self._attempt = Attempt(type(self).__name__, OSError)

    def attach(self, loop: TrainLoop) -> None:
        """Begins a run, and counts its epochs."""
        self.close()
        self._is_begun = False
        self._epochs.attach(loop)

    @abstractmethod
    def _earlier(self, lines: list[str], row: Mapping[str, float]) -> str:
        """Returns the earlier lines of the file, up to the step of `row`."""

    @abstractmethod
    def _line(self, row: Mapping[str, float]) -> str: ...

    def _has_room(self, row: Mapping[str, float]) -> bool:
        """Returns whether the row can be appended without rewriting earlier rows."""
        return row["step"] > self._step

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        row: dict[str, float] = {"epoch": self._epochs.number} if self._epochs.is_of_fit else {}
        row |= {"step": checkpoint.step, "elapsed_time": checkpoint.elapsed_time}
        row |= {name: float(value) for name, value in checkpoint.scalars.items()}
        self._attempt(self._write, row)
        return checkpoint

    def get_state(self) -> dict[str, Json]:
        """Returns what a resumed run needs: the count of its epochs."""
        return self._epochs.get_state()

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Continues the rows of the resumed run."""
        self._epochs.set_state(state)
        self._is_begun = True

    def close(self) -> None:
        """Closes the file; a later checkpoint opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, row: Mapping[str, float]) -> None:
        if self._file is None or not self._has_room(row):
            self.close()
            replace_text(self._path, self._earlier(_whole_lines(self._path), row))
            self._file = self._path.open("a", encoding="utf-8", newline="")
            self._is_begun = True
        try:
            self._file.write(self._line(row))
            self._file.flush()
        except OSError:
            # The next row reopens the file after its last complete line.
            with contextlib.suppress(OSError):
                self.close()
            raise
        self._step = int(row["step"])


class CSVLogger(_RowLogger):
    """Writes the step, the training seconds and the metrics of each checkpoint as a row of CSV.

    In `fit` the first column is `epoch`, from 0 as in Keras. Rows are flushed at each checkpoint; a
    full disk is reported once and does not stop training. A metric that appears later adds a
    column. The file, and its folder, are made at the first checkpoint. An existing file keeps its
    rows of earlier steps; rows from the current step on, and a last row that a killed process left
    unfinished, are dropped. So a resumed run leaves one row per step, and a run from scratch only
    its own.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.csv"
    >>> log = CSVLogger(path)
    >>> for step in 1, 2:
    ...     checkpoint = log(Checkpoint(step=step, state=None, metrics={"loss": 1 / step}))
    >>> log.close()
    >>> print(path.read_text())
    step,elapsed_time,loss
    1,0.0,1.0
    2,0.0,0.5

    Args:
      path: the file.
      separator: the character between two columns.
      append: True keeps all rows of an existing file, and raises an error if it has other columns;
        False overwrites it; None, the default, keeps the rows of earlier steps. A resumed run
        always continues after its own rows.
      filename: Keras's name for `path`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "",
        separator: str = ",",
        append: bool | None = None,
        *,
        filename: str | os.PathLike[str] = "",
    ) -> None:
        if bool(path) == bool(filename):
            raise TypeError("CSVLogger needs one path: pass it first or as filename=, not both.")
        super().__init__(path or filename)
        self._append = append
        if not isinstance(separator, str) or len(separator) != 1:
            raise ValueError(f"separator must be a single character, got {separator!r}.")
        self._separator = separator
        self._columns: tuple[str, ...] = ()

    def _has_room(self, row: Mapping[str, float]) -> bool:
        return super()._has_room(row) and row.keys() <= set(self._columns)

    def _earlier(self, lines: list[str], row: Mapping[str, float]) -> str:
        reader = csv.DictReader(lines, delimiter=self._separator)
        columns = list(reader.fieldnames or ())
        if columns and "step" not in columns:
            raise ValueError(
                f"CSVLogger cannot continue {self._path}: it has no column 'step' but "
                f"{', '.join(columns)}. Choose another path."
            )
        rows = list(reader)
        if self._is_begun or self._append is None:
            while rows and int(rows[-1]["step"]) >= row["step"]:
                del rows[-1]
        elif not self._append:
            rows = []
        elif rows:
            self._check_columns(columns, row)
        self._columns = tuple(dict.fromkeys([*(columns if rows else ()), *row]))
        header = dict(zip(self._columns, self._columns, strict=True))
        return self._text([header, *rows])

    def _check_columns(self, columns: list[str], row: Mapping[str, float]) -> None:
        added = [name for name in row if name not in columns]
        # Validation may be due at a later epoch.
        lost = [name for name in columns if name not in row and not name.startswith("val_")]
        if added or lost:
            raise ValueError(
                f"CSVLogger cannot append to {self._path}, whose columns differ from this "
                f"run's: it has {', '.join(columns)}; the run has {', '.join(row)}. Choose another "
                "path, or append=False, which overwrites the file."
            )

    def _line(self, row: Mapping[str, float]) -> str:
        return self._text([row])

    def _text(self, rows: Iterable[Mapping[str, str | float]]) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(
            text, self._columns, restval="", lineterminator="\n", delimiter=self._separator
        )
        writer.writerows(rows)
        return text.getvalue()


class JSONLogger(_RowLogger):
    """Writes the step, the training seconds and the metrics of each checkpoint as a line of JSON.

    In `fit` it begins with the epoch. A value that is not finite is null. Rows are flushed at each
    checkpoint; a file that exists is continued as by `CSVLogger`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> log = JSONLogger(path)
    >>> checkpoint = log(Checkpoint(step=1, state=None, metrics={"loss": float("nan")}))
    >>> log.close()
    >>> print(path.read_text())
    {"step": 1, "elapsed_time": 0.0, "loss": null}

    Args:
      path: the file.
    """

    def _earlier(self, lines: list[str], row: Mapping[str, float]) -> str:
        return "".join(line for line in lines if self._step_of(line) < row["step"])

    def _step_of(self, line: str) -> int:
        try:
            return json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"JSONLogger cannot continue {self._path}: its line {line.strip()!r:.60} "
                "has no 'step'. Choose another path."
            ) from None

    def _line(self, row: Mapping[str, float]) -> str:
        values = {name: value if math.isfinite(value) else None for name, value in row.items()}
        return json.dumps(values) + "\n"


def _whole_lines(path: Path) -> list[str]:
    """Returns the complete lines of a file, without one that a kill has cut off."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically: a kill leaves the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)
