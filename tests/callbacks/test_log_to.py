"""LogTo: any logger is handed the numbers, and none of its failures stops training."""

import errno
import io
import sys

import jax
import numpy as np
import pytest
from loops import make_weight_loop

from flaxfit.callbacks import (
    CSVLogger,
    JSONLogger,
    LogTo,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)


class Recorder:
    def __init__(self, fails_at=(), error=ConnectionError):
        self.rows, self.n_closed, self._fails_at, self._error = [], 0, fails_at, error

    def log(self, step, values):
        if step in self._fails_at:
            raise self._error
        self.rows.append((step, dict(values)))

    def close(self):
        self.n_closed += 1
        if "close" in self._fails_at:
            raise self._error


@pytest.mark.parametrize("fails_at", [(), (1, 2, "close")])
def test_a_logger_gets_what_the_user_sees_also_after_it_has_failed(capsys, fails_at):
    recorder = Recorder(fails_at)
    checkpoints = list(make_weight_loop([LogTo(recorder)]))
    assert len(checkpoints) == 3 and recorder.n_closed == 1
    assert recorder.rows == [(c.step, c.scalars) for c in checkpoints if c.step not in fails_at]
    assert capsys.readouterr().err.count("Recorder failed") == bool(fails_at)


def test_of_several_processes_only_the_first_logs(checkpoint_at, tmp_path, monkeypatch):
    recorder, path = Recorder(), tmp_path / "log.csv"
    loggers = LogTo(recorder), CSVLogger(path), JSONLogger(tmp_path / "log.jsonl")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    for log in loggers:
        log(checkpoint_at(1, loss=0.5))
    assert not recorder.rows and not [*tmp_path.iterdir()]
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    for log in loggers:
        log(checkpoint_at(1, loss=0.5))
        log.close()
    assert len(recorder.rows) == 1 and len([*tmp_path.iterdir()]) == 2


def test_arrays_among_the_metrics_are_not_logged_and_ctrl_c_is_no_failure(checkpoint_at):
    recorder = Recorder(fails_at=(2,), error=KeyboardInterrupt)
    log = LogTo(recorder)
    log(checkpoint_at(1, loss=0.5, confusion=np.eye(2)))
    assert recorder.rows == [(1, {"loss": 0.5})]
    with pytest.raises(KeyboardInterrupt):
        log(checkpoint_at(2, loss=0.5))


def test_something_that_is_no_logger_is_refused():
    with pytest.raises(TypeError, match="StringIO has no log"):
        LogTo(io.StringIO())


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger])
def test_a_full_disk_is_reported_once_and_no_row_is_garbled(kind, checkpoint_at, tmp_path, capsys):
    log = kind(tmp_path / "log")
    log(checkpoint_at(1, loss=0.5))

    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    intact, log._file = log._file, Full()
    for step in (2, 3):
        assert log(checkpoint_at(step, loss=0.5)).step == step
        log._file = Full() if step == 2 else log._file
    intact.close()
    log(checkpoint_at(4, loss=0.25))
    log.close()
    assert capsys.readouterr().err.count("No space left") == 1
    text = (tmp_path / "log").read_text()
    assert len(text.splitlines()) == (3 if kind is CSVLogger else 2) and "0.25" in text


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("tensorboardX", "tensorboard", lambda: TensorBoardLogger("runs")),
        ("wandb", "wandb", WandbLogger),
        ("mlflow", "mlflow", MLflowLogger),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package, extra, make, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'needs {package}: pip install "flaxfit\[{extra}\]"'):
        make()
