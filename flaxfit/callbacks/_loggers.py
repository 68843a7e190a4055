"""CSVLogger and JSONLogger: the metrics of every checkpoint as a row of a file."""

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from flaxfit.callbacks._log_to import Attempt
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._checks import local_path
from flaxfit.tree._types import Json


class CSVLogger:
    """Writes the step, the training time and the metrics of every checkpoint as a row of CSV.

    Rows are flushed at each checkpoint; a disk that takes no more is reported once, and does not
    stop training. A metric that appears later adds a column. A file that
    exists is continued after its rows of earlier steps: rows from the present step on, and one
    that a killed process left unfinished, are dropped. So a resumed run leaves one row per step,
    and a run that starts from scratch leaves only its own.

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
    """

    borrows = True
    """It only reads what a checkpoint holds."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Names the file; it is made, with its folder, at the first checkpoint."""
        self._path = local_path(path)
        self._file: TextIO | None = None
        self._columns: list[str] = []
        self._step = 0
        self._attempt = Attempt("CSVLogger", OSError)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Writes a row."""
        self._attempt(self._write, _row(checkpoint))
        return checkpoint

    def _write(self, row: Mapping[str, Json]) -> None:
        is_ahead = row["step"] > self._step and row.keys() <= set(self._columns)
        if self._file is None or self._file.closed or not is_ahead:
            self._begin(row)
        if self._file is not None:
            _append(self._file, _csv_lines([row], self._columns))
        self._step = row["step"]

    def _begin(self, row: Mapping[str, Json]) -> None:
        """Opens the file behind the rows that stay, with a column for everything in the row."""
        self.close()
        reader = csv.DictReader(_whole_lines(self._path))
        columns = list(reader.fieldnames or ())
        if columns and "step" not in columns:
            raise ValueError(
                f"CSVLogger cannot continue {self._path}: it has no column 'step' but "
                f"{', '.join(columns)}. Choose another path."
            )
        rows = [earlier for earlier in reader if int(earlier["step"]) < row["step"]]
        self._columns = list(dict.fromkeys([*(columns if rows else ()), *row]))
        header = dict(zip(self._columns, self._columns, strict=True))
        self._file = _rewrite(self._path, _csv_lines([header, *rows], self._columns))

    def close(self) -> None:
        """Closes the file; a later checkpoint opens it again."""
        self._file = _closed(self._file)


class JSONLogger:
    """Writes the step, the training time and the metrics of every checkpoint as a line of JSON.

    A value that is not finite is null. Rows are flushed at each checkpoint; a file that exists
    is continued as by `CSVLogger`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> log = JSONLogger(path)
    >>> checkpoint = log(Checkpoint(step=1, state=None, metrics={"loss": float("nan")}))
    >>> log.close()
    >>> print(path.read_text())
    {"step": 1, "elapsed_time": 0.0, "loss": null}
    """

    borrows = True
    """It only reads what a checkpoint holds."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Names the file; it is made, with its folder, at the first checkpoint."""
        self._path = local_path(path)
        self._file: TextIO | None = None
        self._step = 0
        self._attempt = Attempt("JSONLogger", OSError)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Writes a line."""
        self._attempt(self._write, _row(checkpoint))
        return checkpoint

    def _write(self, row: Mapping[str, Json]) -> None:
        if self._file is None or self._file.closed or row["step"] <= self._step:
            self._begin(row["step"])
        if self._file is not None:
            values = {k: v if math.isfinite(v) else None for k, v in row.items()}
            _append(self._file, json.dumps(values) + "\n")
        self._step = row["step"]

    def _begin(self, step: int) -> None:
        """Opens the file behind the rows of earlier steps."""
        self.close()
        kept = []
        for line in _whole_lines(self._path):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or "step" not in row:
                raise ValueError(
                    f"JSONLogger cannot continue {self._path}: its line {line.strip()!r:.60} "
                    "has no 'step'. Choose another path."
                )
            if row["step"] < step:
                kept.append(line)
        self._file = _rewrite(self._path, "".join(kept))

    def close(self) -> None:
        """Closes the file; a later checkpoint opens it again."""
        self._file = _closed(self._file)


def _row(checkpoint: Checkpoint) -> dict[str, Json]:
    metrics = {name: float(value) for name, value in checkpoint.scalars.items()}
    return {"step": checkpoint.step, "elapsed_time": checkpoint.elapsed_time, **metrics}


def _csv_lines(rows: Iterable[Mapping[str, Any]], columns: list[str]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file, if it exists, without a last one that was not finished."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]


def _rewrite(path: Path, text: str) -> TextIO:
    """The file with a new beginning, open for more; never half-written on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)
    return path.open("a", encoding="utf-8", newline="")


def _append(file: TextIO, text: str) -> None:
    """Writes text to the disk; if that fails, closes the file, so that a later write opens it."""
    try:
        file.write(text)
        file.flush()
    except OSError:
        with contextlib.suppress(OSError):
            file.close()
        raise


def _closed(file: TextIO | None) -> None:
    if file is not None:
        file.close()
