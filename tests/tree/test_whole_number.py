import numpy as np
import pytest

from flaxfit.tree._checks import whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3)], ids=["int", "int64", "array"])
def test_whole_numbers_of_any_kind_become_int(value):
    number = whole_number("n", value)
    assert type(number) is int and number == 3


@pytest.mark.parametrize("value", ["3", 3.0, None, True, [3]])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(TypeError, match="epochs must be a whole number, got"):
        whole_number("epochs", value)


def test_a_number_below_the_least_is_refused():
    assert whole_number("n", 0, least=0) == 0
    with pytest.raises(ValueError, match="n_steps must be 1 or more, got 0"):
        whole_number("n_steps", 0)
