"""TensorBoardLogger: metrics, histograms, images, texts and embeddings for TensorBoard."""

import functools
import os
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from flaxfit.callbacks._callback import watch_metrics
from flaxfit.callbacks._event_file import EventFile, Summary
from flaxfit.callbacks._log_to import Attempt
from flaxfit.callbacks._projector import Metadata, Projector
from flaxfit.display import is_scalar
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint
from flaxfit.tree import ArrayLike, PyTree, flat, local_path, required, whole_number

_VALIDATION = "validation"


class TensorBoardLogger:
    """Writes the metrics of each checkpoint for TensorBoard: `tensorboard --logdir folder`.

    Each folder has one event file, or two with `split`. A resumed run appends to it, and
    TensorBoard drops the steps after the one it resumed from. Give each run its own folder.
    Failures to write never stop training.

    >>> import tensorboardX  # It is written with this package.
    >>> import tempfile
    >>> log = TensorBoardLogger(tempfile.mkdtemp(), hparams={"batch_size": 32})
    >>> checkpoint = log(Checkpoint(step=1, state=None, metrics={"loss": 0.5}))
    >>> log.log_text("note", "began")
    >>> log.close()

    Args:
      folder: the folder of this run; made at the first checkpoint.
      histograms: whether to write histograms of the parameters, and of the gradients if
        checkpoints hold them (`TrainLoop(keep_grads=True)`); a number n: at every n-th checkpoint
        (epoch, in `fit`).
      hparams: the settings of the run, for the table of hyperparameters.
      split: whether to write the metrics of validation to `folder/validation`, without the prefix
        `val_`, and everything else to `folder/train`, so that TensorBoard draws both in one chart.
      histogram_freq: Keras's name for `histograms`.
      update_freq: "epoch", or a number of steps: every this many steps it also writes the means of
        the metrics since the last checkpoint, as "batch_loss" and so on, for which it waits for the
        device; "batch" is 1.
      write_images: whether to also write parameters of one or two axes as images, whenever
        histograms are written: black is the lowest value, white the highest.
      embeddings_freq: n, to write the tables of `Embed` layers, for the projector, at every n-th
        checkpoint, replacing earlier tables; 0: never.
      embeddings_metadata: a label for each row of these tables, or the name of a file of them in
        the folder of events (`folder/train` with `split`), which may begin with a line of names of
        columns; a mapping gives them by the path of the layer.
      log_dir: Keras's name for `folder`.

    Raises:
      TypeError: an option is unknown.
      ValueError: when a loop takes it, the model has no `Embed` layer, or labels do not match its
        rows.
      ImportError: tensorboardX is not installed.
    """

    borrows = True

    def __init__(
        self,
        folder: str | os.PathLike[str] = "",
        *,
        histograms: bool | int = False,
        hparams: Mapping[str, object] | None = None,
        split: bool = False,
        histogram_freq: int | None = None,
        update_freq: int | str = "epoch",
        write_images: bool = False,
        embeddings_freq: int = 0,
        embeddings_metadata: Metadata | Mapping[str, Metadata] | None = None,
        log_dir: str | os.PathLike[str] = "",
        **others: object,
    ) -> None:
        _refuse(others)
        if bool(folder) == bool(log_dir):
            raise TypeError(
                "TensorBoardLogger needs one folder: pass it first or as log_dir=, not both."
            )
        self._folder = local_path(folder or log_dir)
        self._make = required("TensorBoardLogger", "tensorboardX", "tensorboard").summary
        if histograms and histogram_freq is not None:
            raise ValueError(
                "TensorBoardLogger got histograms and histogram_freq, two names for one option: "
                "pass one of them."
            )
        n = int(histograms) if histogram_freq is None else histogram_freq
        self._histograms = whole_number("histograms", n, least=0)
        self._writes_images = write_images
        if write_images and not self._histograms:
            raise ValueError("write_images=True needs histograms=True: they are written together.")
        self._projector = Projector(embeddings_freq, embeddings_metadata)
        self._n_seen = 0
        n = 1 if update_freq == "batch" else update_freq
        is_epoch = update_freq == "epoch"
        self._update_freq = 0 if is_epoch else whole_number("update_freq", n, other="epoch")
        self._main = "train" if split else ""
        """The subfolder of everything except validation metrics."""
        self._hparams = dict(hparams or {})
        self._attempt = Attempt("TensorBoardLogger")
        self._files: dict[str, EventFile] = {}
        self._is_first = True
        """Whether no checkpoint has been written since the files were closed."""
        self._step = 0

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        self._attempt(self._write, checkpoint)
        return checkpoint

    def attach(self, loop: TrainLoop) -> None:
        """Checks the embeddings, and watches steps if `update_freq` is not "epoch"."""
        if self._projector.every:
            self._projector.check(self._folder / self._main, loop.state.params)
        if self._update_freq:
            update = functools.partial(self._attempt, self._update)
            watch_metrics(loop, self._update_freq, update)

    def _update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._begin(step)
        values = {f"batch_{name}": value for name, value in metrics.items() if is_scalar(value)}
        self._add(step, self._scalars(values))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of a step."""
        self._attempt(self._add, step, self._scalars(values))

    def log_image(self, name: str, image: ArrayLike, *, step: int | None = None) -> None:
        """Writes an image.

        >>> log.log_image("digit", np.zeros((8, 8)))

        Args:
          name: the name to show it under.
          image: an array `(height, width)` or `(height, width, channels)`; floats from 0 to 1, or
            uint8.
          step: the step to log at; None: the step of the latest checkpoint.
        """
        image = np.asarray(image)
        layout = "HW" if image.ndim == 2 else "HWC"
        made = self._make.image(name, image, dataformats=layout)
        self._attempt(self._add, self._step if step is None else step, [made])

    def log_text(self, name: str, text: str, *, step: int | None = None) -> None:
        """Writes a text, which may be Markdown; the step is that of the latest checkpoint.

        >>> log.log_text("note", "began")
        """
        made = self._make.text(name, text)
        self._attempt(self._add, self._step if step is None else step, [made])

    def close(self) -> None:
        """Closes the files; a later checkpoint opens them again."""
        self._is_first = True
        while self._files:
            self._attempt(self._files.popitem()[1].close)

    def _write(self, checkpoint: Checkpoint) -> None:
        step = checkpoint.step
        train, tested = {}, {}
        for name, value in checkpoint.scalars.items():
            if self._main and name.startswith("val_"):  # Validation has its own folder.
                tested[name.removeprefix("val_")] = value
            else:
                train[name] = value
        self._begin(step, is_tested=bool(tested))
        self._step = step
        if tested:
            self._opened(_VALIDATION).add(step, self._scalars(tested))
        made = self._scalars(train)
        self._n_seen += 1
        if self._histograms and (self._n_seen - 1) % self._histograms == 0:
            made += self._histograms_of("params", checkpoint.state and checkpoint.state.params)
            made += self._histograms_of("grads", checkpoint.last_grads)
            if self._writes_images and checkpoint.state is not None:
                made += self._images_of(checkpoint.state.params)
        if self._is_first and self._hparams:
            plain = bool | int | float | str
            known = {k: v if isinstance(v, plain) else str(v) for k, v in self._hparams.items()}
            made += self._make.hparams(known, dict.fromkeys(checkpoint.scalars))
        self._add(step, made)
        self._is_first = False
        is_due = self._projector.every and (self._n_seen - 1) % self._projector.every == 0
        if is_due and checkpoint.state is not None:
            tables = self._projector.tables(checkpoint.state.params)
            self._projector.write(self._folder / self._main, dict(_arrays(tables)))

    def _scalars(self, values: Mapping[str, float]) -> list[Summary]:
        return [self._make.scalar(name, float(value)) for name, value in values.items()]

    def _histograms_of(self, kind: str, tree: PyTree | None) -> list[Summary]:
        made = []
        for path, values in _arrays({} if tree is None else tree):
            values = values[np.isfinite(values)]
            if values.size:
                made.append(self._make.histogram(f"{kind}/{path}", values, bins=64))
        return made

    def _images_of(self, params: PyTree) -> list[Summary]:
        made = []
        for path, values in _arrays(params):
            values = np.atleast_2d(values.squeeze())
            if values.ndim > 2 or not values.size or not np.isfinite(values).all():
                continue
            values = values.T if values.shape[0] > values.shape[1] else values
            scaled = (values - values.min()) / (np.ptp(values) or 1.0)
            made.append(self._make.image(f"params/{path}/image", scaled, dataformats="HW"))
        return made

    def _begin(self, step: int, *, is_tested: bool = False) -> None:
        """Opens files, and invalidates their records from a step on that is repeated."""
        names = [self._main]
        if is_tested or (self._main and (self._folder / _VALIDATION).exists()):
            names.append(_VALIDATION)
        for name in names:
            is_opened = name not in self._files
            file = self._opened(name)
            if (is_opened and not file.is_new) or step <= self._step:
                file.restart(step)
        self._step = min(self._step, step - 1)

    def _add(self, step: int, made: list[Summary]) -> None:
        self._opened(self._main).add(step, made)

    def _opened(self, name: str) -> EventFile:
        if name not in self._files:
            self._files[name] = EventFile(self._folder / name)
        return self._files[name]


def _arrays(tree: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a tree by path, without arrays that other processes hold parts of."""
    for path, leaf in flat(tree).items():
        if getattr(leaf, "is_fully_addressable", True):
            yield path, np.asarray(jnp.asarray(leaf, jnp.float32))


_OF_KERAS = {
    "write_graph": "a compiled step has no graph of layers; model.summary() lists the parameters",
    "write_steps_per_second": "add callbacks.Throughput(), whose metrics are logged too",
    "profile_batch": "add callbacks.Profiler(folder, first, last)",
}


def _refuse(options: Mapping[str, object]) -> None:
    """Rejects unknown options, and Keras options with a hint what to use instead."""
    for name, value in options.items():
        if name not in _OF_KERAS:
            raise TypeError(f"TensorBoardLogger has no option {name}.")
        if value:
            raise TypeError(
                f"TensorBoardLogger does not support {name}={value!r}: {_OF_KERAS[name]}."
            )
