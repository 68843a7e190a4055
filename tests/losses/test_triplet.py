"""The triplet and the circle loss: of which pairs, and that they need the whole batch."""

import itertools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from marks import slow, thorough

import flaxfit as ff
from flaxfit import losses

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 2)).astype(np.float32)
LABELS = np.array([0, 0, 1, 1, 1, 2, 2, 9, 0, 1, 1, 2])
WEIGHTS = np.float32([0, 1, 2, 0.5, 0, 1, 1, 3, 0.25, 1, 0, 1])


def triplets(mining):
    """The distances of each anchor to the two others, and the anchor, in float64."""
    distances = np.linalg.norm(X[:, None].astype(float) - X, axis=-1)
    for i, label in enumerate(LABELS):
        positives = [distances[i, j] for j in range(12) if LABELS[j] == label and j != i]
        negatives = [distances[i, j] for j in range(12) if LABELS[j] != label]
        if mining == "hard" and positives:
            yield i, max(positives), min(negatives)
        elif mining == "semi_hard":
            for p in positives:
                yield i, p, min([n for n in negatives if n > p], default=max(negatives))


def mean(mining, margin, weights):
    """The mean over all triplets, weighted by the anchors."""
    found = [(max(p - n + margin, 0), weights[i]) for i, p, n in triplets(mining)]
    values, weights = zip(*found, strict=True)
    return np.average(values, weights=weights)


@pytest.mark.parametrize("mining", ["semi_hard", "hard"])
def test_triplets_are_mined_as_by_hand(mining):
    loss = losses.triplet(margin=0.4, mining=mining)
    values, weights = jax.jit(loss)(X, LABELS)
    n_of = np.bincount([i for i, *_ in triplets(mining)], minlength=12)
    assert weights.tolist() == n_of.tolist() and n_of[7] == 0
    found = np.average(values, weights=weights * WEIGHTS)
    assert found == pytest.approx(mean(mining, 0.4, WEIGHTS), rel=1e-5)
    assert mean(mining, 0.4, WEIGHTS) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("mining", ["semi_hard", "hard"])
def test_the_gradient_is_a_number_where_points_coincide(mining):
    loss = losses.triplet(mining=mining)
    gradient = jax.jit(jax.grad(lambda x, labels: loss(x, labels)[0].sum()))
    for labels in LABELS, np.zeros_like(LABELS), np.arange(12, dtype=LABELS.dtype):
        for x in X, 0 * X:
            assert np.isfinite(gradient(x, labels)).all()


@pytest.mark.slow
def test_the_slope_is_that_of_finite_differences():
    loss = losses.triplet(margin=0.4)
    total = jax.jit(lambda x: (lambda v, w: (v * w).sum() / w.sum())(*loss(x, LABELS)))
    slope, step = float(jax.grad(total)(X)[2, 1]), np.zeros_like(X)
    step[2, 1] = 1e-3
    difference = float(total(X + step) - total(X - step)) / 2e-3
    assert slope == pytest.approx(difference, abs=1e-3) and abs(slope) > 0.01


STRATEGIES = {
    "one device": {"strategy": ff.DataParallel(jax.devices()[:1])},
    "four devices": {},
    "sharded": {"strategy": ff.Sharded()},
    "accumulate": {"accumulate": 3, "strategy": ff.DataParallel(jax.devices()[:1])},
}


# Each loss once, and each division of a batch.
KEPT = [
    ("circle", "four devices"),
    ("supervised_contrastive", "sharded"),
    ("triplet", "accumulate"),
]


class Scaled(nn.Module):
    """The inputs, with scales that are learned."""

    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (2,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        case if case in KEPT else thorough(*case)
        for case in itertools.product(("triplet", "circle", "supervised_contrastive"), STRATEGIES)
    ],
)
def test_all_strategies_train_and_measure_the_loss_of_the_whole_batch(name, strategy):
    """Examples of weight 0 are no anchors, and others are compared with them."""
    options = STRATEGIES[strategy]
    loss = losses.resolve(name)

    def by_hand(scale):
        values, weights = loss(X * scale, LABELS)
        return (values * weights * WEIGHTS).sum() / (weights * WEIGHTS).sum()

    value, slope = jax.jit(jax.value_and_grad(by_hand))(np.ones(2, np.float32))
    expected = pytest.approx(float(value), rel=1e-5)
    model = ff.Model(Scaled(), optax.sgd(0.1), name, across="batch", **options)
    measured = model.evaluate(X, LABELS, sample_weight=WEIGHTS)
    assert measured["loss"] == expected
    history = model.fit(X, LABELS, sample_weight=WEIGHTS, verbose=0, shuffle=False)
    assert history["loss"][0] == expected
    np.testing.assert_allclose(model.get_weights()[0], 1 - 0.1 * slope, rtol=1e-5)
    assert np.abs(slope).min() > 1e-3


@pytest.mark.slow
def test_a_lone_example_of_circle_does_not_count_and_has_a_gradient():
    """Its values are beside those of Keras in `test_losses_against_keras.py`."""
    units = X / np.linalg.norm(X, axis=-1, keepdims=True)
    values, weights = jax.jit(losses.circle)(units, LABELS)
    assert weights.tolist() == (LABELS != 9).tolist() and values[7] == 0
    gradient = jax.jit(jax.grad(lambda x: losses.circle(x, LABELS)[0].sum()))
    assert np.isfinite(gradient(units)).all()


@pytest.mark.parametrize("name", ["triplet", slow("circle")])
def test_embeddings_need_one_label_each_and_the_whole_batch(name):
    with pytest.raises(ValueError, match=f"'{name}' expects embeddings of shape .batch, features."):
        losses.resolve(name)(X, LABELS[:, None])
    task = ff.TrainTask(lambda v, x, **_: (x * v["params"], {}), optax.sgd(0.1), name)
    state = ff.TrainState.create(task.optimizer, {"params": np.ones(2, np.float32)})
    with pytest.raises(ValueError, match="set across='batch' in the task"):
        ff.TrainLoop(state, task, 0, stdout=False).next_step((X, LABELS))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"integer labels, .* of float32\. Cast them: y\.astype"):
        losses.triplet(X, LABELS.astype(np.float32))
    with pytest.raises(ValueError, match="no mining='easy': it is 'semi_hard' or 'hard'"):
        losses.triplet(X, LABELS, mining="easy")
