"""FlaxClassifier and FlaxRegressor: scikit-learn's own checks, and what they do not ask."""

import copy
import io
import sys
from typing import Any

import jax
import joblib
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from marks import thorough
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import flaxfit as ff
from flaxfit.callbacks import EarlyStopping
from flaxfit.sklearn import FlaxClassifier, FlaxRegressor

# Of all optimizers it compiles in the least time.
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "n_devices": 1}
QUICK = {**SGD, "epochs": 10, "hidden_layer_sizes": ()}  # A single layer.
# It compares to 1e-7, which is the rounding of float32; a test below compares to 1e-4.
CANNOT_APPLY = {"check_sample_weight_equivalence_on_dense_data"}


def checks():
    """scikit-learn's; of those that both take, and of several forms, the first is enough."""
    seen = set()
    for kind in (FlaxClassifier, FlaxRegressor):
        given: Any = estimator_checks_generator(kind(**QUICK))
        for estimator, check in given:
            name = check.func.__name__
            if name in CANNOT_APPLY:
                continue
            marks = [pytest.mark.thorough if name in seen else pytest.mark.slow]
            seen.add(name)
            yield pytest.param(estimator, check, id=f"{kind.__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("estimator", "check"), [*checks()])
def test_scikit_learn_accepts_the_estimator(estimator, check, monkeypatch):
    # Without it `check_array_api_input` is skipped. SciPy reads it when it is imported only, but
    # the arrays of that check are NumPy's.
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")
    check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator", [FlaxClassifier(**QUICK), thorough(FlaxRegressor(**QUICK))], ids=repr
)
def test_a_weight_counts_like_so_many_copies(estimator):
    rng = np.random.default_rng(0)
    x, y, w = rng.random((15, 4)), rng.integers(0, 3, 15), rng.integers(0, 4, 15)
    estimator.set_params(batch_size=64)  # All in one batch: otherwise the batches would differ.
    weighted = clone(estimator).fit(x, y, w)
    repeated = clone(estimator).fit(x.repeat(w, 0), y.repeat(w))
    method = "predict_proba" if hasattr(estimator, "predict_proba") else "predict"
    found = [getattr(fitted, method)(x) for fitted in (weighted, repeated)]
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_it_learns_digits_as_images_with_labels_that_are_words():
    x, y = load_digits(return_X_y=True)
    words = np.array(["zero", "one", "two", "three"])
    x, y = x[y < 4].reshape(-1, 8, 8, 1) / 16, words[y[y < 4]]

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(8, (3, 3), strides=2)(x))
            return nn.Dense(4)(x.reshape(len(x), -1))

    fitted = FlaxClassifier(CNN(), optax.adamw, learning_rate=1e-2, epochs=8).fit(x[:500], y[:500])
    assert list(fitted.classes_) == sorted(words)
    assert fitted.score(x[500:], y[500:]) > 0.9
    assert isinstance(fitted.model_, ff.Model)
    assert len(fitted.history_["loss"]) == 8


@pytest.mark.slow
def test_it_works_in_pipelines_searches_and_cross_validation():
    x, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), FlaxClassifier(**QUICK))
    grid = {"flaxclassifier__learning_rate": [1e-6, 1e-2]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(x, y)
    assert search.best_params_ == {"flaxclassifier__learning_rate": 1e-2}
    assert cross_val_score(pipeline, x, y, cv=2).min() > 0.7


@pytest.mark.slow
def test_several_targets_are_fitted_at_once():
    x = load_diabetes(return_X_y=True)[0]
    y = np.stack([x[:, 0] + x[:, 1], x[:, 2]], 1) * 20
    predicted = FlaxRegressor(**SGD, epochs=30).fit(x, y).predict(x)
    assert predicted.shape == y.shape
    assert np.corrcoef(predicted[:, 1], y[:, 1])[0, 1] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("squeezes", [True, False])
def test_a_module_may_give_a_number_or_a_column_for_one_target(squeezes):
    class Line(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)[:, 0] if squeezes else nn.Dense(1)(x)

    x = np.linspace(-1, 1, 32)[:, None]
    fitted = FlaxRegressor(Line(), optax.sgd(0.3), n_devices=1).fit(x, 2 * x[:, 0])
    np.testing.assert_allclose(fitted.predict(x), 2 * x[:, 0], atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FlaxClassifier, thorough(FlaxRegressor)])
def test_an_objective_takes_the_place_of_the_loss(kind):
    def objective(apply, batch, rngs):
        return 7.0 + 0.0 * apply(*batch.inputs)[:, 0]

    x, y = np.ones((8, 2)), np.arange(8) % 2
    options = {**QUICK, "epochs": 1, "model_options": {"objective": objective}}
    assert kind(**options).fit(x, y).history_["loss"] == [7.0]
    with pytest.raises(ValueError, match="either a loss or an objective"):
        kind(**options, loss="mae").fit(x, y)


@pytest.mark.slow
def test_a_fitted_estimator_is_copied_and_saved_without_its_programs():
    x, y = load_iris(return_X_y=True)
    options = {"clip_norm": 1.0, "ema": 0.9}
    fitted = FlaxClassifier(**{**QUICK, "epochs": 2}, model_options=options).fit(x, y)
    expected = fitted.predict_proba(x)
    file = io.BytesIO()
    joblib.dump(fitted, file)
    file.seek(0)
    for copied in copy.deepcopy(fitted), joblib.load(file):
        np.testing.assert_array_equal(copied.predict_proba(x), expected)
        assert copied.model_.step == fitted.model_.step
        assert copied.history_["loss"] == fitted.history_["loss"]
    held = fitted.__getstate__()["model_"]
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(held))


@pytest.mark.slow
def test_an_nnx_instance_stays_as_it_is_and_each_fit_begins_with_its_weights():
    x, y = load_iris(return_X_y=True)
    layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    kernel = np.asarray(layer.kernel[...])
    estimator = FlaxClassifier(layer, **{**QUICK, "epochs": 2})
    first, second = (estimator.fit(x, y).predict_proba(x) for _ in range(2))
    np.testing.assert_array_equal(layer.kernel[...], kernel)
    np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_options_reach_the_model_and_callbacks_begin_anew_with_each_fit():
    x, y = load_iris(return_X_y=True)
    stopping = EarlyStopping("loss", mode="max", patience=1)  # The loss falls: it stops soon.
    of_model, of_fit = {"metrics": ["accuracy"]}, {"callbacks": [stopping]}
    options = {**QUICK, "epochs": 5, "model_options": of_model, "fit_options": of_fit}
    estimator = FlaxClassifier(**options)
    lengths = [len(estimator.fit(x, y).history_["loss"]) for _ in range(2)]
    assert lengths[0] == lengths[1] < 5
    assert "accuracy" in estimator.history_


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"optimizer": "adamm"}, "no optimizer 'adamm' in Optax"),
        ({"n_devices": 99}, "n_devices must be 1 to"),
        ({"loss": "crossentrpy"}, "Did you mean crossentropy"),
    ],
    ids=["optimizer", "n_devices", "loss"],
)
def test_a_wrong_parameter_is_found_by_fit(parameters, message):
    estimator = FlaxClassifier(**parameters)
    with pytest.raises(ValueError, match=message):
        estimator.fit(np.zeros((4, 2)), [0, 1, 0, 1])


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "flaxfit.sklearn")
    monkeypatch.delattr(ff, "sklearn", raising=False)
    with pytest.raises(ImportError, match=r'pip install "flaxfit\[sklearn\]"'):
        _ = ff.sklearn
