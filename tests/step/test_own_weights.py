"""Weights by token, and those that losses and metrics return: means over all of them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops import given
from marks import thorough

import flaxfit as ff
from flaxfit import losses, metrics

N, T, CLASSES, BATCH = 22, 5, 3, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, T, 4)).astype(np.float32)
Y = RNG.integers(0, CLASSES, (N, T)).astype(np.int32)
W = (RNG.random((N, T)) * (RNG.random((N, T)) > 0.4)).astype(np.float32)
W[3] = 0  # A row without a token.
MASK = (W > 0).astype(np.float32)
IGNORED = np.where(W > 0, Y, -100).astype(np.int32)
IGNORING = losses.crossentropy(ignore_label=-100)
KERNEL = RNG.normal(size=(4, CLASSES)).astype(np.float32)
PARAMS = {"kernel": KERNEL, "bias": np.zeros(CLASSES, np.float32)}
LOGITS = X @ KERNEL
PREDICTED = LOGITS.argmax(-1)
ce = optax.softmax_cross_entropy_with_integer_labels


@given
def init(rngs, x):
    return {"params": PARAMS}


def loop_of(loss, data, optimizer=None, metrics=(), n_devices=1):
    task = ff.TrainTask(nn.Dense(CLASSES), optimizer or optax.sgd(0.5), loss, data, metrics)
    return ff.TrainLoop(init, task, 0, stdout=False, devices=jax.devices()[:n_devices])


def measured(metric, targets, weights, n_devices=1):
    data = ff.ArrayStream(X, targets, weights, batch_size=BATCH, epochs=1)
    task = ff.EvalTask(lambda v, x: x @ v["params"], metric, data)
    strategy = ff.DataParallel(jax.devices()[:n_devices])
    return ff.EvalLoop(task, strategy=strategy).measure(ff.InferenceState(np.int32(0), KERNEL, {}))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [thorough(1), 4])
@pytest.mark.parametrize("form", ["weights", "ignored label"])
def test_metrics_count_tokens(form, devices):
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    names = ["accuracy", "perplexity", "top_2", "f1", "precision", "recall"]
    made = {name: metrics.as_metrics([name])[name] for name in names}
    made["confusion"] = metrics.confusion_matrix(CLASSES)
    targets, weights, w = Y, W, W
    if form == "ignored label":
        made = {name: metric(ignore_label=-100) for name, metric in made.items()}
        targets, weights, w = IGNORED, None, MASK
    found = measured(made, targets, weights, devices)
    mean = functools.partial(np.average, weights=w)
    y, predicted, flat = Y.ravel(), PREDICTED.ravel(), w.ravel()
    expected = {
        "accuracy": mean(PREDICTED == Y),
        "perplexity": np.exp(mean(np.asarray(jax.jit(ce)(LOGITS, Y), np.float64))),
        "top_2": mean((np.argsort(-LOGITS)[..., :2] == Y[..., None]).any(-1)),
    }
    for name in "f1", "precision", "recall":
        score = getattr(sklearn_metrics, f"{name}_score")
        expected[name] = score(y, predicted, average="macro", sample_weight=flat)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name
    matrix = sklearn_metrics.confusion_matrix(y, predicted, sample_weight=flat)
    np.testing.assert_allclose(found["confusion"], matrix, rtol=1e-6)


def test_a_metric_may_return_its_own_weights():
    def of_class_two(outputs, labels):
        return outputs.argmax(-1) == labels, labels == 2

    def by_sequence(outputs, labels):
        return (outputs.argmax(-1) == labels).any(-1), jnp.ones(len(labels))

    found = measured({"tokens": of_class_two, "sequences": by_sequence}, Y, W)
    right = PREDICTED == Y
    assert found["tokens"] == pytest.approx(np.average(right, weights=W * (Y == 2)), rel=1e-6)
    # A sequence counts once if one of its tokens does.
    assert found["sequences"] == pytest.approx(np.average(right.any(-1), weights=W.any(-1)))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [thorough(1), 4])
def test_targets_without_weight_may_be_missing(devices):
    targets = np.where(W[..., None] > 0, X[..., :CLASSES], np.nan).astype(np.float32)
    assert np.isnan(targets).any()
    data = ff.ArrayStream(X, targets, W, batch_size=BATCH, epochs=1)
    first, *_, last = loop_of("mse", data, optax.sgd(0.1), ["mae"], devices)
    error = LOGITS[:BATCH] - X[:BATCH, :, :CLASSES]
    w = np.broadcast_to(W[:BATCH, :, None], error.shape)
    assert first.loss == pytest.approx(np.average(error**2, weights=w), rel=1e-6)
    assert first.metrics["mae"] == pytest.approx(np.average(abs(error), weights=w), rel=1e-6)
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(last.state.params))


@pytest.mark.slow
def test_weights_of_classes_apply_to_tokens():
    def params_after_fit(**weights):
        model = ff.Model(nn.Dense(CLASSES), optax.sgd(0.5), "crossentropy")
        model.fit(X, Y, batch_size=BATCH, verbose=0, **weights)
        return model.state.params

    by_class = np.choose(Y, [3.0, 1.0, 0.5]).astype(np.float32)
    weighted = params_after_fit(sample_weight=by_class * W)
    found = params_after_fit(class_weight={0: 3.0, 2: 0.5}, sample_weight=W)
    jax.tree.map(np.testing.assert_array_equal, found, weighted)


@pytest.mark.slow
def test_a_batch_without_any_label_changes_nothing_but_the_step():
    data = [(X[:BATCH], np.full((BATCH, T), -100, np.int32))]
    (checkpoint,) = loop_of(IGNORING, data, optax.adam(0.5))
    assert checkpoint.step == 1 and checkpoint.loss == 0
    jax.tree.map(np.testing.assert_array_equal, dict(checkpoint.state.params), PARAMS)


def test_weights_of_a_loss_that_are_negative_are_refused_when_they_are_read():
    loop = loop_of(lambda o, t: (ce(o, t), jnp.where(t == 1, -1.0, 1.0)), (X, Y))
    with pytest.raises(ValueError, match="weights that are negative, NaN or infinite in step 1"):
        loop.next_step()


@pytest.mark.slow
def test_a_step_of_ones_own_loop_divides_by_the_weights_of_the_loss():
    task = ff.TrainTask(nn.Dense(CLASSES), optax.sgd(0.5), IGNORING)
    state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
    batch = ff.Batch((X[:BATCH],), (IGNORED[:BATCH],))
    updated, sums = jax.jit(ff.make_train_step(task))(state, batch)

    def mean(params):
        values = ce(X[:BATCH] @ params["kernel"] + params["bias"], Y[:BATCH])
        return jnp.sum(MASK[:BATCH] * values) / MASK[:BATCH].sum()

    expected = KERNEL - 0.5 * jax.jit(jax.grad(mean))(PARAMS)["kernel"]
    np.testing.assert_allclose(updated.params["kernel"], expected, rtol=1e-5, atol=1e-6)
    assert sums["loss"][1] == MASK[:BATCH].sum()


@pytest.mark.slow
def test_weights_of_a_whole_batch_that_depend_on_the_outputs_see_the_dropout_of_the_step():
    class Dropping(nn.Module):
        rate: float = 0.5

        @nn.compact
        def __call__(self, x):
            return nn.Dropout(self.rate, deterministic=not self.rate)(nn.Dense(4)(x))

    def paired(z):
        """Each first half against all second halves, as SimCLR's loss."""
        a, b = jnp.split(z, 2)
        values = jax.nn.logsumexp(a @ b.T, -1) - jnp.diagonal(a @ b.T)
        return jnp.concatenate([values] * 2), jax.lax.stop_gradient(jnp.abs(z).sum(-1))

    def norm(**options):
        data = ff.ArrayStream(X[:16, 0], (), batch_size=16)
        task = ff.TrainTask(Dropping(), optax.sgd(0.5), paired, data, **options)
        given = {"grad_norm": True, "stdout": False, "devices": jax.devices()[:1]}
        return ff.TrainLoop(Dropping(0).init, task, 0, **given).next_step().metrics["grad_norm"]

    assert norm(across="batch") == pytest.approx(norm(pad=False), rel=1e-6)
