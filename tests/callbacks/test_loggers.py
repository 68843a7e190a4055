import contextlib
import csv
import json
import math

import flax.linen as nn
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit import Checkpoint
from flaxfit.callbacks import CSVLogger, JSONLogger, every


def rows_of(path):
    """The rows of a log as a reader of the format sees them."""
    with path.open(newline="") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file))
        return [json.loads(line) for line in file]


@pytest.fixture(params=[CSVLogger, JSONLogger])
def log_at(request):
    """Makes a logger of either kind and the path that it writes to."""
    loggers = []

    def make(folder, suffix={CSVLogger: ".csv", JSONLogger: ".jsonl"}[request.param]):
        path = folder / "runs" / f"log{suffix}"
        loggers.append(request.param(path))
        return loggers[-1], path

    yield make
    for logger in loggers:
        logger.close()


def steps_of(path):
    return [int(row["step"]) for row in rows_of(path)]


def test_a_row_is_on_the_disk_right_after_its_checkpoint(log_at, checkpoint_at, tmp_path):
    log, path = log_at(tmp_path)
    assert not path.parent.exists()
    for step in range(1, 4):
        checkpoint = checkpoint_at(step, loss=1 / step, elapsed_time=0.25)
        assert log(checkpoint) is checkpoint
        row = rows_of(path)[-1]
        assert (int(row["step"]), float(row["elapsed_time"])) == (step, 0.25)
        assert float(row["loss"]) == 1 / step


def test_a_resumed_run_leaves_one_row_per_step(log_at, checkpoint_at, tmp_path):
    first, path = log_at(tmp_path)
    for step in range(1, 6):
        first(checkpoint_at(step, loss=1.0))
    first.close()
    second, path = log_at(tmp_path)
    for step in range(4, 8):
        second(checkpoint_at(step, loss=2.0))
    assert steps_of(path) == [1, 2, 3, 4, 5, 6, 7]
    assert [float(row["loss"]) for row in rows_of(path)] == [1.0] * 3 + [2.0] * 4
    second(checkpoint_at(2, loss=2.0))  # The loop goes back.
    assert steps_of(path) == [1, 2]


def test_a_row_that_a_killed_process_left_unfinished_is_dropped(log_at, checkpoint_at, tmp_path):
    log, path = log_at(tmp_path)
    for step in (1, 2):
        log(checkpoint_at(step, loss=0.123456))
    log.close()
    path.write_text(path.read_text()[:-3])
    log(checkpoint_at(3, loss=1.0))
    assert steps_of(path) == [1, 3]


def test_close_twice_and_going_on_after_it_lose_nothing(log_at, checkpoint_at, tmp_path):
    log, path = log_at(tmp_path)
    log.close()
    for step in (1, 2):
        log(checkpoint_at(step, loss=1.0))
        log.close()
        log.close()
    assert steps_of(path) == [1, 2]
    assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_a_file_that_is_no_log_is_left_alone(log_at, checkpoint_at, tmp_path):
    log, path = log_at(tmp_path)
    path.parent.mkdir()
    path.write_text('{"name": "not a log"}\n')
    with pytest.raises(ValueError, match="cannot continue .* 'step'.*Choose another path"):
        log(checkpoint_at(1, loss=1.0))
    assert path.read_text() == '{"name": "not a log"}\n'


def logged(path, *rows, **options):
    """The steps in a file of CSV after checkpoints of these steps, with metrics if not a loss."""
    log = CSVLogger(path, **options)
    for row in rows:
        step, metrics = row if isinstance(row, tuple) else (row, {"loss": 0.5})
        log(Checkpoint(step=step, state=None, metrics=metrics))
    log.close()
    return steps_of(path)


def test_a_metric_that_appears_later_adds_a_column_and_a_resumed_run_keeps_their_order(tmp_path):
    path = tmp_path / "log.csv"
    logged(path, 1, (2, {"loss": 0.25, "val_loss": 0.75}), 3)
    logged(path, (4, {"val_loss": 1.0, "loss": 0.125}))
    assert path.read_text() == (
        "step,elapsed_time,loss,val_loss\n1,0.0,0.5,\n2,0.0,0.25,0.75\n3,0.0,0.5,\n"
        "4,0.0,0.125,1.0\n"
    )


def test_what_is_not_finite_is_null_in_json_and_readable_in_csv(checkpoint_at, tmp_path):
    checkpoint = checkpoint_at(1, loss=math.nan, bound=math.inf)
    for log in CSVLogger(tmp_path / "log.csv"), JSONLogger(tmp_path / "log.jsonl"):
        log(checkpoint)
        log.close()
    text = (tmp_path / "log.jsonl").read_text()
    assert text == '{"step": 1, "elapsed_time": 0.0, "loss": null, "bound": null}\n'
    row = rows_of(tmp_path / "log.csv")[0]
    assert math.isnan(float(row["loss"]))
    assert float(row["bound"]) == math.inf


def test_columns_are_separated_as_asked_also_where_a_file_is_continued(tmp_path):
    path = tmp_path / "log.csv"
    for step in 1, 2:
        with contextlib.closing(CSVLogger(path, separator=";")) as log:
            log(Checkpoint(step=step, state=None, metrics={"loss": 0.5}))
    assert path.read_text() == "step;elapsed_time;loss\n1;0.0;0.5\n2;0.0;0.5\n"
    with pytest.raises(ValueError, match="single character, got ';;'"):
        CSVLogger(path, ";;")


def test_append_keeps_all_rows_or_none_of_a_file_that_exists(tmp_path):
    path = tmp_path / "log.csv"
    assert logged(path, 1, 2, 3) == [1, 2, 3]
    assert logged(path, 1, 2, 3, 2, append=True) == [1, 2, 3, 1, 2]
    assert logged(path, 4, 5, append=False) == [4, 5]


def test_the_path_has_the_name_of_keras_too(tmp_path, checkpoint_at):
    with contextlib.closing(CSVLogger(filename=tmp_path / "log.csv")) as log:
        log(checkpoint_at(1, loss=0.5))
    assert (tmp_path / "log.csv").exists()
    for paths in {}, {"path": "a.csv", "filename": "b.csv"}:
        with pytest.raises(TypeError, match="CSVLogger needs one path"):
            CSVLogger(**paths)


def test_append_refuses_a_file_with_other_columns(tmp_path, checkpoint_at):
    path = tmp_path / "log.csv"
    for metrics in {"loss": 1.0, "val_loss": 2.0}, {"loss": 1.0}:  # Validated less often.
        logged(path, (1, metrics), append=True)
    before = path.read_text()
    for metrics in {"loss": 1.0, "mae": 2.0}, {"error": 1.0}:
        with pytest.raises(ValueError, match="cannot append to .* it has step, .* run has step, "):
            CSVLogger(path, append=True)(checkpoint_at(1, **metrics))
    assert path.read_text() == before


def fit(folder, model, epochs, callbacks, **options):
    x = np.ones((8, 1), np.float32)
    model.fit(x, x, 4, epochs, callbacks=callbacks, verbose=0, checkpoint_dir=folder, **options)


def make_model():
    return ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")


@pytest.mark.slow
@pytest.mark.parametrize("append", [None, True, False])
def test_rows_of_fit_have_their_epoch_also_when_it_is_resumed(tmp_path, append):
    path, model = tmp_path / "log.csv", make_model()
    fit(None, model, 2, [CSVLogger(path)])
    fit(tmp_path / "run", make_model(), 3, [CSVLogger(path, append=append)])
    fit(tmp_path / "run", make_model(), 5, [CSVLogger(path, append=append)], resume="auto")
    earlier = [(0, 2), (1, 4)] if append else []
    rows = [(int(row["epoch"]), int(row["step"])) for row in rows_of(path)]
    assert rows == [*earlier, (0, 2), (1, 4), (2, 6), (3, 8), (4, 10)]


@pytest.mark.slow
def test_epochs_are_those_of_keras_where_some_are_left_out_or_passed_over(log_at, tmp_path):
    log, path = log_at(tmp_path)
    fit(None, make_model(), 5, [every(4, log)], initial_epoch=1)
    assert [(int(row["epoch"]), int(row["step"])) for row in rows_of(path)] == [(2, 4), (4, 8)]


@pytest.mark.slow
def test_evaluate_writes_a_row_without_an_epoch(tmp_path):
    model, x = make_model(), np.ones((8, 1), np.float32)
    fit(None, model, 1, [])
    path = tmp_path / "log.csv"
    loss = model.evaluate(x, x, verbose=0, callbacks=[CSVLogger(path)])["loss"]
    assert rows_of(path) == [{"step": "2", "elapsed_time": "0.0", "loss": str(float(loss))}]
