"""Evaluation: measures and predicts with a model, over a data set or one batch."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from flaxfit import display
from flaxfit.callbacks import CSVLogger, Events, JSONLogger, StopOnNaN, TensorBoardLogger
from flaxfit.callbacks._callback import Callback
from flaxfit.data._batch import Batch, normalize
from flaxfit.data._class_weights import ClassWeightedStream
from flaxfit.data._fit_arguments import prepare, prepare_inputs
from flaxfit.display import short_errors
from flaxfit.loop import CallbackList, Delivery, as_tuple, update_statistics
from flaxfit.model._pass_bar import PassBar
from flaxfit.model._persistence import Persistence
from flaxfit.model._streams import in_order, known_length, training_stream
from flaxfit.state import Checkpoint
from flaxfit.tree import Data, PyTree, whole_number


class Evaluation(Persistence):
    """The part of `Model` that applies it to data: `evaluate`, `predict`, `predictions`."""

    @property
    def metrics_names(self) -> list[str]:
        """The names of the values of `evaluate`, in order: "loss" first, if there is one."""
        if self._names is not None:
            return list(self._names)
        task = self._evaluator.task
        has_loss = task.loss is not None or task.objective is not None
        # Collected metrics come after summed ones.
        metrics = sorted(task.metrics, key=lambda name: task.metrics[name].max_rows is not None)
        return [*(["loss"] if has_loss else []), *metrics]

    @short_errors
    def evaluate(
        self,
        x: Data,
        y: PyTree = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: PyTree = None,
        steps: int | None = None,
        callbacks: Callback | Iterable[Callback] | None = (),
        return_dict: bool = True,
    ) -> Any:
        """Measures the loss and the metrics, exactly for any number of examples and devices.

        A model without weights is initialized first, as by `fit`.

        >>> model.evaluate(x, y)["loss"] < 0.1
        True

        Args:
          x, y, batch_size, sample_weight: as in `fit`.
          verbose: "auto": a bar on a terminal or in a notebook, if it takes longer than half a
            second; 1: also a line at the end; 2: only that line; 0: nothing.
          steps: the number of batches to measure; None: all of one pass.
          callbacks: functions `Checkpoint -> Checkpoint | None`, called once with the metrics.
          return_dict: whether to return a dict; False: a list in the order of `metrics_names`, or a
            single number if there is only one.

        Returns:
          The means over all examples, by name.

        Raises:
          ValueError: there is no loss and no metric, or the data does not match the model or the
            loss.
          TypeError: the data is not numeric, or targets are missing.
        """
        users = _checked("evaluate", callbacks)
        if not self.metrics_names:
            raise ValueError(
                "There is nothing to measure: the Model was given neither a loss nor metrics. Call "
                "compile(loss='mse', metrics=['mae']) first, or pass them to Model."
            )
        self._follow_module()
        data, _ = self._prepared(x, y, sample_weight)
        data = self._trainer.begin_with(in_order(data, batch_size))
        self._evaluator.attach(self._trainer)  # A checkpoint may have brought its companions.
        state = self._trainer.averaged(self._trainer.state_in_place)
        _notify(users, "on_test_begin", {})
        with self._bar("Evaluate", data, steps, verbose) as bar:
            found = self._evaluator.measure(state, data, n_steps=steps, watch=bar)
            found = self._shown(users, found)
            _notify(users, "on_test_end", found)
            bar.finish(found)
        self._names = list(found)
        return found if return_dict else _in_order(list(found.values()))

    @short_errors
    def predict(
        self,
        x: Data,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Callback | Iterable[Callback] | None = (),
    ) -> PyTree:
        """Returns the model's outputs as NumPy arrays, one row per example of `x`, in order.

        A list of arrays passes several inputs, as in `fit`. Batches may also contain targets, which
        are ignored.

        >>> model.predict(x).shape
        (64, 1)

        Args:
          x: inputs, or anything that yields batches.
          batch_size: examples per step, over all devices; None: 32. Batches keep their size.
          verbose, steps, callbacks: as in `evaluate`; callbacks receive a checkpoint without
            metrics.

        Returns:
          The outputs, `(examples, ...)`, in the structure that the model returns.

        Raises:
          ValueError: the outputs of the batches have shapes that cannot be joined.
        """
        users = _checked("predict", callbacks)
        data, state = self._to_predict(x, batch_size)
        _notify(users, "on_predict_begin", {})
        with self._bar("Predict", data, steps, verbose) as bar:
            found = self._predictor(state, data, self.strategy, n_steps=steps, watch=bar)
            self._shown(users, {})
            _notify(users, "on_predict_end", {})
            bar.finish({})
        return found

    @short_errors
    def update_statistics(self, x: Data, batch_size: int | None = None) -> None:
        """Recomputes the statistics of BatchNorm in one pass; see `flaxfit.update_statistics`.

        For averaged weights: after a `fit` with `AverageWeights`, or with `ema`.

        >>> import numpy as np, optax
        >>> from flax import linen as nn
        >>> from flaxfit import Model
        >>> model = Model(nn.BatchNorm(), optax.sgd(0.1), "mse")
        >>> model.update_statistics(np.float32([[1.0], [3.0]]))
        >>> np.round(model.state.model_state["batch_stats"]["mean"], 3)
        Array([2.], dtype=float32)

        Args:
          x, batch_size: as in `predict`, best the training data: arrays are shuffled.
        """
        self._follow_module()
        options = {"shuffle": None, "epochs": 1, "steps_per_epoch": None, "n_before": 0}
        inputs = self._inputs(x)
        stream = training_stream(inputs, batch_size=batch_size, seed=self.seed, **options)
        data = self._trainer.begin_with(stream)
        task = self._trainer.task
        self.state = update_statistics(task, self.state, data, strategy=self.strategy)

    @short_errors
    def predictions(
        self, x: Data, batch_size: int | None = None, *, steps: int | None = None
    ) -> Iterator[tuple[Batch, PyTree]]:
        """Iterates over batches and their outputs, which `predict` returns all at once.

        Outputs are NumPy arrays without padding, in order. A few batches are read ahead.

        >>> import numpy as np
        >>> from flaxfit import Model
        >>> model = Model((lambda rngs, x: {"params": 2.0}, lambda v, x, **_: v["params"] * x))
        >>> [outputs.tolist() for batch, outputs in model.predictions(np.arange(3.0), 2)]
        [[0.0, 2.0], [4.0]]

        Args:
          x, batch_size, steps: as in `predict`.

        Raises:
          RuntimeError: the model was trained, or given other weights, since this call.
        """
        data, state = self._to_predict(x, batch_size)
        found = self._predictor.over(state, data, self.strategy, n_steps=steps)
        return self._while_unchanged(found, self._trainer.revision)

    def _while_unchanged(
        self, found: Iterator[tuple[Batch, PyTree]], revision: object
    ) -> Iterator[tuple[Batch, PyTree]]:
        """Yields from an iterator that reads the current state, until a step donates that."""
        while True:
            if self._trainer.revision != revision:
                raise RuntimeError(
                    "The model was trained or given other weights while its predictions were "
                    "being read, so the weights that they need are gone. Read all predictions "
                    "first: list(model.predictions(x))."
                )
            if (each := next(found, None)) is None:
                return
            yield each

    @short_errors
    def train_on_batch(
        self,
        x: Data,
        y: PyTree = None,
        sample_weight: PyTree = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains one step on one batch of any size; you can alternate it with `fit`.

        The step counts as in `fit`. An NNX instance receives the weights when a `fit` ends.

        >>> model.train_on_batch(x, y) < 0.1
        True

        Args:
          x, y, sample_weight, class_weight: arrays, as in `fit`.
          return_dict: whether to return a dict of all values of the step.

        Returns:
          As in Keras: the loss, or a list of the loss and the metrics, of this batch alone.
          Collected metrics are nan.
        """
        self._follow_module()
        found, _ = self._prepared(x, y, sample_weight)
        _n_examples(found, "train_on_batch")
        if class_weight is not None:  # A single batch need not contain all labels.
            found = next(ClassWeightedStream(iter([found]), class_weight))
        numbers = self._trainer.step_on(normalize(self._trainer.task.roles(found))).scalars
        if return_dict:
            return dict(numbers)
        of_step = ("loss", *self._trainer.task.metrics)
        names = dict.fromkeys(("loss", *self.metrics_names))
        listed = [name for name in names if name in numbers or name not in of_step]
        return _in_order([numbers.get(name, math.nan) for name in listed])

    @short_errors
    def test_on_batch(
        self,
        x: Data,
        y: PyTree = None,
        sample_weight: PyTree = None,
        return_dict: bool = False,
    ) -> Any:
        """Evaluates one batch of any size; returns numbers without names by default, as in Keras.

        >>> model.test_on_batch(x, y) < 0.1
        True

        Args:
          x, y, sample_weight: arrays, as in `evaluate`.
          return_dict: as in `evaluate`.
        """
        size = _n_examples(self._prepared(x, y, sample_weight)[0], "test_on_batch")
        size += -size % self.strategy.n_devices  # A smaller batch may run at its own size.
        return self.evaluate(x, y, size, 0, sample_weight=sample_weight, return_dict=return_dict)

    @short_errors
    def predict_on_batch(self, x: Data) -> PyTree:
        """Returns the outputs for one batch of any size, as `predict` does.

        >>> model.predict_on_batch(x).shape
        (64, 1)
        """
        return self.predict(x, _n_examples(self._inputs(x), "predict_on_batch"), 0)

    def _to_predict(self, x: Data, batch_size: int | None, **options: bool) -> tuple[Data, PyTree]:
        """Returns the data of `predict`, and the state to predict with."""
        self._follow_module()
        inputs = self._inputs(x)
        if isinstance(inputs, tuple):
            _check_is_batch(inputs[0], self._trainer.input_shapes)
        data = self._trainer.begin_with(in_order(inputs, batch_size), **options)
        return data, self._trainer.averaged(self._trainer.state_in_place)

    def _bar(self, label: str, data: Data, steps: int | None, verbose: int | str) -> PassBar:
        if steps is not None:
            whole_number("steps", steps)
        n = known_length(data)
        if steps is not None and n is not None and n < steps:
            display.say(f"the data ends after {n:,} of {steps:,} steps")
        known = [each for each in (n, steps) if each is not None]
        return PassBar(label, min(known) if known else None, verbose)

    def _shown(self, callbacks: tuple[Any, ...], metrics: dict[str, Any]) -> dict[str, Any]:
        """Calls callbacks with a checkpoint of these metrics; returns its metrics afterwards."""
        callbacks = tuple(each for each in callbacks if not isinstance(each, Events))
        if not callbacks:
            return metrics
        state = self._trainer.state
        checkpoint = Checkpoint(step=int(state.step), state=state, metrics=metrics)
        own = CallbackList(callbacks)
        try:
            delivery = Delivery(checkpoint, own, lambda given: given)
            return dict(delivery.finish(lambda given: given, lambda: (self.step,)).metrics)
        finally:
            own.close()

    def _prepared(
        self,
        x: Data,
        y: PyTree,
        sample_weight: PyTree,
        class_weight: Mapping[int, float] | str | None = None,
        validation_split: float = 0.0,
        validation_data: Data = None,
    ) -> tuple[Data, Data]:
        """Converts the data of `fit` and `evaluate` by `prepare`, selecting columns by name."""
        roles = self._trainer.task.roles
        return prepare(
            roles.of_data_set(x) if y is None else x,
            y,
            sample_weight,
            class_weight,
            validation_split,
            roles.of_data_set(validation_data),
            self.seed,
            outputs=roles.outputs,
        )

    def _inputs(self, x: Data) -> Data:
        """Converts the data of `predict` by `prepare_inputs`, selecting columns by name."""
        return prepare_inputs(self._trainer.task.roles.of_data_set(x, has_targets=False))


_NEED_NO_LOOP = (CSVLogger, Events, JSONLogger, StopOnNaN, TensorBoardLogger)


def _checked(owner: str, callbacks: Any) -> tuple[Any, ...]:
    """Returns callbacks as a tuple; refuses those that need a training loop."""
    users = as_tuple(callbacks)
    for each in users:
        if hasattr(each, "attach") and not isinstance(each, _NEED_NO_LOOP):
            raise TypeError(
                f"{owner} has no training loop to attach {type(each).__name__} to: pass it to fit. "
                "Only functions of a checkpoint, Events and row loggers work here."
            )
    return users


def _notify(callbacks: tuple[Any, ...], event: str, metrics: Mapping[str, Any]) -> None:
    """Calls the functions of an event with the scalar metrics."""
    logs = {name: float(value) for name, value in metrics.items() if display.is_scalar(value)}
    for each in callbacks:
        if isinstance(each, Events):
            each.notify(event, dict(logs))


def _n_examples(data: Data, owner: str) -> int:
    """Returns the number of examples in one batch of arrays."""
    if not isinstance(data, tuple):
        raise TypeError(
            f"{owner} takes the arrays of one batch, got {type(data).__name__}: {data!r:.60}. "
            "Pass loaders and lists of batches to fit, evaluate or predict."
        )
    return len(jax.tree.leaves(data)[0])


def _check_is_batch(inputs: PyTree, known: PyTree) -> None:
    """Refuses a single example, whose first axis would be taken for the batch axis."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(inputs)]
    if len(shapes) == 1 and shapes == [each.shape[1:] for each in jax.tree.leaves(known)]:
        raise ValueError(
            f"predict takes a batch of examples, but x has the shape {shapes[0]} of one: pass "
            "x[None]."
        )


def _in_order(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
