"""How weights of examples and tokens stand beside values."""

import numpy as np
import pytest

from flaxfit.tree._weights import beside, broadcast_weights, joined_weights, product, which_count

TOKENS = np.array([[1, 0, 2], [0, 0, 0]], np.float32)


@pytest.mark.parametrize(
    ("weights", "values", "fitted"),
    [
        ((4,), (4, 3), (4, 1)),
        ((4, 3), (4, 3), (4, 3)),
        ((4, 1), (4, 3, 2), (4, 1, 1)),
        ((4, 1), (4,), (4,)),
        ((4, 3), (4, 3, 2), (4, 3, 1)),
    ],
)
def test_weights_broadcast_from_the_left(weights, values, fitted):
    assert beside(np.ones(weights), values).shape == fitted
    assert broadcast_weights(np.ones(weights), values).shape == values


@pytest.mark.parametrize(
    ("weights", "values"), [((4, 3), (4,)), ((3,), (4, 3)), ((4, 2), (4, 3)), ((1, 3), (4, 3))]
)
def test_other_weights_are_refused_with_both_shapes(weights, values):
    with pytest.raises(ValueError) as raised:
        beside(np.ones(weights), values, "The loss")
    assert f"The loss has values of shape {values} and weights of shape {weights}" in str(
        raised.value
    )


def test_what_counts_is_told_by_token_or_else_by_example():
    assert which_count(TOKENS, (2, 3)).tolist() == [[True, False, True], [False] * 3]
    assert which_count(TOKENS, (2, 3, 5)).shape == (2, 3, 1)
    assert which_count(TOKENS, (2, 7)).tolist() == [[True], [False]]
    assert which_count(TOKENS, (2,)).tolist() == [True, False]


def test_own_weights_are_multiplied_with_those_of_the_batch():
    own = np.array([[1, 1, 0], [1, 1, 1]], np.float32)
    by_example = np.array([2, 0], np.float32)
    np.testing.assert_array_equal(joined_weights(own, None, (2, 3), "a"), own)
    np.testing.assert_array_equal(
        joined_weights(own, by_example, (2, 3), "a"), [[2, 2, 0], [0, 0, 0]]
    )
    np.testing.assert_array_equal(joined_weights(own, TOKENS, (2, 3), "a"), own * TOKENS)
    # Values by example leave out the examples without a token.
    np.testing.assert_array_equal(joined_weights(by_example, TOKENS, (2,), "a"), [2, 0])


def test_weights_of_examples_are_multiplied_with_those_of_tokens():
    by_example = np.array([2, 3], np.float32)
    np.testing.assert_array_equal(product(TOKENS, by_example), TOKENS * by_example[:, None])
    np.testing.assert_array_equal(product(by_example, TOKENS), TOKENS * by_example[:, None])
