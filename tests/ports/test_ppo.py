"""The training step of Flax's proximal policy optimization (ppo): as in a loop by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import ByHand, assert_agree, drawn, n_lines
from marks import thorough
from poles import drawn_poles, pushed

import flaxfit as ff

N_ROUNDS, N_EPOCHS, N_ACTORS, N_STEPS, BATCH = 2, 2, 8, 8, 32
DISCOUNT, SMOOTHING, CLIP, OF_VALUE, OF_ENTROPY = 0.99, 0.95, 0.2, 0.5, 0.01


class ActorCritic(nn.Module):
    """The log-probabilities of the actions, and the value of the position."""

    @nn.compact
    def __call__(self, positions):
        x = nn.tanh(nn.Dense(16)(positions))
        return nn.log_softmax(nn.Dense(2)(x)), nn.Dense(1)(x)[:, 0]


OPTIMIZER = optax.adam(optax.linear_schedule(0.01, 0, 16))
policy = jax.jit(ActorCritic().apply)


def experience(params, number):
    """What the actors meet in a round, and how it turned out, one row for each action."""
    rng, rows, values = np.random.default_rng(number), [], []
    positions = drawn_poles(rng, N_ACTORS)
    for _ in range(N_STEPS):
        log_probs, value = jax.device_get(policy({"params": params}, positions))
        actions = (rng.random(N_ACTORS) < np.exp(log_probs[:, 1])).astype(np.int32)
        moved, fell = pushed(positions, actions)
        rows.append((positions, actions, log_probs[np.arange(N_ACTORS), actions], fell))
        values.append(value)
        positions = np.where(fell[:, None], drawn_poles(rng, N_ACTORS), moved)
    values.append(jax.device_get(policy({"params": params}, positions))[1])
    lead, leads = 0.0, []
    for t in reversed(range(N_STEPS)):
        goes_on = 1 - rows[t][3]
        gained = 1 - values[t] + DISCOUNT * values[t + 1] * goes_on
        lead = gained + DISCOUNT * SMOOTHING * goes_on * lead
        leads.insert(0, lead)
    met, actions, old, _ = (np.concatenate(each) for each in zip(*rows, strict=True))
    leads, values = np.concatenate(leads), np.concatenate(values[:-1])
    names = ("positions", "actions", "old", "returns", "leads")
    found = (met, actions, old, np.float32(leads + values), np.float32(leads))
    return dict(zip(names, found, strict=True))


def batches(rows, number):
    """A few passes over the rows of a round, each in an order of its own."""
    rng = np.random.default_rng(number)
    for _ in range(N_EPOCHS):
        for part in rng.permutation(N_ACTORS * N_STEPS).reshape(-1, BATCH):
            yield {name: x[part] for name, x in rows.items()}


def by_hand(params):
    """The loss of each step by hand."""

    def loss_of(params, batch, clip):
        log_probs, values = ActorCritic().apply({"params": params}, batch["positions"])
        of_value = jnp.mean((batch["returns"] - values) ** 2)
        entropy = jnp.mean(jnp.sum(-jnp.exp(log_probs) * log_probs, 1))
        taken = jax.vmap(lambda each, action: each[action])(log_probs, batch["actions"])
        ratios, leads = jnp.exp(taken - batch["old"]), batch["leads"]
        leads = (leads - leads.mean()) / (leads.std() + 1e-8)
        clipped = leads * jnp.clip(ratios, 1 - clip, 1 + clip)
        of_policy = -jnp.mean(jnp.minimum(ratios * leads, clipped))
        return of_policy + OF_VALUE * of_value - OF_ENTROPY * entropy

    hand = ByHand(OPTIMIZER, params, loss_of)
    for number in range(N_ROUNDS):
        clip = CLIP * (1 - number / N_ROUNDS)
        for batch in batches(experience(hand.params, number), number):
            hand.step(batch, clip)
    return hand


def port(init, **options):
    """The same training by flaxfit."""

    def surrogate(apply, batch, rngs):
        rows = batch.inputs
        log_probs, values = apply(rows["positions"])
        taken = jnp.take_along_axis(log_probs, rows["actions"][:, None], 1)[:, 0]
        ratios, leads = jnp.exp(taken - rows["old"]), rows["leads"]
        leads = (leads - leads.mean()) / (leads.std() + 1e-8)
        clipped = leads * jnp.clip(ratios, 1 - rows["clip"], 1 + rows["clip"])
        of_value = (rows["returns"] - values) ** 2
        entropy = jnp.sum(-jnp.exp(log_probs) * log_probs, 1)
        gained = jnp.minimum(ratios * leads, clipped)
        return OF_VALUE * of_value - OF_ENTROPY * entropy - gained, {"entropy": entropy}

    task = ff.TrainTask(ActorCritic(), OPTIMIZER, objective=surrogate, pad=False)
    sample = np.zeros((1, 4), np.float32)
    loop = ff.TrainLoop(init, task, 0, input_sample=sample, stdout=False, **options)
    losses = []
    for number in range(N_ROUNDS):
        clip = CLIP * (1 - number / N_ROUNDS)
        rows = experience(loop.state.params, number)
        parts = [{**batch, "clip": clip} for batch in batches(rows, number)]
        loop.data = parts
        losses += [checkpoint.loss for checkpoint in loop.run(len(parts))]
    return losses, loop.state.params


ONE = {"devices": jax.devices()[:1]}
SHARDED = {"strategy": ff.Sharded(devices=jax.devices()[:4])}


@pytest.mark.slow
@pytest.mark.parametrize("options", [thorough(ONE), SHARDED], ids=[1, 4])
def test_a_policy_trains_on_what_it_meets_as_in_a_loop_by_hand(options):
    init = drawn(ActorCritic(), np.zeros((1, 4), np.float32))
    hand = by_hand(init(None)["params"])
    found, found_params = port(init, **options)
    assert found == pytest.approx(hand.found, rel=1e-6)
    assert_agree(found_params, hand.params)


def test_the_port_is_short():
    assert n_lines(port) <= 30
