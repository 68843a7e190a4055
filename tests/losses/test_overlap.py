"""Dice and Tversky: by example, over chosen axes, of logits and of probabilities."""

import numpy as np
import pytest

from flaxfit import losses

GENERATOR = np.random.default_rng(0)
SHARES = GENERATOR.uniform(size=(4, 6, 5, 3)).astype(np.float32)
MASKS = GENERATOR.integers(0, 2, SHARES.shape)


@pytest.mark.parametrize("axis", [(1, 2), (-2, 1), 2])
def test_chosen_axes_are_summed(axis):
    values = losses.dice(axis=axis, from_logits=False)(SHARES, MASKS)
    axes = (1, 2) if isinstance(axis, tuple) else 2
    both = (SHARES * MASKS).sum(axes)
    expected = 1 - 2 * both / (SHARES.sum(axes) + MASKS.sum(axes))
    np.testing.assert_allclose(values, expected, rtol=1e-5)


@pytest.mark.slow
def test_what_is_missed_and_what_is_wrong_have_weights():
    values = losses.tversky(alpha=0.2, beta=0.7, from_logits=False)(SHARES, MASKS)
    axes = (1, 2, 3)
    both = (SHARES * MASKS).sum(axes)
    missed, wrong = ((1 - SHARES) * MASKS).sum(axes), (SHARES * (1 - MASKS)).sum(axes)
    np.testing.assert_allclose(values, 1 - both / (both + 0.2 * missed + 0.7 * wrong), rtol=1e-5)


def test_the_axis_of_examples_is_not_summed():
    with pytest.raises(ValueError, match=r"axis=\(0, 1\) must name some of the 3 axes after"):
        losses.dice(axis=(0, 1))(SHARES, MASKS)


def test_empty_masks_have_a_loss_of_one():
    assert losses.dice(from_logits=False)(0 * SHARES, 0 * MASKS).tolist() == [1] * 4
