"""Model: fit, evaluate and predict. It forwards to the loop and decides nothing."""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax.core.scope import in_filter

from flaxfit import checkpoints, modules
from flaxfit.callbacks import ProgressBar
from flaxfit.callbacks._history import History
from flaxfit.data import ArrayStream, as_stream, one_pass
from flaxfit.data._batch import normalize
from flaxfit.data._fit_arguments import prepare, prepare_inputs
from flaxfit.data._libraries import is_hugging_face, regular_size
from flaxfit.data._rewind import borrowed
from flaxfit.data._stream import is_shared
from flaxfit.display import _html, say
from flaxfit.loop._callback_list import as_tuple
from flaxfit.loop._compilation_cache import use_compilation_cache
from flaxfit.loop._default_strategy import strategy_for
from flaxfit.loop._eval_loop import EvalLoop
from flaxfit.loop._ownership import copier
from flaxfit.loop._predictor import Predictor
from flaxfit.loop._train_loop import TrainLoop
from flaxfit.model._current_state import Current
from flaxfit.model._find_batch_size import find_batch_size
from flaxfit.model._find_lr import LearningRateRange, find_lr
from flaxfit.model._fit import (
    Validation,
    batches_of,
    check_numbers,
    first_line,
    length_of,
    run_epochs,
    stream_of,
)
from flaxfit.model._resume import RunFolder
from flaxfit.optim import averaged
from flaxfit.optim._averaged import has_average, has_ema
from flaxfit.state._train_state import TrainState
from flaxfit.step._validate import shapes_of
from flaxfit.strategies import Eager, Strategy
from flaxfit.strategies._eager import eagerly
from flaxfit.task._task import EvalTask, TrainTask
from flaxfit.tree._functions import order_of
from flaxfit.tree._types import ArrayLike, Data, Params


class Model:
    """A model that is trained with `fit`, measured with `evaluate` and used with `predict`.

    >>> import numpy as np, optax
    >>> from flax import linen as nn
    >>> x = np.linspace(-1, 1, 64)[:, None]
    >>> model = Model(nn.Dense(1), optax.adam(0.1), "mse")
    >>> history = model.fit(x, 3 * x, epochs=30, verbose=0)
    >>> model.predict(x[:2]).shape
    (2, 1)

    Args:
      module: a linen module, an nnx module or a factory of one, or an `(init, apply)` pair. Its
        switch between training and evaluation (`train`, `training`, `deterministic`,
        `use_running_average`; a field or an argument of the call) is set as needed.
      optimizer: an optax transformation.
      loss: a function `(*outputs, *targets) -> values` or a name, such as "crossentropy"; for
        several outputs one for each, by name or in their order.
      metrics: names, functions or `Metric`s, in a sequence or by name in a mapping.
      strategy: where arrays live; None: data-parallel over all local devices.
      run_eagerly: whether to run everything operation by operation, on one device, so that prints
        and breakpoints in the model, the loss and the metrics see values. It is many times slower.
      seed: of the initial parameters, of shuffling and of dropout.
      compilation_cache: a folder that JAX keeps compiled programs in, for this whole process and
        for later ones, which then start without compiling again.
      snapshot: where checkpoints have their arrays: "device", "host" or "none"; see `TrainLoop`.
      eval_rngs: the random streams that `evaluate`, `predict` and validation supply. Their keys
        depend on the key and the step of the state and on the place of the batch in the data.
      losses: the collections, besides "losses", whose values the model adds to the loss; of nnx,
        types of variables or their names.
      **options: fields of `TrainTask`: `loss_weights`, `rngs`, `mutable`, `pad`, `freeze`,
        `accumulate`, `precision`, `clip_norm`, `ema`, `skip_nonfinite`, `step`. With `ema`
        or a schedule-free optimizer, validation, `evaluate`, `predict`, `export` and `save_weights`
        use the average of the parameters.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        loss: Any,
        metrics: Any = (),
        *,
        strategy: Strategy | None = None,
        run_eagerly: bool = False,
        seed: int = 0,
        compilation_cache: str | os.PathLike[str] | None = None,
        snapshot: str = "device",
        eval_rngs: str | Sequence[str] = (),
        losses: ArrayLike = (),
        **options: Any,
    ):
        known = [field.name for field in dataclasses.fields(TrainTask) if field.kw_only]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(
                f"Model has no option {', '.join(unknown)}: it takes {', '.join(known)}. What "
                "concerns the optimizer is given to that, such as optax.adam(learning_rate=1e-3)."
            )
        if compilation_cache is not None:
            use_compilation_cache(compilation_cache)
        self.module = module
        self.seed = seed
        self.history: History | None = None
        """The history of the latest `fit`, also when it was interrupted."""
        mutable = options.get("mutable")
        if losses and mutable is not None and not in_filter(mutable, "losses"):
            raise ValueError(
                f"losses={losses!r:.60} and mutable={mutable!r:.60} exclude each other: what the "
                "model leaves behind would be lost. Name 'losses' and theirs in mutable, or leave "
                "mutable out."
            )
        self._train, self._eval = modules.train_and_eval(module, losses=losses)
        self._task = TrainTask(self._train.apply, optimizer, loss, None, metrics, **options)
        self.strategy = Eager(strategy) if run_eagerly else strategy or strategy_for(self._task)
        copier(snapshot, self.strategy)  # Refused here rather than by the first `fit`.
        self._snapshot = snapshot
        task = EvalTask(
            self._eval.apply,
            self._task.metrics,
            loss=self._task.loss,
            rngs=eval_rngs,
            precision=self._task.precision,
            pad=self._task.pad,
        )
        self._evaluator = EvalLoop(task, strategy=self.strategy)
        self._predictor = Predictor(
            self._eval.apply, precision=self._task.precision, rngs=task.rngs
        )
        self._current = Current(self._train.init)
        self._n_epochs = 0

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        validation_split: float = 0.0,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        shuffle: bool | None = None,
        callbacks: Any = (),
        verbose: int | str = "auto",
        steps_per_execution: int | str = "auto",
        checkpoint_dir: str | os.PathLike[str] | checkpoints.CheckpointFileWriter | None = None,
        resume: bool | str = "auto",
    ) -> History:
        """Trains for a number of passes over the data; again continues.

        Args:
          x: inputs: arrays (64-bit ones are narrowed), a data set `(x, y)` or `{"x": .., "y": ..}`,
            or anything that gives batches.
          y: targets, where `x` is arrays; a list or a tuple where there are several.
          batch_size: examples per step, over all devices; None: 32. Batches are taken as they are.
          epochs: how many passes to make.
          steps_per_epoch: steps that count as a pass, for which the data is repeated as often as
            needed; None: those of one pass over the data.
          validation_data: `(x, y)`, `(x, y, weights)` or batches to measure after each epoch.
          validation_split: the part of the arrays to keep for that, chosen at random by the seed.
          sample_weight: one weight per example; of several outputs also a mapping of such, by name.
          class_weight: weights by integer label, 1 where none is given; in training only.
          shuffle: whether each epoch has its own random order; None: data sets have (arrays, a
            Hugging Face dataset), while batches and what a callable returns keep theirs.
          callbacks: functions `Checkpoint -> Checkpoint | None`, called after each epoch.
          verbose: "auto" or 1: a bar on a terminal or in a notebook, else a line per epoch;
            2: lines; 0: nothing.
          steps_per_execution: steps per dispatch to the device. "auto" takes up to 32 where steps
            are small and the data is arrays. Models with convolutions take one step per dispatch
            on a CPU.
          checkpoint_dir: a folder in which each epoch is saved, with the history, the position in
            the data and what callbacks remember. Or a `CheckpointFileWriter`, to choose what is
            kept (`keep`, `monitor`) and whether a failed save ends the run (`on_error`).
          resume: "auto": a model without weights resumes from the newest checkpoint of that
            folder, to `epochs` epochs in all, and ends as if it had never been interrupted; a
            finished call returns at once. True: there must be a checkpoint; False: nothing.

        Returns:
          The metrics of each epoch, those before a resume included.

        Raises:
          ValueError: the data does not fit together, or does not fit the loss, or a checkpoint;
            it is batches, and a batch size or an order was given; or it ended too early.
        """
        check_numbers(
            verbose,
            epochs=epochs,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            steps_per_execution=steps_per_execution,
        )
        data, validation_data = prepare(
            x, y, sample_weight, class_weight, validation_split, validation_data, self.seed
        )
        stream = stream_of(
            data,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self.seed,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            n_before=self._n_epochs,
        )
        if isinstance(validation_data, tuple) or is_hugging_face(validation_data):
            validation_data = _in_order(validation_data, batch_size)
        n_steps = steps_per_epoch or length_of(stream)
        folder = None
        # What `load` has read is the start of this model, not of an interrupted call.
        current = self._current
        is_fresh, init = current.is_fresh, current.init
        if checkpoint_dir is not None:
            folder = RunFolder(checkpoint_dir, resume if is_fresh else "auto")
            if is_fresh:
                init = folder.init(init)
        batches = batches_of(stream)
        users = as_tuple(callbacks)
        first = [each for each in users if order_of(each) == "first"]
        loop = current.loop_over(
            init,
            dataclasses.replace(self._task, data=batches),
            self.seed,
            n_steps=n_steps,
            steps_per_call=steps_per_execution,
            callbacks=first,
            strategy=self.strategy,
            snapshot=self._snapshot,
            stdout=bool(verbose),
        )
        found = loop.start if is_fresh else None
        can_repeat = hasattr(validation_data, "one_epoch")
        if can_repeat or not isinstance(validation_data, Iterator | None):
            # Before an epoch is spent on it.
            self._evaluator.check(loop.state_in_place, validation_data, in_phase=loop.in_phase)
        line = first_line(self._name, loop, stream, validation_data, n_steps)
        self.history = History(self._name, unit="epoch", facts=line)
        validate: list[Any] = []
        if validation_data is not None:
            validate = [Validation(self._measure, validation_data, self._evaluator.adds)]
        for callback in users:
            if hasattr(callback, "attach_apply"):
                callback.attach_apply(self._apply_to_export())
        guard = [] if folder is None else folder.guards(users)
        save = [] if folder is None else [folder.writer]
        show = []
        if verbose:
            say(line)
            is_live = False if verbose == 2 else None
            n_before = 0 if found is None or not found.history else len(found.history["steps"])
            show = [ProgressBar(unit="epoch", total=epochs, start=n_before, live=is_live)]
        try:
            loop.callbacks = [*guard, *validate, *users, self.history.append, *save, *show]
            if folder is not None and found is not None:
                self._n_epochs = len(self.history.steps)
                epochs = folder.epochs_left(loop, self.history, epochs, n_steps)
            for _ in run_epochs(loop, n_steps, epochs):
                self._n_epochs += 1
        finally:
            try:
                loop.close()
            finally:
                if hasattr(loop.data, "close"):
                    loop.data.close()
        return self.history

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
    ) -> dict[str, float]:
        """Measures the loss and the metrics, exactly for any number of examples and devices."""
        data = self._look_at(_in_order(prepare(x, y, sample_weight)[0], batch_size))
        return self._measure(self._current.state_in_place, data)

    def predict(self, x: Any, *, batch_size: int | None = None) -> Any:
        """The model's outputs as NumPy arrays, one row per example of `x`, in order."""
        data = self._look_at(_in_order(prepare_inputs(x), batch_size))
        return self._predictor(self._averaged(self._current.state_in_place), data, self.strategy)

    def summary(self, x: Any = None) -> None:
        """Prints the layers, their shapes and parameters.

        Args:
          x: inputs, for their shapes; not needed after `fit`.
        """
        if x is not None:
            inputs = shapes_of(normalize(next(as_stream(prepare_inputs(x)))).inputs)
        elif self._loop is not None and self._loop.input_shapes is not None:
            inputs = self._loop.input_shapes
        else:
            raise ValueError("summary() needs inputs before the first fit: model.summary(x).")
        print(modules.summarize(self.module, inputs))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Saves the training state and the history in a folder, as the checkpoint of its step."""
        history = None if self.history is None else self.history.get_state()
        checkpoints.save(folder, self.state, history=history)

    def load(self, folder: str | os.PathLike[str], *, which: str | int = "latest") -> None:
        """Takes over the training state of a checkpoint; a later `fit` continues from it.

        Args:
          folder: where `save` or a `CheckpointFileWriter` put it.
          which: "latest", "best" or a step.

        Raises:
          FileNotFoundError: the folder holds no checkpoint.
          ValueError: the checkpoint does not fit this model.
        """
        self._current.load(folder, which)

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Saves the parameters and the model's other collections in one `.safetensors` file.

        They are those that `evaluate` and `predict` use: with `ema` or a schedule-free optimizer,
        the average. `save` keeps both, to train on from.
        """
        checkpoints.save_weights(path, self._state_to_use())

    def load_weights(
        self,
        path: str | os.PathLike[str],
        *,
        partial: str | Sequence[str] | None = None,
        translator: Any = None,
        prefix: str = "",
        **opts: Any,
    ) -> None:
        """Takes over weights from a file; the optimizer begins afresh.

        It adds to the weights that the model has, of a trained or loaded state or of other files.
        The file is opened at once. Before a `fit`, the shapes that it has to fit become known
        from the inputs of `fit`, `predict` or `evaluate`: those of the first call.

        Args:
          path: a file of `save_weights`, or any that `flaxfit.importers.load` reads. Names that
            begin with that of a collection ("params/...", "batch_stats/...") are of all the
            model's variables, others of the parameters alone.
          partial: patterns of the paths to take over ("encoder/.*"); the others stay as they are.
          translator: a `CheckpointTranslator` from the names of the file to those of the model.
          prefix: the part of the model that the file is of ("encoder"); the others stay.
          **opts: handed to the rules of the translator.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is damaged, or the rules do not fit it; or the weights do not fit
            this model, and every difference is listed.
        """
        self._current.load_weights(
            path,
            self._task.optimizer,
            self.seed,
            partial=partial,
            translator=translator,
            prefix=prefix,
            **opts,
        )

    def export(
        self,
        path: str | os.PathLike[str],
        format: str = "stablehlo",
        input_spec: Any = None,
        *,
        params: Params = None,
        trainable: bool = False,
        **options: Any,
    ) -> Any:
        """Writes the model, in evaluation mode, as a file that runs without its code.

        What is written is read again and compared with the model.

        Args:
          path: the file, or the folder of a SavedModel.
          format: "stablehlo", "saved_model" or "onnx".
          input_spec: `flaxfit.export.InputSpec`s of the inputs; None: batches of any size of what
            the model was fitted to.
          params: parameters to write in place of the present ones.
          trainable: whether TensorFlow may train the parameters of a SavedModel.
          **options: those of `flaxfit.export.save`, `save_saved_model` or `save_onnx`.

        Returns:
          How large the file is, and how far off the model.
        """
        from flaxfit import export  # Not before it is used: `import flaxfit` stays quick.
        from flaxfit.export._spec import example

        apply = self._apply_to_export()

        if input_spec is None:
            if self._loop is None or self._loop.input_shapes is None:
                raise ValueError(
                    "export() needs input_spec= before the first fit, such as "
                    "flaxfit.export.InputSpec(('batch', 28, 28))."
                )
            input_spec = export.batch_specs(self._loop.input_shapes)
        with eagerly(self.strategy):
            self._current.begin(self._task, self.seed, lambda: example(input_spec))
        module = export.from_state(
            self._state_to_use(), apply, input_spec, params=params, trainable=trainable
        )
        return export.write(module, path, format, **options)

    @property
    def state(self) -> TrainState:
        """The training state: a copy that stays valid. Set it to continue from another one.

        Raises:
          RuntimeError: the model has not been trained.
        """
        return self._current.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._current.state = state

    @property
    def freeze(self) -> Sequence[str]:
        """Patterns of the parameters that are not trained; set it to freeze others from now on."""
        return self._task.freeze

    @freeze.setter
    def freeze(self, patterns: str | Sequence[str]) -> None:
        self._task = dataclasses.replace(self._task, freeze=patterns)
        if self._loop is not None:
            self._loop.freeze = patterns

    def find_lr(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        lowest: float = 1e-6,
        highest: float = 1.0,
        n_steps: int = 100,
    ) -> LearningRateRange:
        """Tries rising learning rates on a copy of the model, one per step, and suggests one.

        The model, and the data that a later `fit` sees, are left as they are.

        Args:
          x: inputs, or anything that gives batches again and again.
          y: targets, where `x` is arrays.
          batch_size: examples per step; None: 32.
          sample_weight: one weight per example.
          lowest: the first rate.
          highest: the last rate.
          n_steps: how many rates to try.

        Raises:
          ValueError: the optimizer's learning rate cannot be set.
        """
        with borrowed(
            x, y, sample_weight, batch_size=batch_size, seed=self.seed, owner="find_lr"
        ) as stream:
            return find_lr(
                *self._trial(stream),
                self.seed,
                strategy=self.strategy,
                lowest=lowest,
                highest=highest,
                n_steps=n_steps,
            )

    def find_batch_size(
        self,
        x: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        limit: float | None = None,
        largest: int = 65536,
    ) -> int:
        """The largest batch size whose training step fits the memory of a device.

        Steps are compiled for one example per device, two, four and so on, and the compiler tells
        what memory each needs; none is run, so nothing can run out of memory.

        Args:
          x: inputs, or anything that gives batches again and again.
          y: targets, where `x` is arrays.
          sample_weight: one weight per example.
          limit: bytes on each device; None: nine tenths of what the smallest device has.
          largest: where to stop, also where more would fit.

        Raises:
          ValueError: not even the smallest batch fits, or the backend tells no limit (a CPU).
        """
        with borrowed(
            x,
            y,
            sample_weight,
            batch_size=None,
            of_arrays=self.strategy.n_devices,
            seed=self.seed,
            owner="find_batch_size",
        ) as stream:
            return find_batch_size(
                *self._trial(stream),
                self.seed,
                strategy=self.strategy,
                limit=limit,
                largest=largest,
            )

    def _trial(self, stream: Any) -> tuple[Any, TrainTask]:
        """What to begin from, and a task, for a loop that leaves this model alone."""
        init = self._current.init if self._loop is None else self._loop.state
        return init, dataclasses.replace(self._task, data=stream)

    @property
    def step(self) -> int:
        """How many updates were done."""
        return self._current.step

    @property
    def _loop(self) -> TrainLoop | None:
        """The one loop of this model, once it was trained."""
        return self._current.loop

    @property
    def _name(self) -> str:
        """The class of the module, also where the module is a class or a factory of one."""
        return getattr(self.module, "__name__", type(self.module).__name__)

    def _repr_html_(self) -> str:
        """What it is and how far it was trained, as a notebook shows it."""
        return _html.of_model(
            self._name,
            self._current.state_in_place if self._current.has_weights else None,
            step=self.step,
            metrics=self._task.metrics,
            devices=self.strategy.devices,
            history=self.history,
        )

    def _look_at(self, data: Data) -> Any:
        """The data, after the inputs of its first batch were used to begin, if they are needed."""
        first: list[Any] = []
        batches = one_pass(data)

        def inputs() -> Any:
            first.extend(itertools.islice(batches, 1))
            if not first:
                raise ValueError("There is nothing to begin with: the data holds no batches.")
            return normalize(first[0]).inputs

        with eagerly(self.strategy):
            self._current.begin(self._task, self.seed, inputs)
        is_stream = hasattr(data, "one_epoch") and getattr(data, "is_repeatable", True)
        can_repeat = is_stream or not isinstance(data, Iterator)
        if can_repeat or not first:
            return data
        return as_stream(itertools.chain(first, batches), shared=is_shared(batches))

    def _state_to_use(self) -> TrainState:
        """The state whose parameters are used, not trained: their average, where one is kept.

        Weights that were loaded from a file bring no average along: they are used themselves.
        """
        return self._averaged(self.state)

    def _apply_to_export(self) -> Any:
        """The model in evaluation mode, which must be a function of its inputs alone."""
        if streams := self._evaluator.task.rngs:
            raise ValueError(
                f"Cannot export a model that draws random numbers (eval_rngs={streams}): a file is "
                "a function of the inputs alone. Make a Model without eval_rngs, whose module "
                "draws none in evaluation, and load_weights into it."
            )
        return self._eval.apply

    def __reduce__(self) -> Any:
        raise TypeError(
            "Cannot copy or pickle a Model: it holds compiled programs and a loop. Use "
            "save(folder) and load(folder) of a new Model, or save_weights and load_weights; "
            "model.state is a copy of the training state."
        )

    def _averaged(self, state: TrainState) -> TrainState:
        """The state with the average for its parameters, where one is kept."""
        is_other = self._task.ema is None and has_ema(state)  # Of a run with other options.
        return averaged(state) if has_average(state) and not is_other else state

    def _measure(self, state: TrainState, data: Data) -> dict[str, Any]:
        return self._evaluator.measure(self._averaged(state), data)


def _in_order(data: Data, batch_size: int | None) -> Any:
    """One pass over what `prepare` gave, cut into batches of this size where it can be."""
    if isinstance(data, tuple):
        return ArrayStream(*data, batch_size=regular_size(batch_size), epochs=1)
    return data if batch_size is None else as_stream(data, batch_size=batch_size)
