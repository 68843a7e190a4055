"""MLflowLogger: logs the metrics of each checkpoint to MLflow."""

import sys
import time
from collections.abc import Mapping

from flaxfit.callbacks._tracked_run import Run, TrackedRun
from flaxfit.tree import required


class MLflowLogger(TrackedRun):
    """Logs the metrics of each checkpoint to a run of MLflow.

    The run begins with the first checkpoint. When training ends it is FINISHED, FAILED after an
    exception, or KILLED after Ctrl-C. A resumed `fit` continues the same run. An unreachable store
    never stops training.

    >>> import mlflow
    >>> MLflowLogger("digits", tracking_uri="sqlite:///runs.db").run_id is None
    True

    Args:
      experiment: the experiment of the run; it is made if it does not exist.
      run_name: the name of the run.
      params: the settings to record with the run.
      tracking_uri: the address of the store; None: the one in MLflow's settings.
      run_id: the id of a run to continue; None: a new run.

    Raises:
      ImportError: MLflow is not installed.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        params: Mapping[str, object] | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__(run_id)
        self._mlflow = required("MLflowLogger", "mlflow", "mlflow")
        self._uri = tracking_uri
        self._experiment, self._run_name = experiment, run_name
        self._params = dict(params or {})

    def _begin(self) -> Run:
        client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        if self.run_id is not None:
            client.update_run(self.run_id, status="RUNNING")
            return client
        found = client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found else client.create_experiment(self._experiment)
        run = client.create_run(number, run_name=self._run_name)
        self.run_id: str | None = run.info.run_id
        for name, value in self._params.items():
            client.log_param(self.run_id, _respelled(name), value)
        return client

    def _send(self, client: Run, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metric = self._mlflow.entities.Metric
        metrics = [metric(_respelled(k), float(v), now, step) for k, v in values.items()]
        client.log_batch(self.run_id, metrics=metrics)

    def _end(self, client: Run) -> None:
        error = sys.exception()
        is_killed = isinstance(error, KeyboardInterrupt | SystemExit)
        status = "FINISHED" if error is None else "KILLED" if is_killed else "FAILED"
        client.set_terminated(self.run_id, status)


def _respelled(name: str) -> str:
    """Replaces the characters of a name that MLflow rejects."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
