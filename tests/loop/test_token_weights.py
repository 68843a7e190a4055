"""Weights by token: `sum(w v) / sum(w)` over all tokens, however a batch is divided."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow, thorough

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
LR = 0.5

MODULE = nn.Dense(CLASSES)
KERNEL = RNG.normal(size=(4, CLASSES)).astype(np.float32)
PARAMS = {"kernel": KERNEL, "bias": np.zeros(CLASSES, np.float32)}


def init(rngs, x):
    return {"params": PARAMS}


def weighted(outputs, labels):
    """A loss with weights of its own, which only one label in two has."""
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels), labels != 1


class TwoHeads(nn.Module):
    """The same logits twice, by name."""

    @nn.compact
    def __call__(self, x):
        outputs = nn.Dense(CLASSES, name="head")(x)
        return {"a": outputs, "b": outputs}


IGNORING = losses.crossentropy(ignore_label=-100)
BY_NAME = {"a": "crossentropy", "b": "crossentropy"}
# By case: the loss, the targets, the weights, and by output a factor and the weights that count.
CASES = {
    "weights": ("crossentropy", Y, W, [(1, W)]),
    "mask": ("crossentropy", Y, MASK.astype(bool), [(1, MASK)]),
    "ignored label": (IGNORING, IGNORED, None, [(1, MASK)]),
    "ignored label and weights": (IGNORING, IGNORED, W[:, 0] + 1, [(1, MASK * (W[:, :1] + 1))]),
    "returned": (weighted, Y, W, [(1, W * (Y != 1))]),
    "by output": (BY_NAME, {"a": Y, "b": Y}, {"a": W}, [(1, W), (1, np.ones((N, T)))]),
    "tokens of all outputs": (BY_NAME, {"a": Y, "b": Y}, W, [(2, W)]),
    "ignored in one output": (
        {"a": IGNORING, "b": "crossentropy"},
        {"a": IGNORED, "b": Y},
        None,
        [(1, MASK), (1, np.ones((N, T)))],
    ),
}
ONE = {"devices": jax.devices()[:1]}
STRATEGIES = {
    "one": ONE,
    "data parallel": {"devices": jax.devices()[:4]},
    "fsdp": {"strategy": ff.Sharded.fsdp(devices=jax.devices()[:4])},
    "virtual": {"strategy": ff.DataParallel(jax.devices()[:2], virtual_replicas=4)},
}


@functools.cache
def by_hand(name):
    """The parameters after one pass over the data, and the means over all tokens."""
    terms = CASES[name][3]

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params, x, y, weights):
        logits = x @ params["kernel"] + params["bias"]
        found = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        means = (
            c * jnp.sum(w * found) / jnp.sum(w) for (c, _), w in zip(terms, weights, strict=True)
        )
        return sum(means), found

    params, totals = PARAMS, [np.zeros(2) for _ in terms]
    for start in range(0, N, BATCH):
        rows = slice(start, start + BATCH)
        grads, values = gradient(params, X[rows], Y[rows], [w[rows] for _, w in terms])
        found = np.asarray(values, np.float64)
        for total, (factor, w) in zip(totals, terms, strict=True):
            total += factor * (w[rows] * found).sum(), w[rows].sum()
        params = jax.tree.map(lambda p, g: p - LR * g, params, grads)
    return params, sum(total / weight for total, weight in totals)


def cases():
    """One quick case; each loss and weights on one strategy in turn; and all of them.

    Weights hold a mask, too, and an ignored label with weights holds one without; two outputs, of
    which one has weights or an ignored label, hold those whose weights are the same.
    """
    in_turn = list(itertools.product(STRATEGIES, (1, 2)))
    for i, name in enumerate(CASES):
        is_held = name in ("mask", "ignored label", "returned", "tokens of all outputs")
        for case in in_turn:
            is_quick = case == ("data parallel", 2) and name == "returned"
            mark = slow if case == in_turn[i % len(in_turn)] and not is_held else thorough
            yield (name, *case) if is_quick else mark(name, *case)


@pytest.mark.parametrize(("name", "strategy", "accumulate"), list(cases()))
def test_training_is_that_of_the_whole_batch_by_hand(name, strategy, accumulate):
    loss, targets, weights, terms = CASES[name]
    is_named = isinstance(loss, dict)
    module = TwoHeads() if is_named else MODULE
    data = ff.ArrayStream(X, targets, weights, batch_size=BATCH, epochs=1)
    task = ff.TrainTask(module, optax.sgd(LR), loss, data, accumulate=accumulate)
    start = {"head": PARAMS} if is_named else PARAMS
    loop = ff.TrainLoop(
        lambda rngs, x: {"params": start},
        task,
        0,
        n_steps_per_checkpoint=3,
        first_checkpoint=3,
        stdout=False,
        **STRATEGIES[strategy],
    )
    (checkpoint,) = loop
    params, mean = by_hand(name)
    found = checkpoint.state.params["head"] if is_named else checkpoint.state.params
    for path in params:
        np.testing.assert_allclose(found[path], params[path], rtol=1e-5, atol=1e-6)
    assert checkpoint.loss == pytest.approx(mean, rel=1e-6)


LOGITS = X @ KERNEL
PREDICTED = LOGITS.argmax(-1)
VALUES = np.asarray(jax.jit(optax.softmax_cross_entropy_with_integer_labels)(LOGITS, Y), np.float64)


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
        "perplexity": np.exp(mean(VALUES)),
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
    task = ff.TrainTask(MODULE, optax.sgd(0.1), "mse", data, ["mae"])
    loop = ff.TrainLoop(init, task, 0, stdout=False, devices=jax.devices()[:devices])
    first, *_, last = loop
    error = LOGITS[:BATCH] - X[:BATCH, :, :CLASSES]
    w = np.broadcast_to(W[:BATCH, :, None], error.shape)
    assert first.loss == pytest.approx(np.average(error**2, weights=w), rel=1e-6)
    assert first.metrics["mae"] == pytest.approx(np.average(abs(error), weights=w), rel=1e-6)
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(last.state.params))


@pytest.mark.slow
def test_weights_of_classes_apply_to_tokens():
    def params_after_fit(**weights):
        model = ff.Model(MODULE, optax.sgd(LR), "crossentropy")
        model.fit(X, Y, batch_size=BATCH, verbose=0, **weights)
        return model.state.params

    by_class = np.choose(Y, [3.0, 1.0, 0.5]).astype(np.float32)
    weighted = params_after_fit(sample_weight=by_class * W)
    found = params_after_fit(class_weight={0: 3.0, 2: 0.5}, sample_weight=W)
    jax.tree.map(np.testing.assert_array_equal, found, weighted)


@pytest.mark.slow
def test_a_batch_without_any_label_changes_nothing_but_the_step():
    data = [(X[:BATCH], np.full((BATCH, T), -100, np.int32))]
    task = ff.TrainTask(MODULE, optax.adam(LR), IGNORING, data)
    (checkpoint,) = ff.TrainLoop(init, task, 0, stdout=False, **ONE)
    assert checkpoint.step == 1 and checkpoint.loss == 0
    jax.tree.map(np.testing.assert_array_equal, dict(checkpoint.state.params), PARAMS)


def test_weights_of_a_loss_that_are_negative_are_refused_when_they_are_read():
    def odd(outputs, labels):
        values = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        return values, jnp.where(labels == 1, -1.0, 1.0)

    task = ff.TrainTask(MODULE, optax.sgd(LR), odd, (X, Y))
    loop = ff.TrainLoop(init, task, 0, stdout=False, **ONE)
    with pytest.raises(ValueError, match="weights that are negative, NaN or infinite in step 1"):
        loop.next_step()


@pytest.mark.slow
def test_a_step_of_ones_own_loop_divides_by_the_weights_of_the_loss():
    task = ff.TrainTask(MODULE, optax.sgd(LR), IGNORING)
    state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
    batch = ff.Batch((X[:BATCH],), (IGNORED[:BATCH],))
    updated, sums = jax.jit(ff.make_train_step(task))(state, batch)

    def mean(params):
        logits = X[:BATCH] @ params["kernel"] + params["bias"]
        values = optax.softmax_cross_entropy_with_integer_labels(logits, Y[:BATCH])
        return jnp.sum(MASK[:BATCH] * values) / MASK[:BATCH].sum()

    expected = KERNEL - LR * jax.jit(jax.grad(mean))(PARAMS)["kernel"]
    np.testing.assert_allclose(updated.params["kernel"], expected, rtol=1e-5, atol=1e-6)
    assert sums["loss"][1] == MASK[:BATCH].sum()
