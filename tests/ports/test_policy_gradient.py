"""A policy that trains on its own samples (REINFORCE): as in a loop by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import ByHand, assert_agree, drawn
from marks import thorough
from poles import drawn_poles, pushed

import flaxfit as ff

N_ROUNDS, N_POLES, N_STEPS = 4, 8, 10


class Policy(nn.Module):
    @nn.compact
    def __call__(self, poles):
        return nn.Dense(2)(nn.tanh(nn.Dense(16)(poles)))


OPTIMIZER = optax.adam(0.01)
policy = jax.jit(Policy().apply)


def episodes(params, number):
    """What the policy does until each pole falls, and how long it still stood after each step."""
    rng, steps, stands = np.random.default_rng(number), [], np.ones(N_POLES, np.float32)
    poles = drawn_poles(rng, N_POLES)
    for _ in range(N_STEPS):
        logits = jax.device_get(policy({"params": params}, poles))
        odds = 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
        actions = (rng.random(N_POLES) < odds).astype(np.int32)
        steps.append((poles, actions, stands))
        poles, fell = pushed(poles, actions)
        stands = stands * (1 - fell.astype(np.float32))
    poles, actions, stood = (np.stack(each, 1) for each in zip(*steps, strict=True))
    gains = stood[:, ::-1].cumsum(1)[:, ::-1]
    assert 0 < stood.mean() < 1
    return poles, (actions, gains - gains.mean(0)), stood


def by_hand(params):
    """The loss of each round by hand."""

    def loss_of(params, poles, targets, stood):
        actions, gains = targets
        odds = nn.log_softmax(Policy().apply({"params": params}, poles))
        taken = jnp.sum(odds * jax.nn.one_hot(actions, 2), -1)
        return -jnp.sum(taken * gains * stood) / jnp.sum(stood)

    hand = ByHand(OPTIMIZER, params, loss_of)
    for number in range(N_ROUNDS):
        hand.step(*episodes(hand.params, number))
    return hand


def reinforce(logits, actions, gains):
    return gains * ff.losses.crossentropy(logits, actions)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, thorough(4)])
def test_a_policy_trains_on_its_own_samples_as_in_a_loop_by_hand(n):
    sample = np.zeros((1, 4), np.float32)
    task, options = ff.TrainTask(Policy(), OPTIMIZER, reinforce), {"devices": jax.devices()[:n]}
    init = drawn(Policy(), sample)
    loop = ff.TrainLoop(init, task, 0, input_sample=sample, stdout=False, **options)
    hand = by_hand(loop.state.params)
    batches = (episodes(loop.state.params, number) for number in range(N_ROUNDS))
    found = [loop.next_step(batch).loss for batch in batches]
    assert found == pytest.approx(hand.found, rel=1e-6)
    assert_agree(loop.state.params, hand.params)
