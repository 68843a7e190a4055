"""Evaluation: what a model measures and predicts, over a data set."""

from flaxfit.data._fit_arguments import prepare, prepare_inputs
from flaxfit.loop._predictor import Predictor
from flaxfit.model._persistence import Persistence
from flaxfit.model._streams import in_order
from flaxfit.tree._types import Data, PyTree


class Evaluation(Persistence):
    """The part of `Model` that applies it to data: `evaluate` and `predict`."""

    _predictor: Predictor

    def evaluate(
        self,
        x: Data,
        y: PyTree = None,
        *,
        batch_size: int | None = None,
        sample_weight: PyTree = None,
    ) -> dict[str, float]:
        """Measures the loss and the metrics, exactly for any number of examples and devices."""
        data = in_order(prepare(self._columns(x, y), y, sample_weight)[0], batch_size)
        data = self._trainer.begin_with(data)
        self._evaluator.attach(self._trainer)  # A checkpoint may have brought its companions.
        return self._evaluator.measure(self._trainer.averaged(self._trainer.state_in_place), data)

    def predict(self, x: Data, *, batch_size: int | None = None) -> PyTree:
        """Returns the model's outputs as NumPy arrays, one row per example of `x`, in order."""
        x = self._trainer.task.roles.inputs_of_data_set(x)
        data = self._trainer.begin_with(in_order(prepare_inputs(x), batch_size))
        state = self._trainer.averaged(self._trainer.state_in_place)
        return self._predictor(state, data, self.strategy)

    def _columns(self, data: Data, y: PyTree = None) -> Data:
        """A mapping of arrays as a data set, its columns taken by name; other data unchanged."""
        return data if y is not None else self._trainer.task.roles.of_data_set(data)
