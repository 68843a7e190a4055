"""Losses and metrics that broadcast outputs against targets, in every disguise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from marks import slow, thorough

import flaxfit as ff
from flaxfit import losses
from flaxfit.metrics import accuracy, binary_accuracy, top_k
from flaxfit.step._broadcasting import check_by_row
from flaxfit.tree._functions import is_by_row

X = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
COLUMN, ROW = X, X[:, 0]


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


LOGITS, LABELS = (
    jax.ShapeDtypeStruct((8, 3), "float32"),
    np.array([0, 2, 1, 1, 0, 2, 2, 1], np.int32),
)


@pytest.mark.parametrize("reduce", [lambda v: v, jnp.mean])
def test_a_loss_that_picks_by_the_number_of_the_row_compares_row_by_row(reduce):
    def nll(o, t):
        return -reduce(jax.nn.log_softmax(o)[jnp.arange(len(t)), t])

    def other_rows(o, t):
        return o[t, 0] + t

    check_by_row("The loss", nll, (LOGITS,), (LABELS,))
    with pytest.raises(ValueError, match="The loss broadcasts"):
        check_by_row("The loss", lambda o, t: reduce(other_rows(o, t)), (LOGITS,), (LABELS,))


def by_scatter(logits, labels):
    hot = jnp.zeros_like(logits).at[jnp.arange(len(labels)), labels].set(1)
    return -(hot * jax.nn.log_softmax(logits)).sum(-1)


@pytest.mark.parametrize("reduce", [lambda v: v, jnp.mean])
def test_one_that_sets_by_the_number_of_the_row_does_so_too(reduce):
    def loss(rows):
        def by_rows(o, t):
            hot = jnp.zeros_like(o).at[rows(o, t), t].set(1)
            return -reduce((hot * jax.nn.log_softmax(o)).sum(-1))

        return by_rows

    for rows in (lambda o, t: jnp.arange(len(t)), lambda o, t: jnp.arange(len(o))):
        check_by_row("The loss", loss(rows), (LOGITS,), (LABELS,))
    wrong = {
        "others": loss(lambda o, t: t),
        "backwards": loss(lambda o, t: jnp.arange(len(t))[::-1]),
        "beside": lambda o, t: reduce(by_scatter(o, t)) + ((o[:, :1] - t) ** 2).mean(),
    }
    for each in wrong.values():
        with pytest.raises(ValueError, match="The loss broadcasts"):
            check_by_row("The loss", each, (LOGITS,), (LABELS,))


def by_index(o, t):
    return -jax.nn.log_softmax(o)[jnp.arange(len(t)), t]


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
    check_by_row("The metric", lambda o, t: jnp.abs(o - o.mean(0)).sum(-1), (COLUMN,), (ROW,))
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
    arrays = np.ones(outputs, np.float32), np.ones(targets, dtype)
    assert is_by_row(function)
    check_by_row("The loss", function, (arrays[0],), (arrays[1],))


def apply(variables, x, **options):
    outputs = x * variables["params"]
    return (outputs, {}) if "mutable" in options else outputs


def train(loss="mse", metrics=(), targets=X[:, 0], strategy=None, **options):
    task = ff.TrainTask(apply, optax.sgd(0.1), loss, (X, targets), metrics, **options)

    def init(rngs, x):
        return {"params": np.ones(1, np.float32)}

    return next(ff.TrainLoop(init, task, 0, strategy=strategy, stdout=False))


def test_training_refuses_it_at_the_first_batch():
    with pytest.raises(ValueError, match="The loss broadcasts"):
        train(lambda o, t: ((o - t) ** 2).mean(-1))
    with pytest.raises(ValueError, match="The metric 'error' broadcasts"):
        train(lambda o, t: (o[:, 0] - t) ** 2, {"error": lambda o, t: (o - t) ** 2})


def test_a_loss_that_is_to_look_across_the_batch_says_so():
    def matching(outputs, targets):
        return (outputs.mean() - targets.mean()) ** 2

    with pytest.raises(ValueError, match="across=.batch"):
        train(matching)
    assert train(matching, across="batch").loss == pytest.approx(0)


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


def test_a_loss_or_metric_that_couples_rows_must_say_so():
    def centred(outputs, targets):
        return (outputs[:, 0] - targets - (outputs[:, 0] - targets).mean()) ** 2

    with pytest.raises(ValueError, match=r"The loss gives each example .* other examples.*across="):
        train(centred, strategy=ff.DataParallel())
    with pytest.raises(
        ValueError,
        match=r"The metric 'centred' gives each example .*set pad=False in the task, on one",
    ):
        train(lambda o, t: (o[:, 0] - t) ** 2, {"centred": centred}, strategy=ff.DataParallel())
    assert train(centred, across="batch").loss == pytest.approx(0)


def test_a_loss_that_wraps_one_of_ours_is_not_taken_for_it():
    @functools.wraps(losses.mse)
    def centred(outputs, targets):
        values = losses.mse(outputs, targets)
        return values - values.mean(0)

    with pytest.raises(ValueError, match="The loss gives each example a value that depends"):
        train(centred, targets=X, strategy=ff.DataParallel())


def test_a_metric_that_couples_rows_is_not_measured_by_parts():
    def centred(outputs, targets):
        return (outputs[:, 0] - targets - (outputs[:, 0] - targets).mean()) ** 2

    task = ff.EvalTask(apply, {"centred": centred}, (X, 2 * X[:, 0]), pad=False)
    state = ff.InferenceState(np.int32(0), np.ones(1, np.float32), {})
    one = ff.EvalLoop(task, strategy=ff.Sharded()).measure(state)
    assert one["centred"] == pytest.approx(np.var(X), rel=1e-5)
    with pytest.raises(
        ValueError, match="The metric 'centred' .*, on one device or with strategy=Sharded"
    ):
        ff.EvalLoop(task, strategy=ff.DataParallel()).measure(state)


def everything(outputs, targets, weights=None):
    return {"outputs": outputs, "weights": jnp.ones(len(outputs)) if weights is None else weights}


@pytest.mark.parametrize("n_devices", [1, 4])
@pytest.mark.parametrize("pad", [True, False])
def test_a_metric_whose_sums_grow_with_the_batch_is_refused(n_devices, pad):
    all_of_it = ff.metrics.Metric(everything, lambda sums: float(len(sums["outputs"])), "all")
    strategy = ff.DataParallel(jax.devices()[:n_devices])
    with pytest.raises(
        ValueError, match="metric 'all' returns sums whose shape depends on the batch"
    ):
        train("mse", [all_of_it], X, strategy=strategy, pad=pad)
    task = ff.EvalTask(apply, [all_of_it], (X, X))
    state = ff.InferenceState(np.int32(0), np.ones(1, np.float32), {})
    with pytest.raises(
        ValueError, match="metric 'all' returns sums whose shape depends on the batch"
    ):
        ff.EvalLoop(task, strategy=strategy).measure(state)


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
    task = ff.EvalTask(lambda v, x: x, {"it": metric}, (X, X))
    state = ff.InferenceState(np.int32(0), np.ones(1, np.float32), {})
    with pytest.raises(
        TypeError, match=f"^The metric 'it' was called with the wrong arguments.*{message}"
    ):
        ff.EvalLoop(task).measure(state)
