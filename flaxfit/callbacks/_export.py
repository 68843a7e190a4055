"""Export: writes the best model to a file that runs without the model's code."""

import os
from collections.abc import Mapping
from typing import Any

from flaxfit.distributed import from_main, process_count
from flaxfit.loop import TrainLoop
from flaxfit.metrics._monitor import Monitor
from flaxfit.modules._switch import as_apply
from flaxfit.optim import averaged
from flaxfit.optim._averaged import has_average
from flaxfit.state import Checkpoint
from flaxfit.strategies import gather
from flaxfit.tree import Json, PyTree, local_path


class Export:
    """Writes the model to a file whenever a checkpoint is the best so far.

    The file is replaced atomically, so it always holds the best model so far. With several
    processes, the first writes it. `Model.fit` passes the model in evaluation mode; in your own
    loop, pass it as `apply`.

    >>> import tempfile
    >>> import numpy as np
    >>> from flaxfit import InferenceState, export
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     callback = Export(f"{folder}/best", monitor="loss", apply=lambda v, x: v["params"] * x,
    ...                       input_spec=export.InputSpec(("batch",)))
    ...     for step, loss in enumerate([0.9, 0.5, 0.7]):
    ...         state = InferenceState(np.int32(step), np.float32(step), {})
    ...         checkpoint = Checkpoint(step=step, state=state, metrics={"loss": loss})
    ...         checkpoint = callback(checkpoint)
    ...     best = export.load(f"{folder}/best")
    >>> best(np.ones(1)), callback.best_step
    (Array([1.], dtype=float32), 1)

    Args:
      path: the file, or the folder of a SavedModel.
      monitor: the metric that decides which checkpoint is best; None: write every one.
      format: "stablehlo", "saved_model" or "onnx".
      mode: "min", "max", or "auto", for the metrics and losses of flaxfit and of Optax.
      apply: a module, or `apply(variables, *inputs)` in evaluation mode; None: the model of `fit`.
      input_spec: `flaxfit.export.InputSpec`s; None: the specs of the loop's batches, of any size.
      ema: whether to write the average of the parameters; None: if there is one, from `ema=` or a
        schedule-free optimizer.
      **options: options of `flaxfit.export.save`, `save_saved_model` or `save_onnx`.
    """

    borrows = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        monitor: str | None = "val_loss",
        format: str = "stablehlo",
        *,
        mode: str = "auto",
        apply: Any = None,
        input_spec: PyTree = None,
        ema: bool | None = None,
        **options: Any,
    ) -> None:
        # Imported when used: `import flaxfit` stays quick.
        from flaxfit.export._trained import check_format

        check_format(format)
        self._path = local_path(path)
        self._monitor = None if monitor is None else Monitor(monitor, mode, "Export")
        self._format = format
        self._apply = None if apply is None else as_apply("Export", apply, train=False)
        self._input_spec = input_spec
        self._ema = ema
        self._options = options
        self._loop: TrainLoop | None = None
        self.best_value: float | None = None
        """The best value so far."""
        self.best_step: int | None = None
        """The step of the file."""

    def attach(self, loop: TrainLoop) -> None:
        """Attaches to a loop, which must report the metric, and to the model of `fit`."""
        self._loop = loop
        if self._apply is None and loop.fit_call is not None:
            self._apply = loop.fit_call.eval_apply()
        if self._monitor is not None:
            self._monitor.attach(loop, self)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Writes the model if it is the best so far."""
        if self._monitor is not None:
            value = self._monitor.read(checkpoint)
            if value is None or not self._monitor.is_better(value, self.best_value):
                return checkpoint
            self.best_value = value
        self._write(checkpoint)
        self.best_step = checkpoint.step
        return checkpoint

    def get_state(self) -> dict[str, Json]:
        return {"best_value": self.best_value, "best_step": self.best_step}

    def set_state(self, state: Mapping[str, Json]) -> None:
        self.best_value, self.best_step = state["best_value"], state["best_step"]
        if self._monitor is not None:
            self._monitor.was_seen |= self.best_step is not None

    def _write(self, checkpoint: Checkpoint) -> None:
        from flaxfit import export

        if self._apply is None:
            raise ValueError(
                "Export does not know the model in evaluation mode: pass apply=, such as "
                "functools.partial(module.apply, train=False)."
            )
        spec = self._input_spec
        if spec is None:
            shapes = None if self._loop is None else self._loop.input_shapes
            if shapes is None:
                raise ValueError(
                    "Export does not know the model's inputs: pass input_spec=, such as "
                    "flaxfit.export.InputSpec(('batch', 28, 28)), or put it into callbacks=."
                )
            spec = export.batch_specs(shapes)
        state = checkpoint.state
        if has_average(state) if self._ema is None else self._ema:
            state = averaged(state)
        apply = self._apply
        # Other processes may hold parts of it.
        state = gather(state.for_inference()) if process_count() > 1 else state

        def write() -> None:
            module = export.from_state(state, apply, spec)
            export.write(module, self._path, self._format, **self._options)

        from_main("an export", write)
