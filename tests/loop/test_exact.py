"""Uneven data: for every size and device count the numbers are those of one whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from internals import n_programs_of, programs_of
from loops import given
from marks import slow, thorough

import flaxfit as ff
from flaxfit import metrics

pytestmark = pytest.mark.optimized
BATCH = 8
rng = np.random.default_rng(2)
X = rng.normal(size=(3 * BATCH + 1, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5])).astype(np.float32)
W = rng.uniform(0.2, 2, size=len(X)).astype(np.float32)
PARAMS = np.array([0.3, 0.1, -0.4], np.float32)
# test_eight_devices.py runs this file once more, on eight devices.
DEVICES = [n for n in (1, 2, 3, 4, 8) if n <= len(jax.devices())]
SIZES = range(1, 3 * BATCH + 2)


def devices(*usual):
    """Numbers of devices to try; all but the usual ones, and eight, are thorough."""
    return [n if n in (*usual, 8) else thorough(n) for n in DEVICES]


def apply(variables, x, **options):
    outputs = x @ variables["params"]
    return (outputs, {}) if "mutable" in options else outputs


@given
def init(rngs, x):
    return {"params": jnp.asarray(PARAMS)}


def strategy(n):
    return ff.DataParallel(jax.devices()[:n])


EVALUATORS = {
    n: ff.EvalLoop(ff.EvalTask(apply, ["mae", "mse"], loss="mse"), strategy=strategy(n))
    for n in DEVICES
}


def reference(n, weights):
    w = np.ones(n) if weights is None else weights[:n].astype(np.float64)
    errors = X[:n].astype(np.float64) @ PARAMS - Y[:n]
    return {
        "loss": np.average(errors**2, weights=w),
        "mse": np.average(errors**2, weights=w),
        "mae": np.average(np.abs(errors), weights=w),
    }


@pytest.mark.parametrize("weights", [thorough(None, id="equal"), pytest.param(W, id="weighted")])
@pytest.mark.parametrize("n_devices", devices(1, 3))
def test_evaluation_is_that_of_the_whole_data_set(n_devices, weights):
    state = ff.InferenceState(np.int32(0), PARAMS, {})
    for n in SIZES:
        data = ff.ArrayStream(
            X[:n], Y[:n], None if weights is None else weights[:n], batch_size=BATCH
        )
        measured = EVALUATORS[n_devices].measure(state, data)
        assert measured == pytest.approx(reference(n, weights), rel=1e-6), n


def class_scores(variables, x, **options):
    return jnp.stack([x @ variables["params"], x[:, 0], x[:, 1]], -1)


def score(variables, x, **options):
    return x @ variables["params"]


CLASSES = rng.integers(0, 3, size=len(X)).astype(np.int32)
TASKS = {
    "classes": (
        class_scores,
        CLASSES,
        {
            "accuracy": "accuracy",
            "top_2": "top_2",
            "precision": metrics.precision(average="macro"),
            "recall": metrics.recall(average="macro"),
            "f1": metrics.f1(average="macro"),
            "confusion_matrix": metrics.confusion_matrix(n_classes=3),
            "perplexity": "perplexity",
        },
    ),
    "two classes": (
        score,
        (CLASSES > 0).astype(np.int32),
        dict.fromkeys(("accuracy", "precision", "recall", "f1", "auc"), None),
    ),
    "numbers": (score, Y, dict.fromkeys(("mse", "mae", "rmse", "r2"), None)),
}


@functools.cache
def sums_by_row(name, is_weighted):
    """The sums of each example on its own, in float64."""
    model, targets, chosen = TASKS[name]
    outputs = np.asarray(model({"params": PARAMS}, X))
    w = W if is_weighted else np.ones_like(W)
    sums = {}
    for key, metric in ff.EvalTask(model, {k: v or k for k, v in chosen.items()}).metrics.items():

        def measure(o, t, w, metric=metric):
            return metric.measure(o[None], t[None], weights=w[None])

        rows = jax.jit(jax.vmap(measure))(outputs, targets, w)
        sums[key] = jax.tree.map(lambda s: np.asarray(s, np.float64), rows)
    return sums


@pytest.mark.parametrize(
    "is_weighted",
    [thorough(False, id="equal"), pytest.param(True, id="weighted")],
)
@pytest.mark.parametrize("n_devices", devices(3))
@pytest.mark.parametrize("name", [slow("classes"), slow("two classes"), slow("numbers")])
def test_every_metric_is_that_of_the_whole_data_set(name, n_devices, is_weighted):
    model, targets, chosen = TASKS[name]
    task = ff.EvalTask(model, {key: value or key for key, value in chosen.items()})
    evaluate = ff.EvalLoop(task, strategy=strategy(n_devices))
    state = ff.InferenceState(np.int32(0), PARAMS, {})
    for n in SIZES:
        parts = (X[:n], targets[:n], *((W[:n],) if is_weighted else ()))
        measured = evaluate.measure(state, ff.ArrayStream(*parts, batch_size=BATCH))
        for key, rows in sums_by_row(name, is_weighted).items():
            whole = task.metrics[key].compute(jax.tree.map(lambda s, n=n: s[:n].sum(0), rows))
            # r2 is 1 minus a quotient of sums; the quotient is what rounding must not touch.
            ours, theirs = (1 - measured[key], 1 - whole) if key == "r2" else (measured[key], whole)
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=f"{key} of {n}")


@pytest.mark.slow
@pytest.mark.parametrize("weights", [thorough(None), W], ids=["equal", "weighted"])
@pytest.mark.parametrize("n_devices", devices(4))
def test_every_step_of_an_epoch_has_the_gradient_of_its_own_examples(n_devices, weights):
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", [(X, Y)])
    loop = ff.TrainLoop(init, task, 0, strategy=strategy(n_devices), stdout=False)
    for n in SIZES:
        w = None if weights is None else weights[:n]
        loop.restore(loop.state.replace_params(PARAMS))
        # What is resident has a program for each size; the other way has one for all.
        options = {"epochs": 1, "resident": n % 5 == 0}
        loop.data = ff.ArrayStream(X[:n], Y[:n], w, batch_size=BATCH, **options)
        params = PARAMS.astype(np.float64)
        checkpoints = list(loop.run(99))
        for i, checkpoint in enumerate(checkpoints):
            rows = slice(i * BATCH, min((i + 1) * BATCH, n))
            weight = np.ones(n)[rows] if w is None else w[rows].astype(np.float64)
            errors = X[rows].astype(np.float64) @ params - Y[rows]
            loss = np.average(errors**2, weights=weight)
            params -= 0.1 * (2 * weight * errors) @ X[rows] / weight.sum()
            assert checkpoint.loss == pytest.approx(loss, rel=1e-5, abs=1e-9), (n, i)
            np.testing.assert_allclose(checkpoint.state.params, params, rtol=2e-5, atol=1e-7)
        assert len(checkpoints) == -(-n // BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", devices(3))
def test_predictions_come_in_order_and_without_padding(n_devices):
    model = ff.Model((init, apply), optax.sgd(0.0), "mse", strategy=strategy(n_devices))
    model.fit(X[:12], Y[:12], batch_size=12, verbose=0)
    whole = model.predict(X, batch_size=24)
    for n in SIZES:
        np.testing.assert_array_equal(model.predict(X[:n], batch_size=24), whole[:n])


@pytest.mark.slow
def test_prediction_compiles_once_for_all_sizes():
    model = ff.Model((init, apply), optax.sgd(0.0), "mse")
    model.fit(X, Y, verbose=0)
    for n in SIZES:
        model.predict(X[:n], batch_size=BATCH)
    assert n_programs_of(model)[2] == 1


def test_an_epoch_with_a_remainder_compiles_once():
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", ff.ArrayStream(X, Y, batch_size=8, epochs=3))
    loop = ff.TrainLoop(init, task, 0, stdout=False)
    assert len(list(loop)) == 12
    assert len(programs_of(loop)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("resident", [True, thorough(False)])
def test_whole_batches_are_trained_on_as_those_that_could_be_padded(resident):
    def losses(*data):
        stream = ff.ArrayStream(*data, batch_size=8, epochs=2, resident=resident)
        task = ff.TrainTask(apply, optax.sgd(0.1), "mse", stream)
        loop = ff.TrainLoop(init, task, 0, stdout=False)
        return [checkpoint.loss for checkpoint in loop][:3]

    np.testing.assert_allclose(losses(X[:24], Y[:24]), losses(X[:25], Y[:25]), rtol=1e-6)
    counts = np.arange(24) % 3
    whole, ragged = ((X[:n], Y[:n], np.resize(counts, n)) for n in (24, 25))
    np.testing.assert_allclose(losses(*whole), losses(*ragged), rtol=1e-6)


class Shortened(ff.ArrayStream):
    """Arrays of a whole number of batches, whose third batch comes shorter or with weights."""

    n_delivered, has_weights = 0, False

    def __next__(self):
        x, y = super().__next__()
        self.n_delivered += 1
        if self.n_delivered != 3:
            return x, y
        return (x, y, np.arange(8, dtype=np.float32)) if self.has_weights else (x[:5], y[:5])


@pytest.mark.parametrize("has_weights", [False, slow(True)])
def test_a_class_of_the_users_own_may_change_its_batches(has_weights):
    def losses(data):
        task = ff.TrainTask(apply, optax.sgd(0.1), "mse", data)
        loop = ff.TrainLoop(init, task, 0, n_steps_per_checkpoint=1, stdout=False)
        return [checkpoint.loss for checkpoint in loop]

    def shortened():
        stream = Shortened(X[:24], Y[:24], batch_size=8, epochs=1, resident=False)
        stream.has_weights = has_weights
        return stream

    np.testing.assert_allclose(losses(shortened()), losses(list(shortened())), rtol=1e-6)


def scalar_loss(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", devices(3))
def test_a_scalar_loss_runs_the_remainder_at_its_own_size(n_devices):
    data = ff.ArrayStream(X, Y, batch_size=12, epochs=1)
    task = ff.TrainTask(apply, optax.sgd(0.0), scalar_loss, data)
    loop = ff.TrainLoop(
        init,
        task,
        0,
        n_steps_per_checkpoint=9,
        first_checkpoint=9,
        strategy=strategy(n_devices),
        stdout=False,
    )
    (checkpoint,) = loop
    assert checkpoint.step == 3
    assert checkpoint.loss == pytest.approx(reference(25, None)["loss"], rel=1e-6)


def test_a_scalar_loss_is_evaluated_exactly_too():
    evaluate = ff.EvalLoop(
        ff.EvalTask(apply, [], ff.ArrayStream(X, Y, batch_size=12), loss=scalar_loss),
        strategy=strategy(4),
    )
    state = ff.InferenceState(np.int32(0), PARAMS, {})
    assert evaluate.measure(state)["loss"] == pytest.approx(reference(25, None)["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("n", [thorough(1), thorough(3), 6, thorough(7)])
def test_less_data_than_a_batch_is_a_remainder_where_it_cannot_be_padded(n):
    data = ff.ArrayStream(X[:n], Y[:n], batch_size=8, epochs=1)
    state = ff.InferenceState(np.int32(0), PARAMS, {})
    for n_devices in (d for d in DEVICES if 8 % d == 0):
        for apply_of, init_of, loss in (
            (apply, init, scalar_loss),
            (normalized, init_normalized, "mse"),
        ):
            task = ff.TrainTask(apply_of, optax.sgd(0.0), loss, data.one_epoch())
            (checkpoint,) = ff.TrainLoop(
                init_of, task, 0, strategy=strategy(n_devices), stdout=False
            )
            assert checkpoint.loss == pytest.approx(reference(n, None)["loss"], rel=1e-6)
        evaluate = ff.EvalLoop(
            ff.EvalTask(apply, [], data, loss=scalar_loss), strategy=strategy(n_devices)
        )
        assert evaluate.measure(state)["loss"] == pytest.approx(
            reference(n, None)["loss"], rel=1e-6
        )


@pytest.mark.parametrize("resident", [slow(True), False])
@pytest.mark.parametrize("weights", [thorough(None, id="equal"), pytest.param(W, id="weighted")])
@pytest.mark.parametrize("n_devices", [thorough(1), 3])
def test_sixty_four_bits_are_kept_where_they_are_switched_on(n_devices, weights, resident):
    with jax.enable_x64(True):
        x, y, params = (each.astype(np.float64) for each in (X, Y, PARAMS))
        data = ff.ArrayStream(x, y, weights, batch_size=BATCH, epochs=1, resident=resident)
        task = ff.TrainTask(apply, optax.sgd(0.1), "mse", data, ["mae"])
        loop = ff.TrainLoop(
            lambda rngs, x: {"params": jnp.asarray(params)},
            task,
            0,
            strategy=strategy(n_devices),
            stdout=False,
        )
        w = np.ones(len(x)) if weights is None else weights.astype(np.float64)
        for checkpoint in loop:
            rows = slice((checkpoint.step - 1) * BATCH, checkpoint.step * BATCH)
            errors = x[rows] @ params - y[rows]
            assert checkpoint.loss == pytest.approx(np.average(errors**2, weights=w[rows]), 1e-13)
            params = params - 0.2 * (w[rows] * errors) @ x[rows] / w[rows].sum()
            np.testing.assert_allclose(checkpoint.state.params, params, rtol=1e-13)
        state = ff.InferenceState(np.int32(0), params, {})
        measured = EVALUATORS[n_devices].measure(state, data.one_epoch())
        errors = x @ params - y
        assert measured["mae"] == pytest.approx(np.average(np.abs(errors), weights=w), 1e-13)


def test_a_regular_batch_that_cannot_be_split_or_padded_is_refused():
    task = ff.TrainTask(apply, optax.sgd(0.1), scalar_loss, ff.ArrayStream(X, Y, batch_size=6))
    loop = ff.TrainLoop(init, task, 0, strategy=strategy(4), stdout=False)
    with pytest.raises(ValueError, match=r"6 examples over 4 devices .*batch size of 4 or 8"):
        next(loop)


def test_padding_is_announced_once(capsys):
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", ff.ArrayStream(X, Y, batch_size=6))
    loop = ff.TrainLoop(init, task, 0, strategy=strategy(4))
    for _ in range(4):
        next(loop)
    assert capsys.readouterr().err.count("padded to 8 with rows of weight 0") == 1


def test_a_padded_row_is_a_real_one():
    # The gradient of a norm is NaN at zero, even times a weight of zero.
    def norm(variables, x, **options):
        return jnp.sqrt(jnp.sum((x * variables["params"]) ** 2, -1)), {}

    task = ff.TrainTask(norm, optax.sgd(0.1), "mse", ff.ArrayStream(X[:5], Y[:5], batch_size=5))
    loop = ff.TrainLoop(init, task, 0, strategy=strategy(4), stdout=False)
    assert np.isfinite(next(loop).state.params).all()


def normalized(variables, x, **options):
    """A model that adds up the means of what it has seen."""
    seen = {"stats": {"sum": variables["stats"]["sum"] + x.mean(0)}}
    return x @ variables["params"], seen


def init_normalized(rngs, x):
    return {"params": jnp.asarray(PARAMS), "stats": {"sum": jnp.zeros(3)}}


@pytest.mark.parametrize("n_devices", [thorough(1), thorough(2), 4])
def test_statistics_never_see_a_padded_row(n_devices):
    data = ff.ArrayStream(X[:13], Y[:13], batch_size=8, epochs=1)
    task = ff.TrainTask(normalized, optax.sgd(0.0), "mse", data)
    loop = ff.TrainLoop(init_normalized, task, 0, strategy=strategy(n_devices), stdout=False)
    *_, last = loop
    # 8 rows over all devices; then 5 rows on the one device that divides them.
    expected = X[:8].mean(0) + X[8:13].mean(0)
    np.testing.assert_allclose(last.model_state["stats"]["sum"], expected, rtol=1e-5)
    assert last.loss == pytest.approx(np.mean((X[8:13] @ PARAMS - Y[8:13]) ** 2), rel=1e-5)


def test_a_task_without_padding_runs_remainders_at_their_own_size():
    sizes = []

    def loss(outputs, targets):
        sizes.append(outputs.shape[0])
        return (outputs - targets) ** 2

    data = ff.ArrayStream(X[:13], Y[:13], batch_size=8, epochs=1)
    task = ff.TrainTask(apply, optax.sgd(0.0), loss, data, pad=False)
    *_, last = ff.TrainLoop(init, task, 0, strategy=strategy(4), stdout=False)
    assert last.step == 2 and 5 in sizes and 2 in sizes
    with pytest.raises(ValueError, match="pad=False"):
        task = ff.TrainTask(apply, optax.sgd(0.0), loss, [(X[:6], Y[:6])], pad=False)
        next(ff.TrainLoop(init, task, 0, strategy=strategy(4), stdout=False))
