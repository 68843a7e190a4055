"""TensorBoardLogger: metrics, histograms, images and texts for TensorBoard."""

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxfit.callbacks._event_file import EventFile
from flaxfit.callbacks._log_to import Attempt
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._checks import local_path
from flaxfit.tree._paths import flat
from flaxfit.tree._types import PyTree


class TensorBoardLogger:
    """Writes the metrics of every checkpoint for TensorBoard: `tensorboard --logdir folder`.

    There is one file of events per folder, also when a run is resumed: it goes on in the same
    file, and what that holds of later steps than the one resumed from is void for TensorBoard.
    Give each run a folder of its own. Failures to write never stop training.

    >>> import tensorboardX  # It is written with this package.
    >>> import tempfile
    >>> log = TensorBoardLogger(tempfile.mkdtemp(), hparams={"batch_size": 32})
    >>> checkpoint = log(Checkpoint(step=1, state=None, metrics={"loss": 0.5}))
    >>> log.log_text("note", "began")
    >>> log.close()

    Raises:
      ImportError: tensorboardX is not installed.
    """

    borrows = True
    """It only reads what a checkpoint holds."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        histograms: bool = False,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        """Describes what to write.

        Args:
          folder: of this run; made at the first checkpoint.
          histograms: whether to write histograms of the parameters, and of the gradients where
            checkpoints hold them (`TrainLoop(keep_grads=True)`).
          hparams: what the run was given, for the table of hyperparameters.
        """
        self._folder = local_path(folder)
        try:
            from tensorboardX import summary
        except ImportError as error:
            raise ImportError(
                'TensorBoardLogger needs tensorboardX: pip install "flaxfit[tensorboard]"'
            ) from error
        self._make: Any = summary
        self._histograms = histograms
        self._hparams = dict(hparams or {})
        self._attempt = Attempt("TensorBoardLogger")
        self._file: Any = None
        self._step = 0

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint; it is written."""
        self._attempt(self._write, checkpoint)
        return checkpoint

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of a step."""
        made = [self._make.scalar(name, float(value)) for name, value in values.items()]
        self._attempt(self._add, step, made)

    def log_image(self, name: str, image: Any, *, step: int | None = None) -> None:
        """Writes an image.

        Args:
          name: what to show it under.
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
        made = [self._make.scalar(name, float(v)) for name, v in checkpoint.scalars.items()]
        if self._histograms:
            made += self._histograms_of("params", checkpoint.state and checkpoint.state.params)
            made += self._histograms_of("grads", checkpoint.last_grads)
        if is_first and self._hparams:
            known = {k: v if _is_plain(v) else str(v) for k, v in self._hparams.items()}
            made += self._make.hparams(known, dict.fromkeys(checkpoint.scalars))
        self._add(step, made)

    def _histograms_of(self, kind: str, tree: PyTree) -> list[Any]:
        made = []
        for path, leaf in ({} if tree is None else flat(tree)).items():
            # Parts of an array that other processes hold cannot be read here.
            if not getattr(leaf, "is_fully_addressable", True):
                continue
            values = np.asarray(jnp.asarray(leaf, jnp.float32)).ravel()
            values = values[np.isfinite(values)]
            if values.size:
                made.append(self._make.histogram(f"{kind}/{path}", values, bins=64))
        return made

    def _add(self, step: int, made: list[Any]) -> None:
        self._opened().add(step, *made)

    def _opened(self) -> Any:
        if self._file is None:
            self._file = EventFile(self._folder)
        return self._file


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)
