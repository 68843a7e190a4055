"""The comparison of outputs with targets: what an error of a metric says."""

import numpy as np
import optax
import pytest

import flaxfit as ff


def test_an_error_of_a_metric_names_it_and_the_shapes():
    task = ff.TrainTask(
        lambda v, x, **_: (x, {}), optax.sgd(0.1), "binary_crossentropy", (), ["f1"]
    )
    scores, weights = np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)
    state = ff.TrainState.create(task.optimizer, {"params": {"w": np.ones(1, np.float32)}})
    with pytest.raises(ValueError, match=r"'f1', of outputs \(\(4, 3\),\) and targets \(\(4, 3\),"):
        ff.make_train_step(task)(state, ff.Batch((scores,), (scores,), weights))
