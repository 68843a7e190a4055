"""WandbLogger: logs the metrics of each checkpoint to Weights & Biases."""

import secrets
from collections.abc import Mapping
from typing import Any

from flaxfit.callbacks._tracked_run import Run, TrackedRun
from flaxfit.tree import required


class WandbLogger(TrackedRun):
    """Logs the metrics of each checkpoint to a run of Weights & Biases.

    The run begins with the first checkpoint and is finished when training ends. A resumed `fit`
    continues the same run. An unreachable service never stops training.

    >>> import wandb
    >>> WandbLogger("digits", mode="offline").run is None
    True

    Args:
      project: the project of the run.
      config: the settings to record with the run.
      run_id: the id of a run to continue; None: a new run.
      **options: options of `wandb.init`, such as `name`, `entity`, `group`, `mode`, `dir`.

    Raises:
      ImportError: wandb is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        config: Mapping[str, object] | None = None,
        run_id: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(run_id or secrets.token_hex(4))
        self._init = required("WandbLogger", "wandb", "wandb").init
        self._options = {"project": project, "config": dict(config or {}), **options}

    @property
    def run(self) -> Run:
        """The run, between its first checkpoint and its end: for images, tables, artifacts."""
        return self._run

    def _begin(self) -> Run:
        run = self._init(id=self.run_id, resume="allow", **self._options)
        # The step is a metric of its own: a run may repeat steps, but wandb's counter only grows.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _send(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        run.log({"step": step, **values})

    def _end(self, run: Run) -> None:
        run.finish()
