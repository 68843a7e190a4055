"""Single batches, predictions, lists of weights and compile under every strategy."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from internals import loop_of_model
from loops import waves
from marks import usual
from strategies import one_device

import flaxfit as ff
from flaxfit.strategies import _specs

pytestmark = pytest.mark.slow

N = 13  # Which 4 devices cannot share evenly.
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 8)).astype(np.float32)
LABELS = RNG.integers(0, 3, N)
VALUES = X.sum(1, keepdims=True)
WEIGHTS = RNG.uniform(0.1, 2, N).astype(np.float32)
OTHERS = RNG.uniform(0.1, 2, N).astype(np.float32)
CLASS_WEIGHT = {0: 1.0, 2: 3.0}


STRATEGIES = {
    "one": one_device,
    "parallel": ff.DataParallel,
    "sharded": lambda: ff.Sharded(fsdp=True),
}


class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, kernel_init=waves)(x), nn.Dense(1, kernel_init=waves)(x)


@pytest.fixture
def strategy(request, monkeypatch):
    monkeypatch.setattr(_specs, "SMALL", 0)  # Else no array of these models is split.
    return STRATEGIES[request.param]()


def under(*names):
    """Runs a test under these strategies, and thoroughly under all."""
    return pytest.mark.parametrize("strategy", usual(*names, of=STRATEGIES), indirect=True)


def classifier(strategy=None, **options):
    given = {"optimizer": optax.adam(0.1), "metrics": ["accuracy"], **options}
    module, optimizer = nn.Dense(3, kernel_init=waves), given.pop("optimizer")
    return ff.Model(module, optimizer, "crossentropy", strategy=strategy, **given)


def two_heads(strategy=None, **options):
    losses, optimizer = ["crossentropy", "mse"], optax.adam(0.1)
    return ff.Model(TwoHeads(), optimizer, losses, strategy=strategy, **options)


def crossentropy(weights, x, labels):
    """The losses of examples, from the list of weights of a dense layer."""
    bias, kernel = weights
    logits = x @ kernel + bias
    shifted = logits - logits.max(1, keepdims=True)
    return np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(x)), labels]


def assert_same_weights(one, other):
    for some, others in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(some, others, rtol=1e-4, atol=1e-5)


@under("parallel")
def test_a_batch_is_trained_as_by_fit(strategy):
    model = classifier(strategy, accumulate=2)
    model.build(X)
    weights = WEIGHTS * np.vectorize(lambda label: CLASS_WEIGHT.get(label, 1.0))(LABELS)
    losses = crossentropy(model.get_weights(), X, LABELS)
    loss, accuracy = model.train_on_batch(X, LABELS, WEIGHTS, CLASS_WEIGHT)
    assert loss == pytest.approx(np.sum(weights * losses) / np.sum(weights), rel=1e-5)
    assert 0 <= accuracy <= 1
    other = classifier(one_device())
    options = {"shuffle": False, "verbose": 0}
    weighted = {"sample_weight": WEIGHTS, "class_weight": CLASS_WEIGHT}
    history = other.fit(X, LABELS, N, **weighted, **options)
    assert history["loss"][0] == pytest.approx(loss, rel=1e-5)
    assert history["accuracy"][0] == pytest.approx(accuracy, rel=1e-5)
    assert_same_weights(model, other)
    for size in 5, 1, N:  # Smaller ones, than devices too; and fit in between.
        model.train_on_batch(X[:size], LABELS[:size])
        other.fit(X, LABELS, N, sample_weight=np.arange(N) < size, **options)
    assert_same_weights(model, other)
    for each in model, other:
        each.fit(X, LABELS, 4, **options)
        each.train_on_batch(X, LABELS, np.ones(N))
    assert_same_weights(model, other)
    assert model.step == other.step == 9


def test_balanced_classes_of_one_batch_are_refused():
    with pytest.raises(
        ValueError, match="labels of all examples, but one batch has only some of them"
    ):
        classifier(one_device()).train_on_batch(X, LABELS, class_weight="balanced")


@under("parallel")
def test_a_batch_of_several_outputs_is_trained_and_measured(strategy):
    model, other = two_heads(strategy, accumulate=2), two_heads(one_device())
    weights = [WEIGHTS, OTHERS]
    by_name = model.train_on_batch(X, [LABELS, VALUES], weights, return_dict=True)
    history = other.fit(X, [LABELS, VALUES], N, verbose=0, shuffle=False, sample_weight=weights)
    assert by_name["loss"] == pytest.approx(history["loss"][0], rel=1e-5)
    assert_same_weights(model, other)
    found = model.test_on_batch(X, [LABELS, VALUES], weights, True)
    logits, values = model.predict_on_batch(X)
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    first = -np.log(shifted[np.arange(N), LABELS] / shifted.sum(1))
    second = ((values - VALUES) ** 2).mean(1)
    expected = (WEIGHTS * first).sum() / WEIGHTS.sum() + (OTHERS * second).sum() / OTHERS.sum()
    assert found["loss"] == pytest.approx(expected, rel=1e-4)
    in_order = model.evaluate(X, [LABELS, VALUES], N, 0, weights, None, None, False)
    assert in_order == pytest.approx(list(found.values()), rel=1e-4)
    assert model.metrics_names == list(found)


@under("parallel")
def test_a_batch_whose_loss_sees_all_of_it_has_any_size(strategy):
    embedded = [
        ff.Model(nn.Dense(3), optax.adam(0.1), "triplet", across="batch", strategy=each)
        for each in (strategy, one_device())
    ]
    found, expected = (m.test_on_batch(X[:5], LABELS[:5]) for m in embedded)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found > 0
    found, expected = (m.train_on_batch(X, LABELS) for m in embedded)
    assert found == pytest.approx(expected, rel=1e-5)


@under("sharded")
def test_steps_are_measured_and_predicted(strategy):
    model = classifier(strategy)
    model.build(X)
    part = crossentropy(model.get_weights(), X[:10], LABELS[:10])
    loss, accuracy = model.evaluate(X, LABELS, 5, 0, WEIGHTS, 2, return_dict=False)
    assert loss == pytest.approx(np.average(part, weights=WEIGHTS[:10]), rel=1e-5)
    outputs = model.predict(X)
    hits = outputs[:10].argmax(1) == LABELS[:10]
    assert accuracy == pytest.approx(np.average(hits, weights=WEIGHTS[:10]), rel=1e-5)
    bias, kernel = model.get_weights()
    np.testing.assert_allclose(outputs, X @ kernel + bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.predict(X, 5, 0, 2), outputs[:10], rtol=1e-4, atol=1e-5)
    read = [each for _, each in model.predictions(X, 5)]
    assert [*map(len, read)] == [5, 5, 3]
    np.testing.assert_allclose(np.concatenate(read), outputs, rtol=1e-4, atol=1e-5)
    for size in 1, 3, N:
        single = model.predict_on_batch(X[:size])
        np.testing.assert_allclose(single, outputs[:size], rtol=1e-4, atol=1e-5)


@under("sharded")
def test_weights_are_read_and_set_whole(strategy):
    model, other = classifier(strategy), classifier(one_device())
    other.fit(X, LABELS, verbose=0)
    model.build(X)
    for is_trained in False, True:
        if is_trained:
            model.fit(X, LABELS, verbose=0)
        model.set_weights(other.get_weights())
        assert_same_weights(model, other)
    assert all(isinstance(each, np.ndarray) for each in model.get_weights())
    kernel = loop_of_model(model).state_in_place.params["kernel"]
    assert kernel.sharding.is_fully_replicated == (not isinstance(strategy, ff.Sharded))
    single = classifier(one_device())
    single.build(X)
    single.set_weights(other.get_weights())
    for each in model, single:
        each.train_on_batch(X, LABELS)
    assert_same_weights(model, single)  # Both with fresh moments.
    held = jax.tree.leaves(model.state.opt_state)
    assert any(np.abs(each).max() > 0 for each in map(np.asarray, held[1:]))


@under("sharded")
def test_compile_continues_as_on_one_device(strategy):
    model, other = (classifier(each, accumulate=2) for each in (strategy, one_device()))
    for each in model, other:
        each.fit(X, LABELS, shuffle=False, verbose=0)
        each.compile(optax.adam(0.01), metrics=["accuracy", "top_2_accuracy"])
        each.fit(X, LABELS, shuffle=False, verbose=0, sample_weight=WEIGHTS)
        each.compile(clip_norm=0.01, accumulate=1)
        each.train_on_batch(X, LABELS)
    assert_same_weights(model, other)
    assert model.step == 3 and model.metrics_names == ["loss", "accuracy", "top_2_accuracy"]
