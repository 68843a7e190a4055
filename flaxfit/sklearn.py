"""FlaxClassifier and FlaxRegressor: models as estimators of scikit-learn.

They work in its pipelines, searches and cross-validation. Only this module needs scikit-learn.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
import optax
from flax import linen as nn

from flaxfit import display, losses, model, strategies
from flaxfit.tree import ArrayLike, LossFn

try:
    from scipy.special import softmax
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        'flaxfit.sklearn needs scikit-learn 1.6 or newer: pip install "flaxfit[sklearn]"'
    ) from error

__all__ = ["FlaxClassifier", "FlaxRegressor"]


class _FlaxEstimator(BaseEstimator):
    """The base class of classifier and regressor; each `fit` makes a new `Model`."""

    def __init__(
        self,
        module: Any = None,
        optimizer: object = "adam",
        loss: str | LossFn | None = None,
        *,
        learning_rate: float | optax.Schedule = 1e-3,
        hidden_layer_sizes: Sequence[int] = (100,),
        batch_size: int = 32,
        epochs: int = 100,
        random_state: int | np.random.RandomState | None = 0,
        n_devices: int | None = None,
        verbose: int | str = 0,
        model_options: Mapping[str, Any] | None = None,
        fit_options: Mapping[str, Any] | None = None,
    ):
        # As scikit-learn requires: stored as they are, and validated by `fit`.
        self.module = module
        self.optimizer = optimizer
        self.loss = loss
        self.learning_rate = learning_rate
        self.hidden_layer_sizes = hidden_layer_sizes
        self.batch_size = batch_size
        self.epochs = epochs
        self.random_state = random_state
        self.n_devices = n_devices
        self.verbose = verbose
        self.model_options = model_options
        self.fit_options = fit_options

    def __getstate__(self) -> dict[str, Any]:
        """Returns the parameters and the fitted state as NumPy arrays, without programs."""
        state: Any = super().__getstate__()
        if "model_" not in state:
            return state
        trained = self.model_.state
        trained = trained.replace(key=jax.random.key_data(trained.key))
        return {**state, "model_": jax.device_get(trained)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model_" in state:
            trained = state["model_"]
            self.model_ = self._make_model()
            self.model_.state = trained.replace(key=jax.random.wrap_key_data(trained.key))

    def _make_model(self) -> model.Model:
        # Training writes into an NNX instance, and a parameter must stay as it is.
        module = copy.deepcopy(self.module)
        if module is None:
            module = _MLP((*self.hidden_layer_sizes, self._n_outputs))
        options = self.model_options or {}
        computes_loss = self.loss is None and options.get("objective") is not None
        return model.Model(
            module,
            _optimizer_of(self.optimizer, self.learning_rate),
            None if computes_loss else self._loss(),
            strategy=strategies.DataParallel(_first_devices(self.n_devices)),
            seed=self._seed,
            **options,
        )

    def _loss(self) -> str | LossFn:
        raise TypeError("Make a FlaxClassifier or a FlaxRegressor.")

    def _fit(
        self, x: ArrayLike, targets: ArrayLike, sample_weight: ArrayLike, n_outputs: int
    ) -> Self:
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, x, ensure_non_negative=True)
            if not np.any(sample_weight):
                raise ValueError("Sample weights must contain at least one non-zero number.")
        self._n_outputs = n_outputs
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.model_ = self._make_model()
        self.history_ = self.model_.fit(
            x,
            targets,
            batch_size=self.batch_size,
            epochs=self.epochs,
            sample_weight=sample_weight,
            verbose=self.verbose,
            # Callbacks have a state, and a parameter must stay as it is.
            **copy.deepcopy(dict(self.fit_options or {})),
        )
        return self

    def _outputs(self, x: ArrayLike) -> np.ndarray:
        check_is_fitted(self)
        x = validate_data(self, x, reset=False, allow_nd=True)
        return self.model_.predict(x, batch_size=self.batch_size)


class FlaxClassifier(ClassifierMixin, _FlaxEstimator):
    """Trains a classifier with the methods of scikit-learn, for labels of any kind.

    >>> from sklearn.datasets import load_iris
    >>> x, y = load_iris(return_X_y=True)
    >>> classifier = FlaxClassifier(learning_rate=1e-2, epochs=30).fit(x, y)
    >>> classifier.score(x, y) > 0.9
    True

    Args:
      module: as in `Model`, with one logit per class as output; None: a multilayer perceptron
        (MLP).
      optimizer: the name of an Optax optimizer; a function of the learning rate, such as
        `optax.adamw`; or a transformation, which has its own learning rate.
      loss: a name, or a function `(logits, labels) -> values` of the labels 0, 1, ..., which index
        `classes_`; None: "crossentropy", unless `model_options` has an objective.
      learning_rate: a number or a schedule.
      hidden_layer_sizes: the widths of the hidden layers of the MLP.
      batch_size: examples per step, over all devices.
      epochs: passes over the data.
      random_state: the seed for parameter initialization, shuffling and dropout.
      n_devices: the number of local devices to use; None: all.
      verbose: as in `Model.fit`.
      model_options: more arguments of `Model`, such as `{"clip_norm": 1.0}`.
      fit_options: more arguments of `Model.fit`, such as `{"callbacks": [EarlyStopping("loss")]}`.

    Attributes:
      classes_: the labels, sorted.
      model_: the trained `Model`.
      history_: the `History` of its `fit`.
      n_features_in_: the size of the second axis of the inputs.
    """

    classes_: np.ndarray

    @display.short_errors
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike = None) -> Self:
        """Trains from the beginning.

        >>> classifier.fit(x, y).classes_
        array([0, 1, 2])
        """
        X, y = validate_data(self, X, y, allow_nd=True)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "A classifier needs examples of 2 classes or more, and y holds one class only: "
                f"{self.classes_[0]!r}."
            )
        return self._fit(X, labels.astype(np.int32), sample_weight, len(self.classes_))

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Returns the probabilities of the classes, in the order of `classes_`.

        >>> classifier.predict_proba(x[:2]).shape
        (2, 3)
        """
        logits = self._outputs(X).astype(np.float64)
        return softmax(logits, axis=-1)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Returns the most probable classes.

        >>> classifier.predict(x[:2])
        array([0, 0])
        """
        outputs = self._outputs(X)  # Before `classes_`, which an unfitted estimator lacks.
        return self.classes_[outputs.argmax(-1)]

    def _loss(self) -> str | LossFn:
        return "crossentropy" if self.loss is None else self.loss


class FlaxRegressor(RegressorMixin, _FlaxEstimator):
    """Trains a regressor with the methods of scikit-learn, for one or more targets per example.

    >>> x = np.linspace(-1, 1, 64)[:, None]
    >>> regressor = FlaxRegressor(learning_rate=1e-2).fit(x, x[:, 0] ** 2)
    >>> regressor.score(x, x[:, 0] ** 2) > 0.9
    True

    Args:
      module: as in `Model`, with outputs of the shape of `y`, or with one output per example; None:
        a multilayer perceptron (MLP).
      loss: a name, or a function `(outputs, targets) -> values`; None: "mse", unless
        `model_options` has an objective.
      optimizer, learning_rate, hidden_layer_sizes, batch_size, epochs: as in `FlaxClassifier`.
      random_state, n_devices, verbose, model_options, fit_options: as in `FlaxClassifier`.

    Attributes:
      model_: the trained `Model`.
      history_: the `History` of its `fit`.
      n_features_in_: the size of the second axis of the inputs.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @display.short_errors
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike = None) -> Self:
        """Trains from the beginning.

        >>> regressor.fit(x, x[:, 0] ** 2).predict(x).shape
        (64,)
        """
        X, y = validate_data(self, X, y, allow_nd=True, multi_output=True, y_numeric=True)
        self._shape = y.shape[1:]
        n_outputs = y.size // len(y)
        return self._fit(X, y.ravel() if n_outputs == 1 else y, sample_weight, n_outputs)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Returns the predictions, in the shape of `y`.

        >>> regressor.predict(x).shape
        (64,)
        """
        outputs = self._outputs(X).astype(np.float64)
        return outputs.reshape(len(outputs), *self._shape)

    def _loss(self) -> str | LossFn:
        loss = losses.resolve("mse" if self.loss is None else self.loss)
        return _squeezed(loss) if self._n_outputs == 1 else loss


class _MLP(nn.Module):
    """A multilayer perceptron on flattened inputs."""

    features: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(len(x), -1)
        for n in self.features[:-1]:
            x = nn.relu(nn.Dense(n)(x))
        return nn.Dense(self.features[-1])(x)


def _first_devices(n: int | None) -> Sequence[Any] | None:
    """Returns the first local devices; unlike devices, a number can be cloned and pickled."""
    if n is None:
        return None
    devices = jax.local_devices()
    if not 1 <= n <= len(devices):
        raise ValueError(f"n_devices must be 1 to {len(devices)}, got {n}.")
    return devices[:n]


def _squeezed(loss: LossFn) -> LossFn:
    """Removes an axis of length 1 from outputs if the targets have none."""

    def values(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        is_column = outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1
        return loss(outputs[..., 0] if is_column else outputs, targets)

    return values


def _optimizer_of(optimizer: object, learning_rate: float | optax.Schedule) -> object:
    make = getattr(optax, optimizer, None) if isinstance(optimizer, str) else optimizer
    if isinstance(optimizer, str) and not callable(make):
        raise ValueError(
            f"There is no optimizer {optimizer!r} in Optax: give a name such as 'adam', a "
            "function of the learning rate, or a transformation."
        )
    return make(learning_rate) if callable(make) else make
