"""find_batch_size: what it promises is what a step of that size needs."""

import flax.linen as nn
import numpy as np
import optax
import pytest
from marks import thorough

import flaxfit as ff

x = np.zeros((64, 32), np.float32)
y = np.zeros((64, 8), np.float32)
module = nn.Dense(8, kernel_init=nn.initializers.zeros)


def make_model(**options):
    return ff.Model(module, optax.sgd(0.1), "mse", **options)


def needed(model, n):
    """What a step of `n` examples needs, by a loop of its own."""
    task = ff.TrainTask(module.apply, optax.sgd(0.1), "mse", [(x, y)])
    loop = ff.TrainLoop(
        module.init, task, 0, strategy=model.strategy, grad_norm=False, stdout=False
    )
    return loop.step_memory(n)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [ff.DataParallel(), thorough(ff.Sharded())],
    ids=["replicas", "mesh"],
)
def test_the_size_fits_and_the_double_does_not(strategy):
    model = make_model(strategy=strategy)
    limit = (needed(model, 16) + needed(model, 32)) / 2
    assert model.find_batch_size(x, y, limit=limit) == 16
    with pytest.raises(RuntimeError, match="no weights yet"):
        _ = model.state  # It has trained nothing.


def test_the_size_ends_at_the_largest_that_was_asked_for():
    assert make_model().find_batch_size(x, y, limit=1e12, largest=12) == 8


def test_a_model_that_never_fits_is_told_what_to_change():
    with pytest.raises(ValueError, match=r"Not even a step of 4 examples fits.*precision"):
        make_model().find_batch_size(x, y, limit=1000)


def test_a_backend_without_a_limit_asks_for_one():
    with pytest.raises(ValueError, match="does not report.*pass limit="):
        make_model().find_batch_size(x, y)


def test_data_that_would_be_used_up_is_refused():
    with pytest.raises(ValueError, match="find_batch_size would consume this data"):
        make_model().find_batch_size(batch for batch in [(x, y)])
