"""TensorBoardLogger: metrics, histograms, images and texts for TensorBoard."""

import os
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from flaxfit.callbacks._event_file import EventFile, Summary
from flaxfit.callbacks._log_to import Attempt, required
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._checks import local_path
from flaxfit.tree._paths import flat
from flaxfit.tree._types import ArrayLike, PyTree


class TensorBoardLogger:
    """Writes the metrics of each checkpoint for TensorBoard: `tensorboard --logdir folder`.

    There is one file of events per folder. A resumed run appends to it, and TensorBoard drops
    what the file holds of later steps than the one resumed from. Give each run a folder of its
    own. Failures to write never stop training.

    >>> import tensorboardX  # It is written with this package.
    >>> import tempfile
    >>> log = TensorBoardLogger(tempfile.mkdtemp(), hparams={"batch_size": 32})
    >>> checkpoint = log(Checkpoint(step=1, state=None, metrics={"loss": 0.5}))
    >>> log.log_text("note", "began")
    >>> log.close()

    Args:
      folder: the folder of this run; made at the first checkpoint.
      histograms: whether to write histograms of the parameters, and of the gradients if
        checkpoints hold them (`TrainLoop(keep_grads=True)`).
      hparams: the settings of the run, for the table of hyperparameters.

    Raises:
      ImportError: tensorboardX is not installed.
    """

    borrows = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        histograms: bool = False,
        hparams: Mapping[str, object] | None = None,
    ) -> None:
        self._folder = local_path(folder)
        self._make = required("TensorBoardLogger", "tensorboardX", "tensorboard").summary
        self._histograms = histograms
        self._hparams = dict(hparams or {})
        self._attempt = Attempt("TensorBoardLogger")
        self._file: EventFile | None = None
        self._step = 0

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        self._attempt(self._write, checkpoint)
        return checkpoint

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of a step."""
        self._attempt(self._add, step, self._scalars(values))

    def log_image(self, name: str, image: ArrayLike, *, step: int | None = None) -> None:
        """Writes an image.

        Args:
          name: the name to show it under.
          image: an array `(height, width)` or `(height, width, channels)`; floats from 0 to 1, or
            uint8.
          step: None: that of the latest checkpoint.
        """
        image = np.asarray(image)
        layout = "HW" if image.ndim == 2 else "HWC"
        made = self._make.image(name, image, dataformats=layout)
        self._attempt(self._add, self._step if step is None else step, [made])

    def log_text(self, name: str, text: str, *, step: int | None = None) -> None:
        """Writes a text, which may be Markdown; the step is that of the latest checkpoint."""
        made = self._make.text(name, text)
        self._attempt(self._add, self._step if step is None else step, [made])

    def close(self) -> None:
        """Closes the file; a later checkpoint opens it again."""
        if self._file is not None:
            self._attempt(self._file.close)
            self._file = None

    def _write(self, checkpoint: Checkpoint) -> None:
        step = checkpoint.step
        is_first = self._file is None
        file = self._opened()
        if (is_first and not file.is_new) or step <= self._step:
            file.restart(step)
        self._step = step
        made = self._scalars(checkpoint.scalars)
        if self._histograms:
            made += self._histograms_of("params", checkpoint.state and checkpoint.state.params)
            made += self._histograms_of("grads", checkpoint.last_grads)
        if is_first and self._hparams:
            plain = bool | int | float | str
            known = {k: v if isinstance(v, plain) else str(v) for k, v in self._hparams.items()}
            made += self._make.hparams(known, dict.fromkeys(checkpoint.scalars))
        self._add(step, made)

    def _scalars(self, values: Mapping[str, float]) -> list[Summary]:
        return [self._make.scalar(name, float(value)) for name, value in values.items()]

    def _histograms_of(self, kind: str, tree: PyTree | None) -> list[Summary]:
        made = []
        for path, leaf in ({} if tree is None else flat(tree)).items():
            # Other processes hold parts of it.
            if not getattr(leaf, "is_fully_addressable", True):
                continue
            values = np.asarray(jnp.asarray(leaf, jnp.float32)).ravel()
            values = values[np.isfinite(values)]
            if values.size:
                made.append(self._make.histogram(f"{kind}/{path}", values, bins=64))
        return made

    def _add(self, step: int, made: list[Summary]) -> None:
        self._opened().add(step, made)

    def _opened(self) -> EventFile:
        if self._file is None:
            self._file = EventFile(self._folder)
        return self._file
