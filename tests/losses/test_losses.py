"""Losses against NumPy, and the shapes and dtypes that they refuse.

Those of SciPy are in `test_against_peers.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow, thorough

from flaxfit import losses

GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(32, 10)).astype(np.float32)
LABELS = GENERATOR.integers(0, 10, 32)
SCORES = GENERATOR.normal(size=32).astype(np.float32)
TARGETS = GENERATOR.normal(size=32).astype(np.float32)
SIGNS = np.where(TARGETS > 0, 1, -1)
ONEHOT = np.eye(10)[LABELS]


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


OF_LABEL = softmax(LOGITS)[np.arange(32), LABELS]
SHARES = 1 / (1 + np.exp(-LOGITS))
BITS = GENERATOR.integers(0, 2, LOGITS.shape)
BOTH = (SHARES * BITS).sum(-1)
UNIT = LOGITS / np.linalg.norm(LOGITS, axis=-1, keepdims=True)
RATES, COUNTS = np.exp(SCORES), GENERATOR.poisson(2, 32)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("cosine_similarity", LOGITS, LOGITS[::-1], -(UNIT * UNIT[::-1]).sum(-1)),
        ("mape", SCORES, TARGETS, 100 * abs(SCORES - TARGETS) / abs(TARGETS)),
        ("msle", abs(SCORES), abs(TARGETS), (np.log1p(abs(SCORES)) - np.log1p(abs(TARGETS))) ** 2),
        ("poisson", RATES, COUNTS, RATES - COUNTS * np.log(RATES)),
        ("squared_hinge", SCORES, SIGNS, np.maximum(0, 1 - SCORES * SIGNS) ** 2),
        (
            "categorical_hinge",
            LOGITS,
            ONEHOT,
            np.maximum(0, 1 + (LOGITS * (1 - ONEHOT)).max(-1) - (LOGITS * ONEHOT).sum(-1)),
        ),
        (
            "binary_focal_crossentropy",
            SCORES,
            SIGNS > 0,
            np.log1p(np.exp(-SIGNS * SCORES)) / (1 + np.exp(SIGNS * SCORES)) ** 2,
        ),
        (
            "categorical_focal_crossentropy",
            LOGITS,
            ONEHOT,
            -0.25 * np.log(OF_LABEL) * (1 - OF_LABEL) ** 2,
        ),
        ("generalized_crossentropy", LOGITS, LABELS, 2 * (1 - np.sqrt(OF_LABEL))),
        ("dice", LOGITS, BITS, 1 - 2 * BOTH / (SHARES.sum(-1) + BITS.sum(-1))),
        ("tversky", LOGITS, BITS, 1 - 2 * BOTH / (SHARES.sum(-1) + BITS.sum(-1))),
    ],
)
def test_losses_give_their_values_by_example(name, outputs, targets, expected):
    values = jax.jit(losses.resolve(name))(outputs, targets)
    assert values.shape == (32,)  # One value each, however many numbers an example has.
    np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-5)


def test_unsigned_targets_do_not_wrap_around():
    assert losses.mse(np.array([1], np.uint8), np.array([3], np.uint8)) == 4
    assert losses.hinge(np.array([0.5]), np.array([1], np.uint8)) == 0.5


@pytest.mark.parametrize(
    "name",
    [
        *("binary_crossentropy", "mse", "mae", "huber", "log_cosh", "hinge", "cosine_distance"),
        *("mape", "smape", "msle", "poisson", "squared_hinge", "cosine_similarity", "dice"),
        *("binary_focal_crossentropy", "tversky"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(name):
    loss = losses.resolve(name)
    with pytest.raises(
        ValueError, match=rf"loss '{name}' expects .* got outputs \(32, 1\) and .*32"
    ):
        loss(np.zeros((32, 1)), np.zeros(32))
    with pytest.raises(ValueError, match=r"Squeeze the (labels|targets) \(y\[..., 0\]\)"):
        loss(np.zeros(32), np.zeros((32, 1)))


@pytest.mark.parametrize("labels", [np.zeros(4, int), np.zeros((3, 2), int), np.zeros((4, 2))])
def test_sequences_of_other_shapes_and_types_are_refused(labels):
    with pytest.raises(ValueError, match="'ctc' expects outputs of shape .batch, steps, classes."):
        losses.ctc(np.zeros((4, 5, 3)), labels)


def some_losses():
    """Losses with outputs and targets that suit them; test_against_peers.py has more of them."""
    yield "mse", SCORES, TARGETS
    yield "crossentropy", LOGITS, LABELS
    yield "binary_crossentropy", SCORES, (TARGETS > 0).astype(np.float32)
    yield "msle", abs(SCORES), abs(TARGETS)
    yield "categorical_focal_crossentropy", LOGITS, ONEHOT.astype(np.float32)
    yield "dice", LOGITS, BITS.astype(np.float32)


TYPICAL = ("mse", "crossentropy", "binary_crossentropy", "categorical_focal_crossentropy")


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "dtype"),
    [
        *((*each, "bfloat16") for each in some_losses()),
        *((slow if each[0] in TYPICAL else thorough)(*each, "float16") for each in some_losses()),
    ],
)
def test_16_bits_are_computed_in_float32(name, outputs, targets, dtype):
    loss = losses.resolve(name)
    outputs = (10 * outputs).astype(dtype)
    targets = targets if targets.dtype.kind == "i" else targets.astype(dtype)
    wide = targets if targets.dtype.kind == "i" else targets.astype(np.float32)

    def both(outputs, targets):
        return jax.value_and_grad(lambda x: loss(x, targets).sum())(outputs)

    found, gradient = jax.jit(both)(outputs, targets)
    expected, wide_gradient = jax.jit(both)(outputs.astype(np.float32), wide)
    assert found.dtype == np.float32
    assert gradient.dtype == dtype
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    gradients = (each.astype(np.float32) for each in (gradient, wide_gradient))
    np.testing.assert_allclose(*gradients, rtol=jnp.finfo(dtype).eps, atol=1e-7)


def test_arrays_are_given_by_name_and_options_alone_as_in_keras():
    arrays = {"outputs": np.array([1.0, 4.0]), "targets": np.array([1.0, 1.0])}
    np.testing.assert_allclose(losses.mse(**arrays), [0, 9])
    np.testing.assert_allclose(losses.mse()(**arrays), [0, 9])
    np.testing.assert_allclose(losses.huber(**arrays, delta=2.0), [0, 4])
    np.testing.assert_allclose(losses.huber(delta=2.0)(**arrays), [0, 4])


def test_an_option_that_a_loss_does_not_have_is_refused_at_once():
    with pytest.raises(TypeError, match="'mse' has no option alpha: it takes none"):
        losses.mse(alpha=1.0)
    with pytest.raises(TypeError, match="'huber' has no option alpha: it takes delta"):
        losses.huber(alpha=1.0)
    with pytest.raises(TypeError, match="reduction: .* weighted by sample_weight, and needs no"):
        losses.crossentropy(reduction="sum")
    assert losses.crossentropy(ignore_class=-1).keywords == {"ignore_label": -1}
    with pytest.raises(TypeError, match="ignore_class is ignore_label"):
        losses.crossentropy(ignore_class=0, ignore_label=0)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (losses.crossentropy(label_smoothing=1.5), "label_smoothing must lie between 0 and 1"),
        (losses.crossentropy(axis=0), "axis=0 must be one of the axes after the first"),
        (losses.crossentropy(axis=True), "axis must be an integer, got True"),
        (losses.generalized_crossentropy(q=1), r"q must lie in \(0, 1\), got 1"),
    ],
)
def test_options_out_of_range_are_refused(loss, message):
    with pytest.raises((TypeError, ValueError), match=message):
        loss(LOGITS, LABELS)
    with pytest.raises(ValueError, match="delta must be more than 0, got 0"):
        losses.huber(delta=0)(SCORES, TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["crossentropy", "onehot_crossentropy", "categorical_focal_crossentropy"]
)
def test_classes_may_lie_along_another_axis(name):
    loss = losses.resolve(name)
    logits = LOGITS.reshape(8, 4, 10)
    labels = LABELS.reshape(8, 4) if name == "crossentropy" else ONEHOT.reshape(8, 4, 10)
    moved = labels if name == "crossentropy" else np.moveaxis(labels, -1, 1)
    values = jax.jit(loss(axis=1))(np.moveaxis(logits, -1, 1), moved)
    np.testing.assert_allclose(values, jax.jit(loss)(logits, labels), rtol=1e-6)
