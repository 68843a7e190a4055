"""What the first look at the data finds in its values."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import assert_close
from marks import slow

import flaxfit as ff
from flaxfit.data._batch import Batch
from flaxfit.step._validate import check_finite, check_weights_of

X, Y = np.ones((20, 3), np.float32), np.zeros((20, 1), np.float32)


def spoilt(array, value, row=5):
    array = array.copy()
    array[row] = value
    return array


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_found_in_every_floating_dtype(dtype, value):
    x = spoilt(X.astype(jnp.dtype(dtype)), value)
    for inputs in (x, jnp.asarray(x)) if dtype != "float64" else (x,):
        with pytest.raises(ValueError, match=r"input '0', 1 of 20 rows, the first of them row 5"):
            check_finite(Batch((inputs,)), "The data")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_large_values_whose_sum_overflows_are_finite_and_give_no_warning(dtype):
    x = np.full((2000, 3), jnp.finfo(dtype).max, jnp.dtype(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_finite(Batch((x,)), "The data")


def test_targets_that_are_not_finite_are_found_if_their_weight_is_not_zero():
    batch = Batch((X,), (spoilt(Y, np.nan),), spoilt(np.ones(20), 0.0))
    check_finite(batch, "The data")
    for weights in None, np.ones(20):
        with pytest.raises(ValueError, match=r"target '0', 1 of 20 rows, the first of them row 5"):
            check_finite(batch._replace(weights=weights), "The data")


@pytest.mark.parametrize("value", [np.nan, -1.0])
def test_weights_that_are_no_weights_are_found(value):
    with pytest.raises(ValueError, match=rf"weights.*must be finite.*{value} in row 5"):
        check_weights_of(Batch((X,), (Y,), spoilt(np.ones(20), value)), "The data")


def loop_of(data, loss="mse", metrics=(), **options):
    task = ff.TrainTask(ZEROS, optax.sgd(0.1), loss, data, metrics, **options)
    return ff.TrainLoop(ZEROS, task, 0, stdout=False)


@pytest.mark.slow
@pytest.mark.parametrize("as_data", [lambda *parts: [parts], lambda *parts: ff.ArrayStream(*parts)])
@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ((X, spoilt(Y, np.nan)), {}, "target '0'"),
        ((X, Y, spoilt(np.ones(20), np.nan)), {}, "must be finite and not negative"),
        ((X, Y, spoilt(np.ones(20), -1.0)), {}, "must be finite and not negative"),
        ((X, Y, spoilt(np.ones(20), np.nan)), {"check_finite": False}, "weights.*must be finite"),
    ],
    ids=["target", "weight", "negative weight", "weight alone"],
)
def test_a_loop_refuses_them_before_it_trains(as_data, parts, options, message):
    with pytest.raises(ValueError, match=message):
        next(loop_of(as_data(*parts), **options))


@pytest.mark.slow
def test_labels_of_weight_zero_may_be_anything_and_leave_no_mark():
    labels, weights = np.arange(20) % 3, np.where(np.arange(20) % 5, 1.0, 0.0)
    missing = np.where(weights == 0, -1, labels)
    inputs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)

    def trained_on(y):
        parts = (nn.Dense(3), optax.sgd(0.1), "crossentropy", ["accuracy"])
        model = ff.Model(*parts, strategy=ff.DataParallel(jax.devices()[:1]))
        history = model.fit(inputs, y, sample_weight=weights, verbose=0)
        return dict(history), model.evaluate(inputs, y, sample_weight=weights)

    assert trained_on(missing) == trained_on(labels)
    with pytest.raises(ValueError, match="label -1 is out of range"):
        ff.Model(nn.Dense(3), optax.sgd(0.1), "crossentropy").fit(inputs, missing, verbose=0)


def differences(outputs, targets):
    return outputs - targets, 2 * (outputs - targets)


def confident(outputs, targets):
    return outputs - targets, jax.lax.stop_gradient(jnp.abs(outputs))


@pytest.mark.parametrize("role", ["loss", "metrics"])
def test_two_losses_in_a_tuple_are_no_values_with_weights(role):
    def given(function):
        return {"loss": function} if role == "loss" else {"metrics": [function]}

    assert np.isfinite(loop_of([(X, Y)], **given(confident)).next_step().loss)
    with pytest.raises(ValueError, match="is taken for weights, but it depends on the outputs"):
        loop_of([(X, Y)], **given(differences)).next_step()


def test_a_target_without_weight_is_found_by_token():
    targets, weights = np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)
    targets[2, 1], weights[2, 1] = np.nan, 0
    check_finite(Batch((targets[:, :1] * 0 + 1,), (targets,), weights), "The data")
    with pytest.raises(ValueError, match="target '0', 1 of 4 rows, the first of them row 2"):
        check_finite(Batch((X[:4],), (targets,), weights[::-1]), "The data")


def masked(outputs, targets):
    """The squared error where there is a label, and the weights that say so."""
    is_there = ~jnp.isnan(targets)
    return (outputs - jnp.where(is_there, targets, 0)) ** 2, is_there


@pytest.mark.slow
@pytest.mark.parametrize("data", [lambda *parts: parts, slow(lambda *parts: [parts])])
def test_missing_labels_may_be_nan_where_the_task_says_so(data):
    labels = np.where(np.arange(20)[:, None] % 3 == 0, np.nan, Y).astype(np.float32)

    def losses(targets, loss, w=None, **options):
        given = data(X, targets) if w is None else data(X, targets, w)
        evaluate = ff.EvalLoop(ff.EvalTask(ZEROS, [], given, loss=loss, **options))
        loop = loop_of(given, loss, **options)
        measured = evaluate.measure(loop.state)["loss"]
        return measured, loop.next_step().loss, jax.tree.leaves(loop.state.params)

    with pytest.raises(ValueError, match="check_finite=False"):
        losses(labels, masked)
    weights = ~np.isnan(labels)[:, 0]
    found = losses(labels, masked, check_finite=False)
    expected = losses(np.nan_to_num(labels), "mse", weights)
    assert_close(found, expected, rtol=1e-6)


def spread(outputs, targets):
    """The mean distance of each output to all targets."""
    return jnp.abs(outputs - targets[:, 0]).mean(1)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"a": nn.Dense(1)(x), "b": nn.Dense(1)(x)}


ZEROS = nn.Dense(1, kernel_init=nn.initializers.zeros)
HALF = (np.arange(20) % 2).astype(np.float32)
DISTINCT = np.arange(20, dtype=np.float32)[:, None]


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"pad": False}, "across='batch'"),
        slow({"pad": False, "strategy": ff.Sharded()}, "across='batch'"),
        slow({"pad": False, "run_eagerly": True}, "across='batch'"),
        slow({"across": "batch", "strategy": ff.Sharded()}, "one weight per example"),
    ],
    ids=["devices", "sharded", "eager", "by output"],
)
def test_a_loss_that_compares_targets_is_given_all_of_them(options, way_out):
    is_by_output = way_out.startswith("one")
    module, loss, y, weights = ZEROS, spread, DISTINCT, HALF
    if is_by_output:
        module, loss = Pair(), {"a": spread, "b": "mse"}
        y, weights = {"a": DISTINCT, "b": DISTINCT}, {"a": HALF, "b": HALF}
    model = ff.Model(module, optax.sgd(0.1), loss, **options)
    name = "The loss of output 'a'" if is_by_output else "The loss"
    with pytest.raises(ValueError, match=f"^{name} compares .* targets of weight 0.*{way_out}"):
        model.fit(X, y, 20, sample_weight=weights, verbose=0)


@pytest.mark.slow
def test_targets_of_weight_0_are_compared_with_where_the_loss_is_across_the_batch():
    model = ff.Model(ZEROS, optax.sgd(0.0), spread, across="batch")
    history = model.fit(X, DISTINCT, 20, sample_weight=HALF, verbose=0)
    assert history["loss"] == pytest.approx([DISTINCT.mean()])


@pytest.mark.slow
def test_an_objective_that_compares_targets_is_given_all_of_them():
    class First(nn.Module):
        @nn.compact
        def __call__(self, x, *others):
            return nn.Dense(1)(x)

    def objective(apply, batch, rngs):
        return spread(apply(*batch.inputs), [*batch.inputs, *batch.targets][1])

    def task(data):
        return ff.TrainTask(First(), optax.sgd(0.1), data=data, objective=objective, pad=False)

    def first(*data):
        loop = ff.TrainLoop(First(), task([data]), 0, strategy=ff.Sharded(), stdout=False)
        return loop.next_step().loss

    with pytest.raises(
        ValueError, match="objective compares .* Pass the compared arrays as inputs"
    ):
        first(X, DISTINCT, HALF)
    assert np.isfinite([first((X, DISTINCT), (), HALF), first(X, DISTINCT)]).all()
