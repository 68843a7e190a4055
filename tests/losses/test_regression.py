"""The losses of numbers and of vectors, where they have no slope or no value of their own."""

import jax
import numpy as np
import pytest

from flaxfit import losses


def test_a_prediction_that_is_right_has_an_absolute_error_without_a_slope():
    gradient = jax.jit(jax.grad(lambda outputs: losses.mae(outputs, np.zeros(3)).sum()))
    np.testing.assert_array_equal(gradient(np.array([-0.5, 0.0, 0.5])), [-1, 0, 1])


def test_rows_of_zeros_have_a_cosine_distance_of_one_and_a_gradient():
    zeros = np.zeros((2, 3), np.float16)
    loss = jax.jit(losses.cosine_distance)
    np.testing.assert_array_equal(loss(zeros, zeros), [1, 1])
    gradient = jax.jit(jax.grad(lambda x: loss(x, zeros + 1).sum()))(zeros)
    assert np.isfinite(gradient).all()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [losses.mape, losses.smape, losses.msle, losses.poisson])
def test_zeros_have_a_value_and_a_gradient(loss):
    zeros = np.zeros((2, 3), np.float32)
    values, gradient = jax.jit(jax.value_and_grad(lambda x: loss(x, zeros).sum()))(zeros)
    assert values == 0 and np.isfinite(gradient).all()


def test_smape_is_the_error_in_per_cent_of_the_mean_of_both_sizes():
    outputs, targets = np.array([1.0, -2.0, 3.0], np.float32), np.array([3.0, 2.0, 3.0], np.float32)
    np.testing.assert_allclose(losses.smape(outputs, targets), [100, 200, 0])


@pytest.mark.slow
def test_vectors_may_lie_along_another_axis():
    a, b = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
    expected = jax.jit(losses.cosine_similarity)(a.swapaxes(1, 2), b.swapaxes(1, 2))
    found = jax.jit(losses.cosine_similarity(axis=1))(a, b)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
