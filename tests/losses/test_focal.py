"""The focal losses and the generalized cross-entropy at their ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit import losses

GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(32, 10)).astype(np.float32)
LABELS = GENERATOR.integers(0, 10, 32)
ONEHOT = np.eye(10, dtype=np.float32)[LABELS]


@pytest.mark.slow
def test_a_power_of_zero_is_the_crossentropy():
    focal = jax.jit(losses.categorical_focal_crossentropy(alpha=1.0, gamma=0.0))(LOGITS, ONEHOT)
    expected = jax.jit(losses.crossentropy)(LOGITS, LABELS)
    np.testing.assert_allclose(focal, expected, rtol=1e-5)
    focal = jax.jit(losses.binary_focal_crossentropy(gamma=0.0))(LOGITS, ONEHOT)
    expected = jax.jit(losses.binary_crossentropy)(LOGITS, ONEHOT)
    np.testing.assert_allclose(focal, expected, rtol=1e-5)


def test_a_class_that_is_ruled_out_does_not_count():
    def of(logits, labels):
        loss = losses.categorical_focal_crossentropy
        return jax.jit(jax.value_and_grad(lambda x: loss(x, labels).sum()))(logits)

    logits, labels = LOGITS[:3, :3], np.eye(3, dtype=np.float32)
    value, gradient = of(logits, labels)
    ruled_out = np.float32([[-np.inf]] * 3)
    found, wider = of(np.c_[logits, ruled_out], np.c_[labels, np.zeros((3, 1))])
    np.testing.assert_allclose(found, value, rtol=1e-6)
    np.testing.assert_allclose(wider, np.c_[gradient, np.zeros((3, 1))], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_classes_have_weights():
    balanced = losses.binary_focal_crossentropy(alpha=0.2, apply_class_balancing=True)
    plain = jax.jit(losses.binary_focal_crossentropy)(LOGITS, ONEHOT)
    expected = np.where(ONEHOT, 0.2, 0.8) * plain
    np.testing.assert_allclose(jax.jit(balanced)(LOGITS, ONEHOT), expected, rtol=1e-6)
    alpha = [0.1 * i for i in range(10)]
    weighted, plain = (
        jax.jit(losses.categorical_focal_crossentropy(alpha=each))(LOGITS, ONEHOT)
        for each in (alpha, 1.0)
    )
    np.testing.assert_allclose(weighted, 0.1 * LABELS * plain, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("from_logits", [True, False])
def test_certain_outputs_have_a_gradient(from_logits):
    outputs = np.eye(2, dtype=np.float32)
    outputs = 1e4 * (2 * outputs - 1) if from_logits else outputs

    @jax.jit
    @jax.jacobian
    def gradients(x):
        both = losses.binary_focal_crossentropy, losses.categorical_focal_crossentropy
        each = [
            loss(gamma=gamma, from_logits=from_logits)(x, np.eye(2)).sum()
            for loss in both
            for gamma in (0.0, 0.5, 2.0)
        ]
        return jnp.stack(each)

    assert np.isfinite(gradients(outputs)).all()


@pytest.mark.slow
def test_a_probability_of_zero_has_the_largest_generalized_crossentropy_and_a_gradient():
    loss = losses.generalized_crossentropy(q=0.25, from_logits=False)
    shares, labels = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32), np.array([0, 0])
    value_and_slope = jax.jit(jax.value_and_grad(lambda x: loss(x, labels).sum()))
    value, gradient = value_and_slope(shares)
    assert value == 4 and np.isfinite(gradient).all()
    assert np.isnan(jax.jit(loss)(shares, np.array([2, -1]))).all()
