"""Losses and metrics that broadcast outputs against targets, in every disguise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from loops import given
from marks import slow, thorough

import flaxfit as ff
from flaxfit import losses
from flaxfit.metrics import accuracy, binary_accuracy, top_k
from flaxfit.step._broadcasting import check_by_row
from flaxfit.tree._functions import is_by_row

X = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
COLUMN, ROW = X, X[:, 0]
LOGITS = jax.ShapeDtypeStruct((8, 3), "float32")
LABELS = np.array([0, 2, 1, 1, 0, 2, 2, 1], np.int32)


def check(loss, outputs, targets):
    check_by_row("The loss", loss, (outputs,), (targets,))


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
        check(loss, COLUMN, ROW)
    check(loss, COLUMN, COLUMN)


def by_index(o, t):
    return -jax.nn.log_softmax(o)[jnp.arange(len(t)), t]


def by_scatter(o, t, rows=lambda o, t: jnp.arange(len(t))):
    hot = jnp.zeros_like(o).at[rows(o, t), t].set(1)
    return -(hot * jax.nn.log_softmax(o)).sum(-1)


BY_NUMBER = {
    "picked": by_index,
    "set": by_scatter,
    "set by the outputs": functools.partial(by_scatter, rows=lambda o, t: jnp.arange(len(o))),
}
BY_OTHERS = {
    "picked": lambda o, t: o[t, 0] + t,
    "others": functools.partial(by_scatter, rows=lambda o, t: t),
    "backwards": functools.partial(by_scatter, rows=lambda o, t: jnp.arange(len(t))[::-1]),
    "beside": lambda o, t: by_scatter(o, t) + ((o[:, :1] - t) ** 2).mean(),
}


@pytest.mark.parametrize("reduce", [lambda v: v, jnp.mean])
def test_a_loss_that_indexes_by_the_number_of_the_row_compares_row_by_row(reduce):
    for loss in BY_NUMBER.values():
        check(lambda o, t, loss=loss: reduce(loss(o, t)), LOGITS, LABELS)
    for loss in BY_OTHERS.values():
        with pytest.raises(ValueError, match="The loss broadcasts"):
            check(lambda o, t, loss=loss: reduce(loss(o, t)), LOGITS, LABELS)


@pytest.mark.parametrize(
    ("nll", "n_devices"),
    [(by_index, 1), slow(by_scatter, 4), thorough(by_scatter, 1), thorough(by_index, 4)],
)
def test_a_usual_cross_entropy_by_index_trains_as_that_by_name(nll, n_devices):
    strategy = ff.DataParallel(jax.devices()[:n_devices])

    def trained(loss):
        metrics = {"nll": nll}
        model = ff.Model(linen.Dense(3), optax.sgd(0.1), loss, metrics, strategy=strategy)
        return model.fit(X, np.arange(8) % 3, batch_size=3, epochs=2, verbose=0)

    own, named = trained(nll), trained("crossentropy")
    np.testing.assert_allclose([own["loss"], own["nll"]], [named["loss"]] * 2, rtol=1e-6)


def test_what_looks_at_one_side_only_is_not_meant():
    check(lambda o, t: jnp.abs(o - o.mean(0)).sum(-1), COLUMN, ROW)
    check(lambda o, t: o.mean(-1), COLUMN, ROW)
    check(lambda o, t: t, COLUMN, ROW)
    check_by_row("The loss", lambda o: o.mean(-1), (COLUMN,), ())


SHAPES = {
    "classes": ((8, 10), (8,), "int32"),
    "tokens": ((8, 5, 10), (8, 5), "int32"),
    "values": ((8,), (8,), "float32"),
    "vectors": ((8, 10), (8, 10), "float32"),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "function",
    [
        losses.crossentropy,
        losses.onehot_crossentropy,
        losses.binary_crossentropy,
        losses.mse,
        losses.mae,
        losses.huber,
        losses.log_cosh,
        losses.hinge,
        accuracy.values,
        binary_accuracy.values,
        top_k(2).values,
    ],
)
def test_what_is_marked_as_by_row_is_so(function, shapes):
    outputs, targets, dtype = shapes
    assert is_by_row(function)
    check(function, np.ones(outputs, np.float32), np.ones(targets, dtype))


def apply(variables, x, **_):
    return x * variables["params"]


def train(loss="mse", metrics=(), targets=X[:, 0], strategy=None, **options):
    task = ff.TrainTask(apply, optax.sgd(0.1), loss, (X, targets), metrics, **options)
    init = given(lambda rngs, x: {"params": np.ones(1, np.float32)})
    return next(ff.TrainLoop(init, task, 0, strategy=strategy, stdout=False))


def measure(metrics, targets=X[:, 0], strategy=None, **options):
    task = ff.EvalTask(apply, metrics, (X, targets), **options)
    state = ff.InferenceState(np.int32(0), np.ones(1, np.float32), {})
    return ff.EvalLoop(task, strategy=strategy).measure(state)


def test_training_and_evaluation_refuse_it_at_the_first_batch():
    with pytest.raises(ValueError, match="The loss broadcasts"):
        train(lambda o, t: ((o - t) ** 2).mean(-1))
    metrics = {"error": lambda o, t: (o - t) ** 2}
    with pytest.raises(ValueError, match="The metric 'error' broadcasts"):
        train(lambda o, t: (o[:, 0] - t) ** 2, metrics)
    with pytest.raises(ValueError, match="The metric 'error' broadcasts"):
        measure(metrics)


def test_a_loss_that_is_to_look_across_the_batch_says_so():
    def matching(outputs, targets):
        return (outputs.mean() - targets.mean()) ** 2

    with pytest.raises(ValueError, match="across=.batch"):
        train(matching)
    assert train(matching, across="batch").loss == pytest.approx(0)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda o, t: None, TypeError, "returned NoneType; expected one value per example"),
        (lambda o, t: {"a": o}, TypeError, r"returned dict; expected .*\(8,\)"),
        (lambda o, t: (o[:, 0], 0.0, 1), TypeError, "a tuple of 3"),
        (lambda o, t: o.sum(0), ValueError, r"shape \(1,\); expected \(\) or \(8,\)"),
        (
            lambda o, t: (o[:, 0] - t, t - o[:, 0]),
            ValueError,
            "second array that the loss .* outputs",
        ),
    ],
)
def test_what_is_no_loss_is_named_with_its_shape(loss, error, message):
    with pytest.raises(error, match=message):
        train(loss)


def centred(outputs, targets):
    return (outputs[:, 0] - targets - (outputs[:, 0] - targets).mean()) ** 2


def test_a_loss_or_metric_that_couples_rows_must_say_so():
    with pytest.raises(ValueError, match=r"The loss gives each example .* other examples.*across="):
        train(centred, strategy=ff.DataParallel())
    words = r"The metric 'centred' gives each example .*set pad=False in the task, on one"
    with pytest.raises(ValueError, match=words):
        train(lambda o, t: (o[:, 0] - t) ** 2, {"centred": centred}, strategy=ff.DataParallel())
    assert train(centred, across="batch").loss == pytest.approx(0)


def test_a_loss_that_wraps_one_of_ours_is_not_taken_for_it():
    @functools.wraps(losses.mse)
    def wrapped(outputs, targets):
        values = losses.mse(outputs, targets)
        return values - values.mean(0)

    with pytest.raises(ValueError, match="The loss gives each example a value that depends"):
        train(wrapped, targets=X, strategy=ff.DataParallel())


def test_a_metric_that_couples_rows_is_not_measured_by_parts():
    data = {"centred": centred}, 2 * X[:, 0]
    found = measure(*data, ff.Sharded(), pad=False)["centred"]
    assert found == pytest.approx(np.var(X), rel=1e-5)
    words = "The metric 'centred' .*, on one device or with strategy=Sharded"
    with pytest.raises(ValueError, match=words):
        measure(*data, ff.DataParallel(), pad=False)


def everything(outputs, targets, weights=None):
    return {"outputs": outputs, "weights": jnp.ones(len(outputs)) if weights is None else weights}


@pytest.mark.parametrize("n_devices", [1, 4])
@pytest.mark.parametrize("pad", [True, False])
def test_a_metric_whose_sums_grow_with_the_batch_is_refused(n_devices, pad):
    all_of_it = ff.metrics.Metric(everything, lambda sums: float(len(sums["outputs"])), "all")
    strategy = ff.DataParallel(jax.devices()[:n_devices])
    words = "metric 'all' returns sums whose shape depends on the batch"
    with pytest.raises(ValueError, match=words):
        train("mse", [all_of_it], X, strategy, pad=pad)
    with pytest.raises(ValueError, match=words):
        measure([all_of_it], X, strategy)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            lambda outputs: outputs[:, 0],
            "many positional.*signature is \\(outputs\\).*1 and 1 of them",
        ),
        (lambda a, b, targets: a[:, 0], "missing a required argument: 'targets'"),
        (lambda *, k: k, "signature is \\(\\*, k\\)"),
        (ff.metrics.Metric(lambda o, t: o.sum(), float), "argument 'weights'.*with weights="),
    ],
)
def test_a_metric_that_takes_other_arguments_is_named(metric, message):
    message = f"^The metric 'it' was called with the wrong arguments.*{message}"
    with pytest.raises(TypeError, match=message):
        measure({"it": metric}, X)


def test_an_error_of_a_metric_names_it_and_the_shapes():
    scores = np.ones((4, 3), np.float32)
    task = ff.TrainTask(apply, optax.sgd(0.1), "binary_crossentropy", (), ["f1"])
    state = ff.TrainState.create(task.optimizer, {"params": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"'f1', of outputs \(\(4, 3\),\) and targets \(\(4, 3\),"):
        ff.make_train_step(task)(state, ff.Batch((scores,), (scores,), scores))
