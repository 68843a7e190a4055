import numpy as np
import pytest
from marks import slow
from measuring import value_of

from flaxfit.metrics import concordance, explained_variance, pearson

GENERATOR = np.random.default_rng(0)
TARGETS = 9 + GENERATOR.normal(size=40).astype(np.float32)
OUTPUTS = TARGETS + GENERATOR.normal(0.5, 0.4, 40).astype(np.float32)
WEIGHTS = GENERATOR.uniform(0.1, 3, 40).astype(np.float32)


def by_hand(name, outputs, targets, weights):
    outputs, targets = outputs.astype(float), targets.astype(float)
    (a, shared), (_, b) = np.cov(outputs, targets, aweights=weights, ddof=0)
    if name == "pearson":
        return shared / np.sqrt(a * b)
    if name == "explained_variance":
        return 1 - np.cov(outputs - targets, aweights=weights, ddof=0) / b
    apart = np.average(outputs - targets, weights=weights)
    return 2 * shared / (a + b + apart**2)


@pytest.mark.parametrize("metric", [pearson, slow(explained_variance), slow(concordance)])
def test_values_are_those_of_the_variances(metric, measured):
    found = measured(metric, OUTPUTS, TARGETS, weights=WEIGHTS)
    expected = by_hand(metric.name, OUTPUTS, TARGETS, WEIGHTS)
    assert found == pytest.approx(expected, rel=1e-5)
    outputs, targets = np.stack([OUTPUTS, -TARGETS], 1), np.stack([TARGETS, OUTPUTS], 1)
    second = by_hand(metric.name, -TARGETS, OUTPUTS, WEIGHTS)
    found = measured(metric, outputs, targets, weights=WEIGHTS)
    assert found == pytest.approx((expected + second) / 2, rel=1e-5)


def test_concordance_is_less_than_correlation_where_means_or_spreads_differ(measured):
    assert measured(concordance, TARGETS, TARGETS) == pytest.approx(1)
    for moved in TARGETS + 2, 3 * TARGETS:
        assert measured(pearson, moved, TARGETS) == pytest.approx(1, rel=1e-5)
        assert measured(concordance, moved, TARGETS) < 0.5


@pytest.mark.parametrize(("mean", "scale"), [(1e6, 1), slow(0, 1e-18), slow(0, 1e-25)])
def test_no_digits_are_lost_far_from_zero_or_near_it(mean, scale):
    outputs, targets = (np.float32(mean + scale * (x - 9.0)) for x in (OUTPUTS, TARGETS))
    for metric in pearson, concordance, explained_variance:
        expected = by_hand(metric.name, outputs, targets, WEIGHTS)
        found = value_of(metric, outputs, targets, weights=WEIGHTS)
        assert found == pytest.approx(expected, rel=1e-5)
    for metric in pearson, concordance:
        expected = by_hand(metric.name, outputs, targets, np.ones(40))
        found = value_of(metric(axis=-1), outputs[None], targets[None])
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_constants_have_no_correlation():
    ones, numbers = np.ones(4, np.float32), np.arange(4, dtype=np.float32)
    assert np.isnan(value_of(pearson, ones, numbers))
    assert value_of(concordance, ones, numbers) == 0
    assert np.isnan(value_of(concordance, ones, ones))
    assert np.isnan(value_of(concordance, numbers, numbers, weights=np.zeros(4)))


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"got outputs \(4, 1\) and targets \(4,\): reshape"):
        pearson.measure(np.zeros((4, 1)), np.zeros(4))
