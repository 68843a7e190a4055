"""The circle loss: of which examples, and that it needs the whole batch."""

import jax
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit import losses

GENERATOR = np.random.default_rng(0)
EMBEDDINGS = GENERATOR.normal(size=(8, 3)).astype(np.float32)
EMBEDDINGS /= np.linalg.norm(EMBEDDINGS, axis=-1, keepdims=True)
LABELS = np.array([0, 0, 1, 1, 1, 2, 2, 9])


def by_hand(gamma, margin):
    """The formula of the paper, example by example."""
    similar = EMBEDDINGS @ EMBEDDINGS.T
    found = []
    for i, label in enumerate(LABELS):
        near = [similar[i, j] for j in range(8) if LABELS[j] == label and j != i]
        far = [similar[i, j] for j in range(8) if LABELS[j] != label]
        pulled = sum(np.exp(-gamma * (1 + margin - s) * (s - 1 + margin)) for s in near)
        pushed = sum(np.exp(gamma * max(s + margin, 0) * (s - margin)) for s in far)
        found.append(np.log1p(pulled * pushed))
    return found


@pytest.mark.slow
def test_circle_is_that_of_the_paper_and_a_lone_example_does_not_count():
    loss = jax.jit(losses.circle(gamma=4.0, margin=0.2))
    values, weights = loss(EMBEDDINGS, LABELS)
    np.testing.assert_allclose(values, by_hand(4.0, 0.2), rtol=1e-5)
    assert weights.tolist() == [1] * 7 + [0]


@pytest.mark.slow
def test_a_lone_example_has_a_gradient():
    gradient = jax.jit(jax.grad(lambda x: losses.circle(x, LABELS)[0].sum()))
    assert np.isfinite(gradient(EMBEDDINGS)).all()


def test_circle_needs_the_whole_batch():
    task = ff.TrainTask(lambda v, x, **_: (x * v["params"], {}), optax.sgd(0.1), "Circle")
    state = ff.TrainState.create(task.optimizer, {"params": np.ones(3, np.float32)})
    loop = ff.TrainLoop(state, task, 0, stdout=False)
    with pytest.raises(ValueError, match="set across='batch' in the task"):
        loop.next_step((EMBEDDINGS, LABELS))


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="'circle' expects embeddings of shape .batch, features."):
        losses.circle(EMBEDDINGS, LABELS[:, None])
