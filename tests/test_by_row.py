"""Losses and metrics that broadcast outputs against targets, in every disguise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit import losses
from flaxfit._by_row import check_by_row

COLUMN, ROW = jax.ShapeDtypeStruct((8, 1), "float32"), jax.ShapeDtypeStruct((8,), "float32")
X = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: (o - t) ** 2,
        lambda o, t: ((o - t) ** 2).mean(-1),
        lambda o, t: jnp.mean((o - t) ** 2),
        lambda o, t: jnp.abs(o - t).sum() / 8,
    ],
)
def test_a_loss_that_broadcasts_is_found_out(loss):
    with pytest.raises(ValueError, match=r"The loss broadcasts.*\(8, 1\).*\(8,\).*\[:, None\]"):
        check_by_row("The loss", loss, (COLUMN,), (ROW,))
    check_by_row("The loss", loss, (COLUMN,), (COLUMN,))


def test_what_looks_at_one_side_only_is_not_meant():
    check_by_row("The loss", lambda o, t: o.mean(-1), (COLUMN,), (ROW,))
    check_by_row("The loss", lambda o, t: t, (COLUMN,), (ROW,))
    check_by_row("The loss", lambda o: o.mean(-1), (COLUMN,), ())


SHAPES = {
    "classes": ((8, 10), (8,), "int32"),
    "tokens": ((8, 5, 10), (8, 5), "int32"),
    "values": ((8,), (8,), "float32"),
    "vectors": ((8, 10), (8, 10), "float32"),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["crossentropy", "binary_crossentropy", "mse", "mae", "huber"])
def test_no_loss_of_ours_is_blamed(name, shapes):
    outputs, targets, dtype = shapes
    arrays = jax.ShapeDtypeStruct(outputs, "float32"), jax.ShapeDtypeStruct(targets, dtype)
    check_by_row("The loss", losses.resolve(name), (arrays[0],), (arrays[1],))


def apply(variables, x, **options):
    outputs = x * variables["params"]
    return (outputs, {}) if "mutable" in options else outputs


def train(loss="mse", metrics=(), targets=X[:, 0], **options):
    task = ff.TrainTask(apply, optax.sgd(0.1), loss, (X, targets), metrics, **options)

    def init(rngs, x):
        return {"params": np.ones(1, np.float32)}

    return next(ff.TrainLoop(init, task, 0, stdout=False))


def test_training_refuses_it_at_the_first_batch():
    with pytest.raises(ValueError, match="The loss broadcasts"):
        train(lambda o, t: ((o - t) ** 2).mean(-1))
    with pytest.raises(ValueError, match="The metric 'error' broadcasts"):
        train(lambda o, t: (o[:, 0] - t) ** 2, {"error": lambda o, t: (o - t) ** 2})


def test_a_loss_that_is_to_look_across_the_batch_says_so():
    def matching(outputs, targets):
        return (outputs.mean() - targets.mean()) ** 2

    with pytest.raises(ValueError, match="pad=False"):
        train(matching)
    assert train(matching, pad=False).loss == pytest.approx(0)


def test_evaluation_refuses_it_too():
    task = ff.EvalTask(apply, {"error": lambda o, t: (o - t) ** 2}, (X, X[:, 0]))
    with pytest.raises(ValueError, match="The metric 'error' broadcasts"):
        ff.EvalLoop(task).measure(ff.InferenceState(np.int32(0), np.ones(1, np.float32), {}))


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda o, t: None, TypeError, "returned NoneType; expected one value per example"),
        (lambda o, t: {"a": o}, TypeError, r"returned dict; expected .*\(8,\)"),
        (lambda o, t: (o[:, 0], 0.0, 1), TypeError, "a tuple of 3"),
        (lambda o, t: o.sum(0), ValueError, r"shape \(1,\); expected \(\) or \(8,\)"),
        (lambda o, t: (o[:, 0] - t, t - o[:, 0]), ValueError, r"two arrays.*\(8,\).*scalar"),
    ],
)
def test_what_is_no_loss_is_named_with_its_shape(loss, error, message):
    with pytest.raises(error, match=message):
        train(loss)
