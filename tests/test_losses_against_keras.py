"""The losses of Keras and their options: values and gradients, on ordinary and awkward inputs."""

import jax
import numpy as np
import pytest
import scipy.special

from flaxfit import losses

GENERATOR = np.random.default_rng(0)
N, N_CLASSES = 14, 5


def rows_of_numbers():
    """Random numbers, far ones, and zeros."""
    near = GENERATOR.normal(size=(6, N_CLASSES)).astype(np.float32)
    return np.concatenate([near, 5 * near, np.zeros((2, N_CLASSES), np.float32)])


OUTPUTS, NUMBERS = rows_of_numbers(), rows_of_numbers()
NUMBERS[2], NUMBERS[3] = 0, OUTPUTS[3]
LABELS = GENERATOR.integers(0, N_CLASSES, N)
ONEHOT = np.eye(N_CLASSES, dtype=np.float32)[LABELS]
BITS = GENERATOR.integers(0, 2, OUTPUTS.shape).astype(np.float32)
SHARES, SOFT = (scipy.special.softmax(x, -1) for x in (OUTPUTS, NUMBERS))
CERTAIN = np.eye(N_CLASSES, dtype=np.float32)[GENERATOR.integers(0, N_CLASSES, N)]
SIGMOIDS = scipy.special.expit(OUTPUTS)
COUNTS = np.round(5 * abs(NUMBERS))
UNIT = OUTPUTS / np.maximum(np.linalg.norm(OUTPUTS, axis=-1, keepdims=True), 1e-6)
STEPS = 3 * GENERATOR.normal(size=(N, 9, 6)).astype(np.float32)
SEQUENCES = GENERATOR.integers(1, 6, (N, 4))
SEQUENCES[1, 2:], SEQUENCES[2], SEQUENCES[3] = 0, 0, 3
ALPHA = [0.1, 0.2, 0.3, 0.4, 0.5]
AT_ERRORS, AT_VECTORS = abs(OUTPUTS - NUMBERS) > 0, (OUTPUTS != 0).any(-1) & (NUMBERS != 0).any(-1)
OF_SHARES = {"from_logits": False}
SMOOTH = {"label_smoothing": 0.1}
# Our loss with its options; Keras's with its; outputs and targets; where both have a slope.
CASES = [
    ("crossentropy", OF_SHARES, "sparse_categorical_crossentropy", {}, SHARES, LABELS),
    ("crossentropy", OF_SHARES, "sparse_categorical_crossentropy", {}, CERTAIN, LABELS),
    ("onehot_crossentropy", OF_SHARES | SMOOTH, "categorical_crossentropy", SMOOTH, SHARES, ONEHOT),
    ("onehot_crossentropy", SMOOTH, "categorical_crossentropy", SMOOTH, OUTPUTS, ONEHOT),
    ("binary_crossentropy", OF_SHARES | SMOOTH, "binary_crossentropy", SMOOTH, SIGMOIDS, BITS),
    ("binary_crossentropy", OF_SHARES, "binary_crossentropy", {}, BITS[::-1], BITS),
    ("binary_crossentropy", SMOOTH, "binary_crossentropy", SMOOTH, OUTPUTS, BITS),
    ("kl_divergence", OF_SHARES, "kl_divergence", {}, SHARES, SOFT),
    ("kl_divergence", OF_SHARES, "kl_divergence", {}, SHARES, ONEHOT),
    ("binary_focal_crossentropy", SMOOTH, "binary_focal_crossentropy", SMOOTH, OUTPUTS, BITS),
    ("binary_focal_crossentropy", OF_SHARES, "binary_focal_crossentropy", {}, SIGMOIDS, BITS),
    ("binary_focal_crossentropy", OF_SHARES, "binary_focal_crossentropy", {}, BITS[::-1], BITS),
    (
        *("binary_focal_crossentropy", {"apply_class_balancing": True, "alpha": 0.3, "gamma": 1.5}),
        *("binary_focal_crossentropy", {"apply_class_balancing": True, "alpha": 0.3, "gamma": 1.5}),
        *(OUTPUTS, BITS),
    ),
    ("categorical_focal_crossentropy", {}, "categorical_focal_crossentropy", {}, OUTPUTS, ONEHOT),
    (
        *("categorical_focal_crossentropy", OF_SHARES | SMOOTH | {"alpha": ALPHA}),
        *("categorical_focal_crossentropy", SMOOTH | {"alpha": ALPHA}, SHARES, ONEHOT),
    ),
    (
        *("generalized_crossentropy", OF_SHARES | {"q": 0.3}),
        *("CategoricalGeneralizedCrossEntropy", {"q": 0.3}, SHARES, LABELS),
    ),
    ("mape", None, "mean_absolute_percentage_error", {}, OUTPUTS, NUMBERS, AT_ERRORS),
    ("msle", None, "mean_squared_logarithmic_error", {}, OUTPUTS, NUMBERS),
    ("poisson", None, "poisson", {}, abs(OUTPUTS) + 0.01, COUNTS),
    ("huber", {"delta": 0.3}, "huber", {"delta": 0.3}, OUTPUTS, NUMBERS),
    ("cosine_similarity", {}, "cosine_similarity", {}, OUTPUTS, NUMBERS, AT_VECTORS),
    ("squared_hinge", None, "squared_hinge", {}, OUTPUTS, 2 * BITS - 1),
    ("categorical_hinge", None, "categorical_hinge", {}, OUTPUTS, ONEHOT),
    ("dice", OF_SHARES, "dice", {"axis": (1,)}, SIGMOIDS, BITS),
    ("dice", OF_SHARES, "dice", {"axis": (1,)}, 0 * SIGMOIDS, 0 * BITS),
    (
        *("tversky", OF_SHARES | {"alpha": 0.3, "beta": 0.8}),
        *("tversky", {"alpha": 0.3, "beta": 0.8, "axis": (1,)}, SIGMOIDS, BITS),
    ),
    ("ctc", None, "ctc", {}, STEPS, SEQUENCES),
    (
        *("circle", {"gamma": 10.0, "margin": 0.2}, "circle", {"gamma": 10.0, "margin": 0.2}),
        *(UNIT, LABELS),
    ),
]


def of_keras(keras, name, options, takes_logits):
    if name == "CategoricalGeneralizedCrossEntropy":
        loss = keras.losses.CategoricalGeneralizedCrossEntropy(**options, reduction=None)
    else:
        function = getattr(keras.losses, name)
        more = {"from_logits": True} if takes_logits else {}

        def loss(targets, outputs):
            return function(targets, outputs, **options, **more)

    return lambda outputs, targets: loss(targets, outputs)


def with_gradient(loss, outputs, targets):
    """The values by row, and the gradient of their sum."""

    def total(outputs, targets):
        found = loss(outputs, targets)
        values = found[0] if isinstance(found, tuple) else found
        values = values.reshape(N, -1).mean(-1)
        return values.sum(), values

    (_, values), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(outputs, targets)
    return np.asarray(values), np.asarray(gradient)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_values_and_gradients_are_those_of_keras(case, keras):
    name, options, theirs, their_options, outputs, targets, *has_slope = case
    loss = getattr(losses, name)
    loss = loss(**options) if options else loss
    takes_logits = "crossentropy" in name and "from_logits" not in (options or {})
    peer = of_keras(keras, theirs, their_options, takes_logits)
    values, gradient = with_gradient(loss, outputs, targets)
    their_values, their_gradient = with_gradient(peer, outputs, targets)
    np.testing.assert_allclose(values, their_values, rtol=1e-5, atol=1e-5)
    assert np.isfinite(gradient).all()
    kept = has_slope[0] if has_slope else np.ones(N, bool)
    np.testing.assert_allclose(gradient[kept], their_gradient[kept], rtol=2e-5, atol=1e-5)


# Beside torch and Keras in `test_against_peers.py`; by hand in `tests/losses`; and what is no loss.
ELSEWHERE = {"cosine_distance", "hinge", "log_cosh", "mae", "mse"}
BY_HAND = {"smape", "info_nce", "supervised_contrastive", "triplet"}
HELPERS = {"Loss", "check_loss_shape", "check_values", "resolve"}


def test_no_loss_of_keras_is_left_out():
    public = {name for name in vars(losses) if not name.startswith("_")}
    assert public - {case[0] for case in CASES} == ELSEWHERE | BY_HAND | HELPERS
