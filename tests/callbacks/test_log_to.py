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
    def __init__(self, fails_at=()):
        self.rows, self.n_closed, self._fails_at = [], 0, fails_at

    def log(self, step, values):
        if step in self._fails_at:
            raise ConnectionError("no route")
        self.rows.append((step, dict(values)))

    def close(self):
        self.n_closed += 1
        if "close" in self._fails_at:
            raise ConnectionError("no route")


def test_a_logger_is_handed_what_the_user_sees():
    recorder = Recorder()
    checkpoints = list(make_weight_loop([LogTo(recorder)]))
    assert recorder.rows == [(c.step, c.scalars) for c in checkpoints]
    assert len(recorder.rows) == 3 and recorder.n_closed == 1


def test_a_logger_that_fails_is_reported_once_and_tried_again(capsys):
    recorder = Recorder(fails_at=(1, 2, "close"))
    assert len(list(make_weight_loop([LogTo(recorder)]))) == 3
    assert [step for step, _ in recorder.rows] == [3]
    assert capsys.readouterr().err.count("Recorder failed") == 1


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


def test_arrays_among_the_metrics_are_not_logged(checkpoint_at):
    recorder = Recorder()
    LogTo(recorder)(checkpoint_at(1, loss=0.5, confusion=np.eye(2)))
    assert recorder.rows == [(1, {"loss": 0.5})]


def test_ctrl_c_in_a_logger_is_no_failure_of_it(checkpoint_at):
    class Interrupted(Recorder):
        def log(self, step, values):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LogTo(Interrupted())(checkpoint_at(1, loss=0.5))


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
