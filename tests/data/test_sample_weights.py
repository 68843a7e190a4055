import numpy as np
import pytest

from flaxfit.data._sample_weights import (
    OTHER_OUTPUTS,
    check_weights,
    check_weights_shape,
    of_output,
)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_weights_that_are_not_finite_or_negative_are_refused_with_the_first(bad):
    weights = np.ones(20, np.float32)
    weights[[3, 7]] = bad
    with pytest.raises(ValueError, match=rf"w must be finite.* 2 of 20 .* {bad} in row 3"):
        check_weights(weights, "w")
    tokens = np.ones((4, 3))
    tokens[2, 1] = bad
    with pytest.raises(ValueError, match=rf"w\['a'\] .* 1 of 12 are not, .* {bad} in row 2"):
        check_weights({"a": tokens}, "w")


@pytest.mark.parametrize(
    "weights", [np.zeros(3), np.ones(3, bool), [1, 2], np.zeros(0), [[1.0], [2.0]]]
)
def test_other_weights_are_accepted(weights):
    check_weights_shape(weights, "w")
    check_weights(weights, "w")


def test_an_output_has_its_own_weights_or_those_of_all_others():
    assert of_output({"a": 2.0, OTHER_OUTPUTS: 1.0}, "a") == 2.0
    assert of_output({"a": 2.0, OTHER_OUTPUTS: 1.0}, "b") == 1.0
    assert of_output(3.0, "a") == 3.0
