"""An encoder that predicts its own moving average (BYOL): as in a loop by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import ByHand, assert_agree, drawn
from marks import thorough
from sklearn.datasets import load_digits

import flaxfit as ff

N_STEPS, BATCH, DECAY = 4, 16, 0.9
DIGITS = load_digits().data[: N_STEPS * BATCH].astype(np.float32) / 16
VIEWS = [np.clip(DIGITS + np.float32(d), 0, 1) for d in np.random.default_rng(0).normal(0, 0.2, 2)]


class Network(nn.Module):
    """What an image is projected to, and what that says of another view of it."""

    train: bool = False

    @nn.compact
    def __call__(self, x):
        hidden = nn.BatchNorm(use_running_average=not self.train)(nn.Dense(16)(x))
        projection = nn.Dense(8)(nn.relu(hidden))
        return projection, nn.Dense(8)(nn.relu(nn.Dense(16)(projection)))


OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def distance(guess, target):
    return 2 - 2 * optax.cosine_similarity(guess, target)


def by_hand(state):
    """The loss of each step by hand, and the average of the parameters."""

    def call(params, view):
        variables = {"params": params, **state.model_state}
        return Network(train=True).apply(variables, view, mutable=True)[0]

    def loss_of(params, target, views):
        guesses = [call(params, view)[1] for view in views]
        goals = [call(target, view)[0] for view in reversed(views)]
        return jnp.mean(sum(map(distance, guesses, goals)))

    hand, target = ByHand(OPTIMIZER, state.params, loss_of), state.params
    for start in range(0, len(DIGITS), BATCH):
        hand.step(target, [view[start : start + BATCH] for view in VIEWS])
        target = jax.tree.map(lambda t, p: DECAY * t + (1 - DECAY) * p, target, hand.params)
    return hand, target


def byol(apply, batch, rngs, ema):
    one, other = batch.inputs
    goals = [ema(view)[0] for view in (other, one)]
    guesses = [apply(view)[1] for view in (one, other)]
    return sum(map(distance, guesses, goals))


ONE = {"devices": jax.devices()[:1]}
SHARDED = {"strategy": ff.Sharded.fsdp(devices=jax.devices()[:4])}


@pytest.mark.slow
@pytest.mark.parametrize("options", [thorough(ONE), SHARDED], ids=["one", "sharded"])
def test_a_network_learns_from_its_average_as_in_a_loop_by_hand(options):
    data = ff.ArrayStream(tuple(VIEWS), (), batch_size=BATCH)
    task = ff.TrainTask(Network(), OPTIMIZER, objective=byol, data=data, ema=DECAY, pad=False)
    init = drawn(Network(), DIGITS[:1])
    loop = ff.TrainLoop(init, task, 0, n_steps=N_STEPS, stdout=False, **options)
    hand, target = by_hand(loop.state)
    assert [checkpoint.loss for checkpoint in loop] == pytest.approx(hand.found, rel=1e-6)
    assert_agree(loop.state.params, hand.params)
    assert_agree(ff.optim.swap_ema(loop.state).params, target)
