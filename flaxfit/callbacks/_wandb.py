"""WandbLogger: the metrics of every checkpoint to Weights & Biases."""

import secrets
from collections.abc import Mapping
from typing import Any

from flaxfit.callbacks._log_to import Attempt
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._types import Json


class WandbLogger:
    """Logs the metrics of every checkpoint to a run of Weights & Biases.

    The run begins with the first checkpoint and is finished when training ends. A resumed `fit`
    goes on with the same run. A service that cannot be reached never stops training.

    >>> import wandb
    >>> WandbLogger("digits", mode="offline").run is None
    True

    Args:
      project: the project of the run.
      config: what the run was given.
      run_id: of a run to go on with; None: a new one.
      **options: those of `wandb.init`, such as `name`, `entity`, `group`, `mode`, `dir`.

    Raises:
      ImportError: wandb is not installed.
    """

    borrows = True
    """It only reads what a checkpoint holds."""

    def __init__(
        self,
        project: str | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        **options: Any,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError('WandbLogger needs wandb: pip install "flaxfit[wandb]"') from error
        self._init: Any = wandb.init
        self._options = {"project": project, "config": dict(config or {}), **options}
        self._attempt = Attempt("WandbLogger")
        self._may_begin = True
        self.run: Any = None
        """The run, between its first checkpoint and its end: for images, tables, artifacts."""
        self.run_id = run_id or secrets.token_hex(4)
        """What the run is known by."""

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint; its numbers are logged."""
        self._attempt(self.log, checkpoint.step, checkpoint.scalars)
        return checkpoint

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers of a step."""
        if self.run is None and self._may_begin:
            # Not tried again at each checkpoint, as it may wait for an answer for minutes.
            self._may_begin = False
            self.run = self._init(id=self.run_id, resume="allow", **self._options)
            # The step is a metric of its own: a run may go back, wandb's own counter cannot.
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")
        if self.run is not None:
            self.run.log({"step": step, **values})

    def close(self) -> None:
        """Finishes the run; a later checkpoint goes on with it."""
        if self.run is not None:
            run, self.run, self._may_begin = self.run, None, True
            self._attempt(run.finish)

    def get_state(self) -> dict[str, Json]:
        """What a resumed run needs, as plain JSON."""
        return {"run_id": self.run_id}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Puts back what `get_state` gave."""
        self.run_id = state["run_id"]
