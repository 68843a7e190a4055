"""Persistence: saves, loads and exports the state of a model."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from flaxfit import checkpoints
from flaxfit.callbacks._history import History
from flaxfit.display import html, short_errors
from flaxfit.loop import Consistency, EvalLoop, Predictor
from flaxfit.model._tasks import Recipe, apply_to_export
from flaxfit.model._trainer import Trainer
from flaxfit.modules._patterns import as_patterns
from flaxfit.state import TrainState
from flaxfit.strategies import Strategy
from flaxfit.task import EvalTask, module_with
from flaxfit.tree import ArrayLike, Params, PyTree, put_like


class Persistence:
    """The part of `Model` that holds its tasks and loops, and saves and loads its state."""

    _recipe: Recipe
    _trainer: Trainer
    _evaluator: EvalLoop
    _predictor: Predictor
    _names: list[str] | None
    """The names of the latest measurement."""

    @property
    def step(self) -> int:
        """The number of completed updates."""
        return self._trainer.step

    @property
    def seed(self) -> int:
        """The seed of initial parameters, shuffling and dropout; can be set before `fit`."""
        return self._trainer.starting_point.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._trainer.starting_point.seed = seed

    @property
    def strategy(self) -> Strategy:
        """Where arrays live."""
        return self._trainer.strategy

    @property
    def history(self) -> History | None:
        """The history of the latest `fit`, also when it was interrupted."""
        return self._trainer.history

    @property
    def state(self) -> TrainState:
        """The training state: a copy that stays valid. Set it to continue from another one.

        Raises:
          RuntimeError: the model has not been trained.
        """
        return self._trainer.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._trainer.state = state

    def count_params(self) -> int:
        """Returns the number of elements of all weights: parameters and other collections.

        >>> model.count_params()
        2
        """
        return html.n_numbers(self._weights())

    def get_weights(self) -> list[np.ndarray]:
        """Returns the current weights, not their average, as copies on the host.

        The parameters come first, then the other collections by name; the arrays of each are in the
        order of their sorted paths.

        >>> [each.shape for each in model.get_weights()]
        [(1,), (1, 1)]
        """
        return [np.asarray(each) for each in self._weights()]

    @short_errors
    def set_weights(self, weights: Sequence[ArrayLike]) -> None:
        """Replaces the weights by a list in the order of `get_weights`.

        It reinitializes the optimizer state, as `load_weights` does.

        >>> model.set_weights(model.get_weights())

        Raises:
          ValueError: there are more or fewer arrays, or one has another shape.
        """
        state, own = self.state, self._weights()
        here, given = [[np.shape(each) for each in arrays] for arrays in (own, weights)]
        if here != given:
            at = next(
                (i for i, (a, b) in enumerate(zip(here, given, strict=False)) if a != b), None
            )
            where = "" if at is None else f"; number {at} has shape {given[at]}, not {here[at]}"
            raise ValueError(
                f"set_weights needs {len(here)} arrays like those of get_weights(), got "
                f"{len(given)}{where}."
            )
        Consistency(self.strategy).whole("the weights", {"weights": [*weights]})
        parts = (state.params, state.model_state)
        leaves, structure = jax.tree.flatten(parts)
        new = [put_like(n, leaf, leaf.dtype) for n, leaf in zip(weights, leaves, strict=True)]
        params, model_state = structure.unflatten(new)
        state = state.replace(params=params, model_state=model_state)
        self.state = state.replace_optimizer(self._trainer.task.optimizer)

    def _weights(self) -> list[Any]:
        return jax.tree.leaves((self.state.params, self.state.model_state))

    @short_errors
    def trained(self) -> Any:
        """Returns the module with its current weights, in evaluation mode.

        It is a new NNX module, or a bound Linen module. Its calls return what `predict` returns,
        without `precision`; if the train/eval flag is an argument of the call, pass it. An NNX
        instance given to `Model` also holds these weights after `fit`.

        >>> model.trained()(x[:2]).shape
        (2, 1)

        Raises:
          ValueError: the model was made of functions.
          RuntimeError: the model has no weights yet.
        """
        self._follow_module()
        return module_with(self._trainer.task, self._trainer.variables)

    @short_errors
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Saves the training state and the history as the checkpoint of the current step.

        With `save_companions` it also saves the companions.

        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> model.save(folder)
        """
        history = None if self.history is None else self.history.get_state()
        checkpoints.save(folder, self._trainer.checkpoint(), history=history)

    @short_errors
    def load(self, folder: str | os.PathLike[str], *, which: str | int = "latest") -> None:
        """Loads the training state of a checkpoint; a later `fit` continues from it.

        If the checkpoint holds companions, they replace those of the model.

        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> model.save(folder)
        >>> model.load(folder)

        Args:
          folder: where `save` or a `CheckpointFileWriter` put it.
          which: "latest", "best" or a step.

        Raises:
          FileNotFoundError: the folder holds no checkpoint.
          ValueError: the checkpoint does not match this model.
        """
        self._trainer.load(folder, which)

    @short_errors
    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Saves the parameters and the model's other collections in one `.safetensors` file.

        With `ema` or a schedule-free optimizer it saves the average, as `evaluate` and `predict`
        use it. `save` keeps both, to continue training.

        >>> import tempfile
        >>> model.save_weights(tempfile.mkdtemp() + "/weights.safetensors")
        """
        checkpoints.save_weights(path, self._trainer.averaged(self.state))

    @short_errors
    def load_weights(
        self,
        path: str | os.PathLike[str],
        *,
        partial: Any = None,
        translator: Any = None,
        prefix: str = "",
        **opts: Any,
    ) -> None:
        """Loads weights from a file and reinitializes the optimizer state.

        Weights that are not in the file keep their present values. The file is opened at once, but
        a model without a state is compared with it only by the first `fit`, `predict` or
        `evaluate`, whose inputs determine the shapes.

        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/weights.safetensors"
        >>> model.save_weights(path)
        >>> model.load_weights(path)

        Args:
          path: a file of `save_weights`, a folder of checkpoints (the newest one is read), or any
            file that `flaxfit.importers.load` reads. Names that begin with a collection
            ("params/...", "batch_stats/...") address all variables; other names address parameters
            only.
          partial: patterns of the paths to load ("encoder/.*"), or NNX filters; other variables
            keep their values.
          translator: a `CheckpointTranslator` from the names of the file to those of the model.
          prefix: the part of the model to load ("encoder"); other parts keep their values.
          **opts: options of the translator's rules.

        Raises:
          FileNotFoundError: the file does not exist.
          ValueError: the file is damaged, the rules do not fit it, or the weights do not fit this
            model; the message lists every difference.
        """
        if partial is not None:
            apply = self._trainer.task.apply
            partial = as_patterns("partial", partial, apply, collection=None)
        self._trainer.load_weights(
            path, partial=partial, translator=translator, prefix=prefix, **opts
        )

    @short_errors
    def export(
        self,
        path: str | os.PathLike[str],
        format: str = "stablehlo",
        input_spec: PyTree = None,
        *,
        params: Params = None,
        trainable: bool = False,
        **options: Any,
    ) -> Any:
        """Writes the model, in evaluation mode, as a file that runs without its code.

        It then reads the file and compares its results with the model's.

        >>> import tempfile
        >>> report = model.export(tempfile.mkdtemp() + "/model")
        >>> report.max_error < 1e-5
        True

        Args:
          path: the file, or the folder of a SavedModel.
          format: "stablehlo", "saved_model" or "onnx".
          input_spec: `flaxfit.export.InputSpec`s of the inputs; None: the inputs of `fit`, in
            batches of any size.
          params: parameters to write instead of the current ones.
          trainable: whether TensorFlow may train the parameters of a SavedModel.
          **options: options of `flaxfit.export.save`, `save_saved_model` or `save_onnx`.

        Returns:
          The size of the file, and its largest difference from the model.
        """
        from flaxfit import export  # Imported on use, to keep `import flaxfit` quick.
        from flaxfit.export._spec import example

        self._follow_module()
        trainer, apply = self._trainer, apply_to_export(self._evaluator.task)
        if input_spec is None:
            if trainer.input_shapes is None:
                raise ValueError(
                    "export() needs input_spec= before the first fit, such as "
                    "flaxfit.export.InputSpec(('batch', 28, 28))."
                )
            input_spec = export.batch_specs(trainer.input_shapes)
        trainer.begin(lambda: example(input_spec))
        state = trainer.averaged(trainer.state)
        module = export.from_state(state, apply, input_spec, params=params, trainable=trainable)
        return export.write(module, path, format, **options)

    def __reduce__(self) -> str:
        raise TypeError(
            "Cannot copy or pickle a Model: it holds compiled programs and a loop. Use "
            "save(folder), and load(folder) on a new Model, or save_weights and load_weights; "
            "model.state is a copy of the training state."
        )

    def _hold(self, eval_task: EvalTask) -> None:
        """Switches evaluation and prediction to a task."""
        self._trainer.lacks = self._recipe.lacks
        self._evaluator = EvalLoop(eval_task, strategy=self._trainer.strategy)
        self._predictor = Predictor(eval_task)
        self._names = None

    def _follow_module(self) -> None:
        """Remakes all tasks and loops if attributes of the NNX instance were changed."""
        instance = self._trainer.instance
        if instance.is_changed():
            frozen = {"freeze": self._trainer.task.freeze}
            recipe = self._recipe.of_module_as_it_is().changed({}, frozen)
            task, eval_task = recipe.tasks()
            self._trainer.follow_module(task, recipe.training.init)
            self._recipe = recipe
            self._hold(eval_task)
        instance.note_changes()
