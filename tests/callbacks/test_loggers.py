import csv
import json
import math

import pytest

from flaxfit.callbacks import CSVLogger, JSONLogger


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
    assert [int(row["step"]) for row in rows_of(path)] == [1, 2, 3, 4, 5, 6, 7]
    assert [float(row["loss"]) for row in rows_of(path)] == [1.0] * 3 + [2.0] * 4


def test_a_loop_that_goes_back_replaces_the_rows(log_at, checkpoint_at, tmp_path):
    log, path = log_at(tmp_path)
    for step in (1, 2, 3, 2):
        log(checkpoint_at(step, loss=1.0))
    assert [int(row["step"]) for row in rows_of(path)] == [1, 2]


def test_a_row_that_a_killed_process_left_unfinished_is_dropped(log_at, checkpoint_at, tmp_path):
    log, path = log_at(tmp_path)
    for step in (1, 2):
        log(checkpoint_at(step, loss=0.123456))
    log.close()
    path.write_text(path.read_text()[:-3])
    log(checkpoint_at(3, loss=1.0))
    assert [int(row["step"]) for row in rows_of(path)] == [1, 3]


def test_close_twice_and_going_on_after_it_lose_nothing(log_at, checkpoint_at, tmp_path):
    log, path = log_at(tmp_path)
    log.close()
    for step in (1, 2):
        log(checkpoint_at(step, loss=1.0))
        log.close()
        log.close()
    assert [int(row["step"]) for row in rows_of(path)] == [1, 2]
    assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_a_file_that_is_no_log_is_left_alone(log_at, checkpoint_at, tmp_path):
    log, path = log_at(tmp_path)
    path.parent.mkdir()
    path.write_text('{"name": "not a log"}\n')
    with pytest.raises(ValueError, match="cannot continue .* 'step'.*Choose another path"):
        log(checkpoint_at(1, loss=1.0))
    assert path.read_text() == '{"name": "not a log"}\n'


def test_a_metric_that_appears_later_adds_a_column_of_csv(checkpoint_at, tmp_path):
    log = CSVLogger(tmp_path / "log.csv")
    log(checkpoint_at(1, loss=1.0))
    log(checkpoint_at(2, loss=0.5, val_loss=0.75))
    log(checkpoint_at(3, loss=0.25))
    log.close()
    assert (tmp_path / "log.csv").read_text() == (
        "step,elapsed_time,loss,val_loss\n1,0.0,1.0,\n2,0.0,0.5,0.75\n3,0.0,0.25,\n"
    )


def test_a_resumed_csv_keeps_the_order_of_its_columns(checkpoint_at, tmp_path):
    log = CSVLogger(tmp_path / "log.csv")
    log(checkpoint_at(1, loss=1.0, accuracy=0.5))
    log.close()
    log = CSVLogger(tmp_path / "log.csv")
    log(checkpoint_at(2, accuracy=0.75, loss=0.5))
    log.close()
    assert (tmp_path / "log.csv").read_text().splitlines()[0] == "step,elapsed_time,loss,accuracy"
    assert (tmp_path / "log.csv").read_text().splitlines()[2] == "2,0.0,0.5,0.75"


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


def test_columns_are_separated_as_asked_also_where_a_file_is_continued(tmp_path, checkpoint_at):
    path = tmp_path / "log.csv"
    for step in 1, 2:
        log = CSVLogger(path, separator=";")
        log(checkpoint_at(step, loss=0.5))
        log.close()
    assert path.read_text() == "step;elapsed_time;loss\n1;0.0;0.5\n2;0.0;0.5\n"
    with pytest.raises(ValueError, match="single character, got ';;'"):
        CSVLogger(path, ";;")
