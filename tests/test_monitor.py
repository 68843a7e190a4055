import math

import pytest

from flaxfit._monitor import default_monitor, is_better, read_metric, resolve_mode


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("error_rate", "min"),
        ("mse", "min"),
        ("val_mae", "min"),
        ("RMSE", "min"),
        ("val_perplexity", "min"),
        ("accuracy", "max"),
        ("val_f1", "max"),
        ("auc", "max"),
    ],
)
def test_losses_and_errors_are_minimised_and_the_rest_maximised(name, mode):
    assert resolve_mode(name) == mode
    assert resolve_mode(name, "min") == "min"
    assert resolve_mode(name, "max") == "max"


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'auto', 'min' or 'max', got 'lowest'"):
        resolve_mode("loss", "lowest")


def test_better_is_lower_or_higher_by_more_than_min_delta():
    assert is_better(0.25, 0.5, "min") and not is_better(0.5, 0.25, "min")
    assert is_better(0.5, 0.25, "max") and not is_better(0.25, 0.5, "max")
    assert not is_better(0.25, 0.5, "min", 0.25) and is_better(0.25, 0.5, "min", 0.125)
    assert not is_better(0.5, 0.5, "min") and not is_better(0.5, 0.5, "max")


@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_not_finite_is_never_better_and_anything_finite_beats_nothing(mode):
    assert is_better(0.0, None, mode)
    for bad in math.nan, math.inf, -math.inf:
        assert not is_better(bad, None, mode)
        assert not is_better(bad, 0.5, mode)


def test_the_first_validation_metric_is_watched_else_its_loss_else_nothing():
    assert default_monitor(["loss", "f1", "val_loss", "val_f1", "val_auc"]) == "val_f1"
    assert default_monitor(["loss", "val_loss"]) == "val_loss"
    assert default_monitor(["loss", "f1"]) is None


def test_a_metric_that_is_not_there_is_an_error_that_lists_what_is():
    assert read_metric({"loss": 0.5}, "loss", "X") == 0.5
    with pytest.raises(ValueError, match=r"X cannot monitor 'val_f1': .* loss, f1\..* EvalLoop"):
        read_metric({"loss": 0.5, "f1": 0.5}, "val_f1", "X")
    with pytest.raises(ValueError, match="holds no metrics"):
        read_metric({}, "loss", "X")
