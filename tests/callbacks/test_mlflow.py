"""MLflowLogger with stores on this machine, read back with MLflow's own client."""

import os
from typing import Any

import pytest
from loops import make_weight_loop

from flaxfit.callbacks import MLflowLogger

mlflow: Any = None

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _mlflow():
    # Where these tests are run, as it takes seconds.
    global mlflow
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")


@pytest.fixture
def uri(tmp_path, monkeypatch):
    # Files take no migration of a database, which takes seconds.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "runs").as_uri()


def history(uri, log, name="loss"):
    found = mlflow.MlflowClient(tracking_uri=uri).get_metric_history(log.run_id, name)
    return [(metric.step, metric.value) for metric in found]


def run_of(uri, log):
    return mlflow.MlflowClient(tracking_uri=uri).get_run(log.run_id)


def test_the_metrics_of_the_run_are_those_of_the_checkpoints(uri):
    log = MLflowLogger("digits", run_name="first", params={"rate": 0.1}, tracking_uri=uri)
    checkpoints = list(make_weight_loop([log]))
    assert history(uri, log) == [(c.step, c.loss) for c in checkpoints]
    run = run_of(uri, log)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params == {"rate": "0.1"}
    assert set(run.data.metrics) == set(checkpoints[0].scalars)


@pytest.mark.slow
def test_a_database_takes_the_same(tmp_path):
    uri = f"sqlite:///{tmp_path}/runs.db"
    log = MLflowLogger("digits", tracking_uri=uri)
    checkpoints = list(make_weight_loop([log]))
    assert history(uri, log) == [(c.step, c.loss) for c in checkpoints]


def test_a_resumed_run_goes_on_in_the_same_run_with_names_that_mlflow_takes(uri, checkpoint_at):
    first, second = (MLflowLogger("digits", tracking_uri=uri) for _ in range(2))
    first(checkpoint_at(1, **{"loss": 1.0, "norm/a.*|b": 2.0}))
    first.close()
    second.set_state(first.get_state())
    second(checkpoint_at(2, loss=0.5))
    assert run_of(uri, second).info.status == "RUNNING"
    second.close()
    assert history(uri, first) == [(1, 1.0), (2, 0.5)]
    assert history(uri, first, "norm/a.__b") == [(1, 2.0)]


def test_how_training_ended_is_the_status_of_the_run(uri):
    for error, status in ((ZeroDivisionError, "FAILED"), (KeyboardInterrupt, "KILLED")):
        log = MLflowLogger("digits", tracking_uri=uri)
        with pytest.raises(error), make_weight_loop([log]) as loop:
            next(loop)
            raise error
        assert run_of(uri, log).info.status == status


def test_a_store_that_cannot_be_reached_does_not_stop_training(capsys):
    log = MLflowLogger("digits", tracking_uri="nowhere://at.all")
    assert len(list(make_weight_loop([log]))) == 3
    assert capsys.readouterr().err.count("MLflowLogger failed") == 1
