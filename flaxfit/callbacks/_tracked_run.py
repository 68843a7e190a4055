"""TrackedRun: a tracking service's run, from its first metrics to the end of training."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

from flaxfit.callbacks._log_to import Attempt
from flaxfit.state import Checkpoint
from flaxfit.tree import Json

Run: TypeAlias = Any
"""A run or a client of the service's library."""


class TrackedRun(ABC):
    """Base class of loggers to tracking services: opens a run, sends metrics, and ends it."""

    borrows = True

    def __init__(self, run_id: str | None) -> None:
        self._attempt = Attempt(type(self).__name__)
        self._may_begin = True
        self._run: Run = None
        self.run_id: str | None = run_id
        """The service's id of the run."""

    @abstractmethod
    def _begin(self) -> Run:
        """Opens a new run, or the run of a known id."""

    @abstractmethod
    def _send(self, run: Run, step: int, values: Mapping[str, float], /) -> None: ...

    @abstractmethod
    def _end(self, run: Run, /) -> None: ...

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        self._attempt(self.log, checkpoint.step, checkpoint.scalars)
        return checkpoint

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers of a step."""
        if self._run is None and self._may_begin:
            # Try only once: an unreachable service may take minutes to fail.
            self._may_begin = False
            self._run = self._begin()
        if self._run is not None:
            self._send(self._run, step, values)

    def close(self) -> None:
        """Ends the run; a later checkpoint continues it."""
        if self._run is not None:
            run, self._run, self._may_begin = self._run, None, True
            self._attempt(self._end, run)

    def get_state(self) -> dict[str, Json]:
        return {"run_id": self.run_id}

    def set_state(self, state: Mapping[str, Json]) -> None:
        self.run_id = state["run_id"]
