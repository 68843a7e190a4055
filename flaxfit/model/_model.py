"""Model: fit, evaluate and predict, which forward to the loop."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flaxfit import checkpoints
from flaxfit.callbacks._callback import Callback
from flaxfit.callbacks._history import History
from flaxfit.display import short_errors
from flaxfit.loop import strategy_for, use_compilation_cache
from flaxfit.metrics import Metric
from flaxfit.model._examination import Examination
from flaxfit.model._fit import check_arguments, fit
from flaxfit.model._other_names import AnswersOtherNames
from flaxfit.model._tasks import make_recipe
from flaxfit.model._trainer import Trainer
from flaxfit.strategies import Strategy
from flaxfit.tree import Data, PyTree


class Model(Examination, AnswersOtherNames):
    """Trains a module with `fit`, measures it with `evaluate` and applies it with `predict`.

    >>> import numpy as np, optax
    >>> from flax import linen as nn
    >>> x = np.linspace(-1, 1, 64)[:, None]
    >>> y = 3 * x
    >>> model = Model(nn.Dense(1), optax.adam(0.1), "mse")
    >>> history = model.fit(x, y, epochs=30, verbose=0)
    >>> model.predict(x[:2]).shape
    (2, 1)

    Args:
      module: an NNX module or a factory of one, a Linen module, or an `(init, apply)` pair. Its
        train/eval flag (a field or an argument of the call, such as `train`, `deterministic` or
        `use_running_average`) is set as needed. `fit` writes the weights into an NNX instance only
        when it ends or is interrupted; weights that you change there after the first `fit` have no
        effect. Changes to other attributes, such as a dropout rate, take effect at the next call.
        Do not add or remove variables.
      optimizer: an Optax transformation.
      loss: a function `(*outputs, *targets) -> values` of shape `(batch, ...)`, or a name, such as
        "crossentropy"; for several outputs a dict or list of these; None with `objective` or
        `step`.
      metrics: names, functions or `Metric`s, in a sequence or by name in a mapping. Those of
        `metrics.collected` are measured on validation data and by `evaluate` only.
      strategy: where arrays live; None: data-parallel over all local devices.
      run_eagerly: whether to run operation by operation, on one device: prints and breakpoints in
        the model, the loss and the metrics see values. It is many times slower.
      seed: the seed for parameter initialization, shuffling and dropout.
      compilation_cache: a folder for JAX's persistent compilation cache, which saves later
        processes from compiling. "auto": a per-user folder, trimmed to 1 GiB, unless JAX has one
        configured; None: no change.
      snapshot: where checkpoints store their arrays: "device", "host" or "none"; see `TrainLoop`.
      eval_rngs: the random streams of `evaluate`, `predict` and validation. Their keys depend on
        the key and the step of the state and on the position of the batch in the data.
      losses: collections, besides "losses", whose values are added to the loss; for NNX, variable
        types or their names.
      **options: fields of `TrainTask`: `loss_weights`, `inputs`, `targets`, `weights`, `rngs`,
        `mutable`, `pad`, `objective`, `companions`, `save_companions`, `across`, `penalty_in_loss`,
        `check_finite`, `freeze`, `accumulate`, `precision`, `clip_norm`, `ema`,
        `ema_overwrite_frequency`, `skip_nonfinite`, `skip_above`, `grads_hook`,
        `example_grads_hook`, `norms`, `step`. With `ema` or a schedule-free optimizer, validation,
        `evaluate`, `predict`, `export` and `save_weights` use the average of the parameters.
    """

    @short_errors
    def __init__(
        self,
        module: Any,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = (),
        *,
        strategy: Strategy | None = None,
        run_eagerly: bool = False,
        seed: int = 0,
        compilation_cache: str | os.PathLike[str] | None = "auto",
        snapshot: str = "device",
        eval_rngs: str | Sequence[str] = (),
        losses: Any = (),
        **options: Any,
    ):
        self._recipe = make_recipe(
            module, optimizer, loss, metrics, losses=losses, eval_rngs=eval_rngs, options=options
        )
        task, eval_task = self._recipe.tasks()
        use_compilation_cache(compilation_cache)
        self.module = module
        strategy = strategy_for(task, strategy=strategy, is_eager=run_eagerly)
        # The class of the module, also where the module is a class or a factory of one.
        name = getattr(module, "__name__", type(module).__name__)
        init = self._recipe.training.init
        self._trainer = Trainer(name, init, task, strategy, seed=seed, snapshot=snapshot)
        self._hold(eval_task)

    @short_errors
    def compile(
        self,
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        **options: Any,
    ) -> None:
        """Changes the optimizer, the loss, the metrics or other options, and keeps the weights.

        The optimizer state is kept if the optimizer is the same, or if the new one's state has the
        same structure, as after a change of the learning rate or of a schedule, which continues at
        the current step. Otherwise it is reset, and a line says so. A rate that was set stays
        unless you pass a new optimizer. A run saved with another optimizer cannot be resumed.

        >>> model = Model(nn.Dense(1), optax.sgd(0.1), "mse")
        >>> model.compile(metrics=["mae"])
        >>> model.metrics_names
        ['loss', 'mae']

        Args:
          optimizer, loss, metrics: as in `Model`; None keeps the current ones.
          loss_weights: the weights of the new losses; None: all are 1.
          **options: as in `Model`, fields of `TrainTask`; the others stay.

        Raises:
          TypeError: an option is unknown.
          ValueError: the options are inconsistent; nothing has changed then.
        """
        if loss_weights is not None:
            options["loss_weights"] = loss_weights
        self._follow_module()
        changes = {"optimizer": optimizer, "loss": loss, "metrics": metrics}
        recipe = self._recipe.changed(changes, {"freeze": self.freeze, **options})
        task, eval_task = recipe.tasks()
        self._trainer.continue_with(task, is_same=recipe.optimizer is self._recipe.optimizer)
        self._trainer.trainable |= "freeze" in options
        self._recipe = recipe
        self._hold(eval_task)

    @short_errors
    def fit(
        self,
        x: Data,
        y: PyTree = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Callback | Iterable[Callback] | None = (),
        validation_split: float = 0.0,
        validation_data: Data = None,
        shuffle: bool | None = None,
        class_weight: Mapping[int, float] | str | None = None,
        sample_weight: PyTree = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        *,
        steps_per_execution: int | str = "auto",
        checkpoint_dir: str | os.PathLike[str] | checkpoints.CheckpointFileWriter | None = None,
        resume: bool | str = "auto",
    ) -> History:
        """Trains for `epochs` passes over the data; another call continues training.

        >>> history = model.fit(x, y, epochs=2, verbose=0)
        >>> history.epoch
        [0, 1]

        Args:
          x: inputs: arrays (64-bit ones are narrowed), a data set `(x, y)` or `{"x": .., "y": ..}`,
            or anything that yields batches.
          y: targets, if `x` is arrays; a list or a tuple of several.
          batch_size: examples per step, over all devices; None: 32. Batches keep their size.
          epochs: the epoch to stop at, as in Keras: `epochs - initial_epoch` epochs are trained.
          verbose: "auto" or 1: a row per epoch, and a bar on a terminal or in a notebook; 2: only
            the rows; 0: nothing.
          callbacks: functions `Checkpoint -> Checkpoint | None`, called after each epoch.
          validation_split: the fraction of the arrays to validate on, chosen at random by the seed.
          validation_data: `(x, y)`, `(x, y, weights)` or batches to measure after each epoch.
          shuffle: whether each epoch has its own random order; None: data sets (arrays, a Hugging
            Face dataset) are shuffled; batches and what a callable returns keep their order.
          class_weight: weights by integer label (default 1), in training only; or "balanced":
            `n / (classes * count)`, as in scikit-learn. For a list of batches, batches by index, an
            `ArrayStream` or a Hugging Face dataset, counting takes an extra pass. One-hot rows in
            batches must be floats.
          sample_weight: weights of examples or tokens, see `Batch`; for several outputs also a list
            in their order, or a mapping by name.
          initial_epoch: the number of the first epoch, from 0: `epochs - initial_epoch` are
            trained, in the order of the data of these epochs if they are whole passes. A data set's
            end-of-epoch hooks are not replayed.
          steps_per_epoch: steps per epoch; the data repeats as needed. None: one pass over the
            data.
          validation_steps: the number of batches to validate on; None: all. A generator continues
            where it stopped.
          validation_batch_size: examples per validation batch; None: `batch_size`.
          validation_freq: validates every n-th epoch, or the epochs in a collection, from 1. The
            history has nan for the others.
          steps_per_execution: steps per dispatch to the device. "auto" takes up to 32 where steps
            are small and the data is arrays. Models with convolutions take one step per dispatch
            on a CPU.
          checkpoint_dir: a folder to save each epoch in, with the history, the position in the data
            and the states of callbacks. Or a `CheckpointFileWriter`, to choose what is kept
            (`keep`, `monitor`) and whether a failed save ends the run (`on_error`).
          resume: "auto": resume from the newest checkpoint in that folder if its call of `fit`
            began at the present step (0, or that after an earlier `fit` or `load`), up to `epochs`
            in total; if they are done, return at once. Give each call of a script its own folder.
            True: raise if there is nothing to resume. False: raise if the folder is not empty.

        Returns:
          The `History`: the metrics of each epoch, including those before a resume.

        Raises:
          ValueError: the data is inconsistent, does not match the loss or a checkpoint, or ends too
            early; `batch_size` or `shuffle` was given for batches; validation options were given
            without validation data; or the folder holds only checkpoints of later calls.
          TypeError: the data is not numeric, or targets or a loss are missing.
          FileNotFoundError: `resume=True`, and there is nothing to resume.
        """
        check_arguments(
            verbose,
            epochs,
            initial_epoch,
            steps_per_execution,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
        )
        self._follow_module()
        data, validation_data = self._prepared(
            x, y, sample_weight, class_weight, validation_split, validation_data
        )
        return fit(
            self._trainer,
            self._evaluator,
            data,
            validation_data,
            batch_size=batch_size,
            epochs=epochs,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
            class_weight=class_weight,
            shuffle=shuffle,
            callbacks=callbacks,
            verbose=verbose,
            steps_per_execution=steps_per_execution,
            checkpoint_dir=checkpoint_dir,
            resume=resume,
        )

    @property
    def optimizer(self) -> Any:
        """The current optimizer; `compile` changes it."""
        return self._recipe.optimizer

    @property
    def loss(self) -> Any:
        """The current loss; `compile` changes it."""
        return self._recipe.loss

    @property
    def metrics(self) -> list[Metric]:
        """The metrics that `evaluate` measures, without the loss; `compile` changes them."""
        return list(self._evaluator.task.metrics.values())

    @short_errors
    def build(self, x: Data) -> None:
        """Initializes the parameters for inputs like `x`, as the first `fit` would.

        >>> model = Model(nn.Dense(1))
        >>> model.build((None, 3))
        >>> model.count_params()
        4

        Args:
          x: inputs, or anything that yields batches; only shapes and dtypes matter. Or the shape
            of one input, such as `(None, 784)`.

        Raises:
          TypeError: `x` is not numeric, or has no batch axis.
        """
        is_shape = isinstance(x, tuple) or isinstance(x, list) and None in x
        if is_shape and all(isinstance(n, int | None) for n in x):
            x = np.zeros([n or 1 for n in x], np.float32)
        self._to_predict(x, None, notes_shapes=True)

    @property
    def trainable(self) -> bool:
        """Whether any parameter is trained; set it to False or True to freeze all or none.

        If it is False, the model measures and predicts, and `fit` raises a ValueError. Setting
        `freeze` makes it True.
        """
        return self._trainer.trainable and ".*" not in self.freeze

    @trainable.setter
    def trainable(self, trainable: bool) -> None:
        if not isinstance(trainable, bool):
            raise TypeError(
                f"trainable must be True or False, got {trainable!r:.60}: set model.freeze to the "
                "patterns of the parameters that are not trained, such as ['stem/.*']."
            )
        if trainable:
            self.freeze = ()
        else:
            self._trainer.trainable = False

    @property
    def freeze(self) -> Sequence[str]:
        """Patterns of the parameters that are not trained; set it to freeze others from now on."""
        return self._trainer.task.freeze

    @freeze.setter
    def freeze(self, patterns: Any) -> None:
        self._trainer.freeze(patterns)
