"""Losses by name: what is known, what is not, and what stands in for Optax's."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from flaxfit import losses

GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(32, 10)).astype(np.float32)
LABELS = GENERATOR.integers(0, 10, 32)
ONEHOT = np.eye(10)[LABELS]


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="no loss 'crossentrpy'. Did you mean crossentropy"):
        losses.resolve("crossentrpy")
    with pytest.raises(ValueError, match="no loss 'zzz'. Did you mean .*mse, mae"):
        losses.resolve("zzz")


def test_short_names_and_those_of_optax_are_known():
    assert losses.resolve("squared_error") is losses.mse
    assert losses.resolve("huber_loss") is losses.huber
    assert losses.resolve("bce") is losses.binary_crossentropy


def test_a_function_is_its_own_loss_hashable_or_not():
    class Unhashable(list):
        def __call__(self, outputs, targets):
            return outputs

    for loss in (optax.squared_error, lambda outputs, targets: outputs, Unhashable()):
        assert losses.resolve(loss) is loss


def test_what_is_no_loss_is_refused():
    number: Any = 0.5
    with pytest.raises(TypeError, match="must be a name or a function.*got float: 0.5"):
        losses.resolve(number)
    with pytest.raises(TypeError, match=r"got the class Mine: make one, Mine\(...\)"):
        losses.resolve(type("Mine", (), {}))


@pytest.mark.parametrize(
    ("loss", "optax_loss", "targets"),
    [
        (losses.crossentropy, optax.softmax_cross_entropy_with_integer_labels, LABELS),
        (losses.onehot_crossentropy, optax.softmax_cross_entropy, ONEHOT),
        (losses.binary_crossentropy, optax.sigmoid_binary_cross_entropy, ONEHOT),
    ],
)
def test_the_common_losses_of_optax_are_checked(loss, optax_loss, targets):
    checked = losses.resolve(optax_loss)
    assert checked is loss
    ours, expected = (jax.jit(each)(LOGITS, targets) for each in (checked, optax_loss))
    np.testing.assert_allclose(ours, expected, rtol=1e-6)  # Ours keeps the digits of large logits.
    with pytest.raises(ValueError, match=r"labels \(32, 1\)"):
        checked(LOGITS, np.ones((32, 1), int))
