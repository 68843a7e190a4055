"""MLflowLogger: the metrics of every checkpoint to MLflow."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from flaxfit.callbacks._log_to import Attempt
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._types import Json


class MLflowLogger:
    """Logs the metrics of every checkpoint to a run of MLflow.

    The run begins with the first checkpoint. When training ends it is FINISHED, FAILED after an
    exception, or KILLED after Ctrl-C. A resumed `fit` goes on with the same run. A store that
    cannot be reached never stops training.

    >>> import mlflow
    >>> MLflowLogger("digits", tracking_uri="sqlite:///runs.db").run_id is None
    True

    Args:
      experiment: the experiment of the run; made where there is none.
      run_name: what to call the run.
      params: what the run was given.
      tracking_uri: where the store is; None: where MLflow's settings say.
      run_id: of a run to go on with; None: a new one.

    Raises:
      ImportError: MLflow is not installed.
    """

    borrows = True
    """It only reads what a checkpoint holds."""

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
    ) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ImportError('MLflowLogger needs mlflow: pip install "flaxfit[mlflow]"') from error
        self._mlflow: Any = mlflow
        self._uri = tracking_uri
        self._experiment, self._run_name = experiment, run_name
        self._params = dict(params or {})
        self._attempt = Attempt("MLflowLogger")
        self._may_begin = True
        self._client: Any = None
        self.run_id = run_id
        """What the run is known by; None before it has begun."""

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint; its numbers are logged."""
        self._attempt(self.log, checkpoint.step, checkpoint.scalars)
        return checkpoint

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers of a step."""
        if self._client is None and self._may_begin:
            # Not tried again at each checkpoint, as it may wait for an answer for minutes.
            self._may_begin = False
            self._client = self._begin()
        if self._client is not None:
            now = int(1000 * time.time())
            entity = self._mlflow.entities.Metric
            metrics = [entity(_name(k), float(v), now, step) for k, v in values.items()]
            self._client.log_batch(self.run_id, metrics=metrics)

    def _begin(self) -> Any:
        """A client whose run is running."""
        client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        if self.run_id is not None:
            client.update_run(self.run_id, status="RUNNING")
            return client
        found = client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found else client.create_experiment(self._experiment)
        self.run_id = client.create_run(number, run_name=self._run_name).info.run_id
        for name, value in self._params.items():
            client.log_param(self.run_id, _name(name), value)
        return client

    def close(self) -> None:
        """Ends the run; a later checkpoint goes on with it."""
        if self._client is not None:
            client, self._client, self._may_begin = self._client, None, True
            error = sys.exception()
            is_killed = isinstance(error, KeyboardInterrupt | SystemExit)
            status = "FINISHED" if error is None else "KILLED" if is_killed else "FAILED"
            self._attempt(client.set_terminated, self.run_id, status)

    def get_state(self) -> dict[str, Json]:
        """What a resumed run needs, as plain JSON."""
        return {"run_id": self.run_id}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Puts back what `get_state` gave."""
        self.run_id = state["run_id"]


def _name(name: str) -> str:
    """The name in the characters that MLflow takes."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
