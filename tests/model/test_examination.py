"""What a model says of itself, and the batch size that it finds for itself."""

import copy
import pickle

import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from marks import thorough

import flaxfit as ff
from flaxfit.callbacks import Export

X = np.full((8, 3), 0.125, np.float32)


@pytest.mark.slow
def test_the_repr_of_a_model_is_one_line_without_data_or_weights():
    model = ff.Model(nn.Dense(2), optax.sgd(0.1), "mse", metrics=["mae"])
    assert repr(model) == "Model(Dense, loss=mse, metrics=[mae], step=0)"
    model.train_on_batch(X, X[:, :2])
    assert repr(model) == "Model(Dense, loss=mse, metrics=[mae], step=1, 8 params)"
    assert repr(ff.Model(nn.Dense(2))) == "Model(Dense, step=0)"


def test_a_module_with_weights_of_its_own_is_summarized_after_build(capsys):
    model = ff.Model(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="needs inputs before the first fit"):
        model.summary()
    model.build([None, 3])
    model.summary()
    assert "8 params" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(8, 3), (None, 3), [8, 3]])
def test_a_shape_in_place_of_inputs_is_refused_with_what_takes_it(shape):
    with pytest.raises(TypeError, match=r"takes inputs, such as x\[:1\], got the shape .*build"):
        ff.Model(nn.Dense(2)).summary(shape)


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_model_is_not_copied_or_pickled(act):
    with pytest.raises(TypeError, match="Cannot copy or pickle a Model.*save_weights"):
        act(ff.Model(nn.Dense(1)))


def test_a_model_that_draws_in_evaluation_is_not_exported(tmp_path):
    model = ff.Model(nn.Dense(3), optax.sgd(0.1), "mse", eval_rngs="noise")
    with pytest.raises(ValueError, match="Cannot export a model that draws random numbers"):
        model.fit(X, X, verbose=0, callbacks=[Export(tmp_path / "model")])


# What find_batch_size promises is what a step of that size needs.

ZEROS = np.zeros((64, 32), np.float32)
TARGETS = np.zeros((64, 8), np.float32)
MODULE = nn.Dense(8, kernel_init=nn.initializers.zeros)


def make_model(**options):
    return ff.Model(MODULE, optax.sgd(0.1), "mse", **options)


def needed(model, n):
    """What a step of `n` examples needs, by a loop of its own."""
    task = ff.TrainTask(MODULE.apply, optax.sgd(0.1), "mse", [(ZEROS, TARGETS)])
    loop = ff.TrainLoop(
        MODULE.init, task, 0, strategy=model.strategy, grad_norm=False, stdout=False
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
    assert model.find_batch_size(ZEROS, TARGETS, limit=limit) == 16
    with pytest.raises(RuntimeError, match="no weights yet"):
        _ = model.state  # It has trained nothing.


def test_the_size_ends_at_the_largest_that_was_asked_for():
    assert make_model().find_batch_size(ZEROS, TARGETS, limit=1e12, largest=12) == 8


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (1000, "Not even a step of 4 examples fits.*precision"),
        (None, "does not report.*pass limit="),
    ],
)
def test_a_limit_that_no_step_fits_and_one_that_is_unknown_are_refused(limit, message):
    with pytest.raises(ValueError, match=message):
        make_model().find_batch_size(ZEROS, TARGETS, limit=limit)


def test_data_that_would_be_used_up_is_refused():
    with pytest.raises(ValueError, match="find_batch_size would consume this data"):
        make_model().find_batch_size(batch for batch in [(ZEROS, TARGETS)])
