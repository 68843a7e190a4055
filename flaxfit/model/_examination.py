"""Examination: describes a model, and finds learning rates and batch sizes that suit it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from flaxfit import modules
from flaxfit.data import ArrayStream, as_stream
from flaxfit.data._batch import normalize
from flaxfit.data._libraries import is_hugging_face, regular_size
from flaxfit.display import count, html, short_errors
from flaxfit.loop import TrainLoop
from flaxfit.model._evaluation import Evaluation
from flaxfit.model._find_batch_size import find_batch_size
from flaxfit.model._find_lr import LearningRateRange, check_range, find_lr
from flaxfit.step import cost_of
from flaxfit.task import describe_loss
from flaxfit.tree import Data, PyTree, shapes_of


class Examination(Evaluation):
    """The part of `Model` that describes it, and tests steps on a copy of it."""

    module: Any

    @short_errors
    def summary(self, x: Data = None) -> None:
        """Prints a table of layers: output shapes, parameters, and which are trained.

        >>> model.summary()
        Dense · 2 params
        ...

        Args:
          x: inputs, for their shapes; not needed after `fit`.
        """
        self._follow_module()
        inputs = self._trainer.input_shapes
        if isinstance(x, tuple | list) and x and all(isinstance(n, int | None) for n in x):
            raise TypeError(
                f"summary() takes inputs, such as x[:1], got the shape {x}. model.build((None, "
                "...)) takes a shape, with None as the size of the batch; call it before summary()."
            )
        if x is not None:
            first = next(as_stream(self._inputs(x)))
            inputs = shapes_of(normalize(self._trainer.task.roles.inputs_of(first)).inputs)
        elif inputs is None:
            raise ValueError("summary() needs inputs before the first fit: model.summary(x).")
        trainer = self._trainer
        text = modules.summarize(
            self.module,
            inputs,
            name=trainer.name,
            variables=trainer.state_in_place.variables if trainer.has_weights else None,
            freeze=trainer.task.freeze if trainer.trainable else (".*",),
            rngs=self._evaluator.task.rngs,
            count_flops=lambda function, *shapes: cost_of(function, *shapes).flops,
        )
        print(text)

    @short_errors
    def find_lr(
        self,
        x: Data,
        y: PyTree = None,
        *,
        batch_size: int | None = None,
        sample_weight: PyTree = None,
        lowest: float = 1e-6,
        highest: float = 1.0,
        n_steps: int = 100,
    ) -> LearningRateRange:
        """Tries rising learning rates on a copy of the model, one per step, and suggests one.

        The model and the position of the data stay as they are.

        >>> model = Model(nn.Dense(1), optax.sgd(0.1), "mse")
        >>> 0 < model.find_lr(x, y, lowest=1e-3, n_steps=20).suggestion < 1
        True

        Args:
          x, y, batch_size, sample_weight: as in `fit`; the data can be passed over repeatedly.
          lowest: the first rate.
          highest: the last rate.
          n_steps: the number of rates.

        Returns:
          The rates, their losses, and the suggested rate.

        Raises:
          ValueError: the optimizer's learning rate cannot be set.
        """
        check_range(lowest, highest, n_steps)
        self._follow_module()
        data, _ = self._prepared(x, y, sample_weight)
        with self._trial("find_lr", data, batch_size) as loop:
            return find_lr(loop, lowest=lowest, highest=highest, n_steps=n_steps)

    @short_errors
    def find_batch_size(
        self,
        x: Data,
        y: PyTree = None,
        *,
        sample_weight: PyTree = None,
        limit: float | None = None,
        largest: int = 65536,
    ) -> int:
        """Returns the largest batch size whose training step fits the memory of a device.

        It compiles steps for one, two, four and more examples per device, and reads the memory that
        the compiler reports. No step is run, so nothing can run out of memory.

        >>> model.find_batch_size(x, y, limit=2**20, largest=4)
        4

        Args:
          x, y, sample_weight: as in `fit`; the data can be passed over repeatedly.
          limit: bytes on each device; None: nine tenths of the smallest device's memory.
          largest: the largest size to try.

        Returns:
          The number of examples per step, over all devices.

        Raises:
          ValueError: not even the smallest batch fits, or the backend reports no limit (a CPU).
        """
        self._follow_module()
        data, _ = self._prepared(x, y, sample_weight)
        size = self.strategy.n_devices if isinstance(data, tuple) else None
        with self._trial("find_batch_size", data, size) as loop:
            return find_batch_size(loop, limit=limit, largest=largest)

    @contextlib.contextmanager
    def _trial(self, owner: str, data: Data, batch_size: int | None) -> Iterator[TrainLoop]:
        """Yields a loop over a copy of the state; restores the position of the data at the end.

        The order is random. `owner` is the name of the caller, for the error about data that can be
        iterated only once.
        """
        if isinstance(data, tuple):
            size = regular_size(batch_size)
            stream = ArrayStream(*data, batch_size=size, shuffle=True, seed=self.seed)
        else:
            shuffle = is_hugging_face(data)
            stream = as_stream(data, batch_size=batch_size, shuffle=shuffle, seed=self.seed)
        if not getattr(stream, "is_repeatable", True):
            raise ValueError(
                f"{owner} would consume this data, which can be iterated only once: pass arrays, a "
                "list of batches or a loader."
            )
        position = stream.get_state() if hasattr(stream, "get_state") else None
        trainer = self._trainer
        try:
            init = trainer.starting_point.init if trainer.loop is None else trainer.loop.state
            yield trainer.make_loop(init, stream, stdout=False)
        finally:
            if position is not None:
                stream.set_state(position)

    def __repr__(self) -> str:
        trainer, measured = self._trainer, self._evaluator.task
        parts = [trainer.name]
        if measured.loss is not None:
            parts.append(f"loss={describe_loss(measured.loss)}")
        if measured.metrics:
            parts.append(f"metrics=[{', '.join(measured.metrics)}]")
        parts.append(f"step={trainer.step}")
        if trainer.has_weights:
            parts.append(f"{count(html.n_numbers(trainer.state_in_place.params))} params")
        return f"Model({', '.join(parts)})"

    def _repr_html_(self) -> str:
        trainer = self._trainer
        return html.of_model(
            trainer.name,
            trainer.state_in_place if trainer.has_weights else None,
            step=trainer.step,
            metrics=trainer.task.metrics,
            devices=self.strategy.devices,
            history=self.history,
        )
