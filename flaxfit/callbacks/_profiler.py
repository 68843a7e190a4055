"""Profiler: writes a trace of the devices and the host during some steps."""

import functools
import os

import jax

from flaxfit.callbacks._log_to import Attempt
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint
from flaxfit.tree import local_path


class Profiler:
    """Writes a trace of the steps from `first` to `last` with JAX's profiler.

    View it with TensorBoard (and its plugin tensorboard-plugin-profile) or Perfetto.
    Steps that one dispatch takes together (`steps_per_call`) are traced together. Before and after
    these steps the loop waits for the devices once; no other step is slowed down. The first step
    would show compilation. If another trace is running already, that is reported and training
    continues.

    >>> profiler = Profiler("runs/digits", 10, 12)

    Args:
      folder: the folder to write to.
      first: the first step in the trace.
      last: the last step in the trace.
    """

    borrows = True

    def __init__(self, folder: str | os.PathLike[str], first: int = 10, last: int = 14) -> None:
        if not 1 <= first <= last:
            raise ValueError(f"Profiler needs 1 <= first <= last, got {first} and {last}.")
        self._folder = os.fspath(local_path(folder))
        self._first, self._last = first, last
        self._attempt = Attempt("Profiler")
        self._is_tracing = False

    def attach(self, loop: TrainLoop) -> None:
        """Starts to watch the steps of a loop."""
        loop.on.after_dispatch.append(functools.partial(self._watch, loop))
        self._watch(loop, loop.step)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint

    def close(self) -> None:
        """Ends a trace whose last step was not reached."""
        if self._is_tracing:
            self._is_tracing = False
            self._attempt(jax.profiler.stop_trace)

    def _watch(self, loop: TrainLoop, step: int) -> None:
        if self._is_tracing and step >= self._last:
            loop.running_metrics()  # Dispatch is asynchronous: wait until the step has run.
            self.close()
        elif not self._is_tracing and self._first - loop.steps_per_call <= step < self._last:
            loop.running_metrics()
            self._attempt(self._begin)

    def _begin(self) -> None:
        jax.profiler.start_trace(self._folder)
        self._is_tracing = True
