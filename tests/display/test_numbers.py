"""Numbers as text: measured values, counts, times, speeds and sizes."""

import numpy as np
import pytest

from flaxfit import display


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.5, "0.5000"),
        (-1.23456, "-1.2346"),
        (0.0001, "0.0001"),
        (0.000032, "3.20e-05"),
        (-0.000032, "-3.20e-05"),
        (999999.0, "999999.0000"),
        (1.5e6, "1.50e+06"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_four_decimals_or_an_exponent(value, text):
    assert display.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5000"),
        (100.12345, "100.123"),
        (123456.789, "123457"),
        (1.2345e-5, "1.2e-05"),
        (-1.2345e-5, "-1e-05"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_have_fewer_decimals_where_a_column_is_narrow(value, text):
    assert display.number(value, 7) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0374, "37 ms"),
        (0.9996, "1.0s"),
        (9.94, "9.9s"),
        (42.4, "42s"),
        (59.9, "1m 00s"),
        (187, "3m 07s"),
        (3600, "1h 00m"),
        (90061, "1d 01h"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert display.duration(seconds) == text


def test_counts_speeds_and_sizes_have_a_unit():
    assert display.count(1437.4) == "1,437"
    assert display.plural(1, "epoch") == "1 epoch"
    assert display.plural(2000, "step") == "2,000 steps"
    assert display.rate(4712.3) == "4,712 steps/s"
    assert display.rate(0.0416) == "0.042 steps/s"
    assert [display.size(n) for n in (512, 38_440, 2.5e9)] == ["512 B", "38.4 kB", "2.5 GB"]
    assert display.is_scalar(0.5) and display.is_scalar(np.ones(()))
    assert not display.is_scalar(np.ones(2))
