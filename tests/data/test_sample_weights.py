import numpy as np
import pytest

from flaxfit.data._sample_weights import check_weights, check_weights_shape


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_weights_that_are_not_finite_or_negative_are_refused_with_the_first(bad):
    weights = np.ones(20, np.float32)
    weights[[3, 7]] = bad
    with pytest.raises(ValueError, match=rf"w must be finite.* 2 of 20 .* {bad} in row 3"):
        check_weights(weights, "w")


@pytest.mark.parametrize("weights", [np.zeros(3), np.ones(3, bool), [1, 2], np.zeros(0)])
def test_other_weights_are_accepted(weights):
    check_weights_shape(weights, "w")
    check_weights(weights, "w")


@pytest.mark.parametrize("weights", [2.0, np.ones((3, 1)), [[1.0], [2.0]]])
def test_weights_of_another_shape_are_refused_with_what_to_do(weights):
    with pytest.raises(ValueError, match=r"w must hold one number.*mask a second target"):
        check_weights_shape(weights, "w")
