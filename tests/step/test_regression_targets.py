"""Regression targets are no classes: accuracy refuses them in words."""

from typing import Any

import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit.step._regression_targets import check_classes

NUMBERS, CLASSES = np.linspace(0, 1, 8, dtype=np.float32), (np.arange(8) % 2).astype(np.float32)
apply: Any = lambda v, x: x * v["params"]  # noqa: E731


def check(loss, metrics, targets):
    task = ff.EvalTask(apply, metrics, loss=loss)
    check_classes(task, ff.Batch((NUMBERS,), (targets,)))


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "log_cosh", optax.squared_error])
@pytest.mark.parametrize("metric", ["accuracy", "f1", "auc", ff.metrics.accuracy(threshold=0.3)])
@pytest.mark.parametrize("targets", [NUMBERS, 10 * NUMBERS[:, None]])
def test_a_classification_metric_of_regression_targets_is_refused(loss, metric, targets):
    with pytest.raises(ValueError, match="'hits' compares classes, .* use 'mae', 'rmse' or 'r2'"):
        check(loss, {"hits": metric}, targets)


@pytest.mark.parametrize(
    ("loss", "metrics", "targets"),
    [
        ("mse", ["accuracy"], CLASSES),
        ("mse", ["accuracy"], np.where(CLASSES > 0, np.nan, CLASSES)),
        ("mse", ["mae", "r2"], NUMBERS),
        ("binary_crossentropy", ["accuracy"], NUMBERS),
        ("mse", ["accuracy"], np.full((8, 3), 1 / 3, np.float32)),
        (lambda outputs, targets: outputs, ["accuracy"], NUMBERS),
    ],
    ids=["classes", "nan", "regression", "soft", "shares", "own"],
)
def test_other_targets_pass(loss, metrics, targets):
    check(loss, metrics, targets)


def test_training_and_evaluation_refuse_it():
    task = ff.TrainTask(
        lambda v, x, **_: (apply(v, x), {}), optax.sgd(0.1), "mse", (CLASSES, NUMBERS), ["accuracy"]
    )
    one = np.ones((), np.float32)
    with pytest.raises(ValueError, match="'accuracy' compares classes"):
        next(ff.TrainLoop(lambda rngs, x: {"params": one}, task, 0, stdout=False))
    measure = ff.EvalLoop(ff.EvalTask(apply, ["accuracy"], (CLASSES, NUMBERS), loss="mse")).measure
    with pytest.raises(ValueError, match="'accuracy' compares classes"):
        measure(ff.InferenceState(np.int32(0), one, {}))
