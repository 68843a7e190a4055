"""The stepper: what a step changes, what it donates, and what may be set between two steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from internals import programs_of
from loops import assert_equal, init_of, waves
from marks import thorough

import flaxfit as ff
from flaxfit.optim import MultiOptimizer, OptimizerDef

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


MODEL = nn.Sequential((nn.Dense(8, kernel_init=waves), nn.relu, nn.Dense(2, kernel_init=waves)))
SGD = OptimizerDef(optax.sgd, learning_rate=0.1, momentum=0.9)


def decay(count):
    return 0.1 / (1 + count)


def loop_of(optimizer=SGD, strategy=None, **options):
    loop_options = {"n_steps_per_checkpoint": 4, "steps_per_call": options.pop("k", 1)}
    stream = ff.ArrayStream(X, Y, batch_size=8, shuffle=False)
    task = ff.TrainTask(MODEL.apply, optimizer, "crossentropy", stream, **options)
    where = {"devices": jax.devices()[:1]} if strategy is None else {"strategy": strategy}
    return ff.TrainLoop(init_of(MODEL, 4), task, 0, **where, **loop_options, stdout=False)


def halving(learning_rate):
    """SGD that halves its learning rate, which has no schedule."""
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=learning_rate)

    def update(grads, state, params=None):
        updates, state = inner.update(grads, state, params)
        halved = {"learning_rate": state.hyperparams["learning_rate"] / 2}
        return updates, state._replace(hyperparams=halved)

    return optax.GradientTransformation(inner.init, update)


@pytest.mark.slow
@pytest.mark.parametrize("k", [thorough(1), 2])
@pytest.mark.parametrize("make", [None, thorough(lambda: ff.Sharded(devices=jax.devices()[:2]))])
def test_a_hyperparameter_without_a_schedule_may_move(k, make):
    loop = loop_of(halving(0.1), None if make is None else make(), k=k)
    first, second = loop.next_checkpoint(), loop.next_checkpoint()
    assert float(second.state.opt_state.hyperparams["learning_rate"]) == pytest.approx(
        0.1 / 2 ** int(second.state.step)
    )
    assert second.loss < first.loss


def test_frozen_arrays_stay_and_a_checkpoint_that_is_deleted_harms_nothing():
    loop = loop_of(freeze="layers_0/.*")
    first, later = loop.next_checkpoint(), loop.next_checkpoint()
    frozen = [c.state.params["layers_0"]["kernel"] for c in (first, later)]
    np.testing.assert_array_equal(*frozen)
    frozen[1].delete()  # As a user's own function does that it is donated to.
    assert np.isfinite(loop.next_checkpoint().loss)


def test_a_state_of_plain_dicts_in_another_order_is_gone_on_from():
    loop = loop_of(OptimizerDef(optax.adam, learning_rate=0.1))
    state = loop.next_checkpoint().state
    expected = loop.next_checkpoint().state.params
    adam = state.opt_state.inner_state[0]
    # By name the second moments come first, and they have the shapes of the first ones.
    moments = {"count": adam.count, "nu": adam.nu, "mu": adam.mu}
    assert jax.tree.structure(moments) != jax.tree.structure(adam)
    plain = {
        **state.opt_state._asdict(),
        "inner_state": (moments, *state.opt_state.inner_state[1:]),
    }
    loop.restore(state.replace(opt_state=plain))
    found = loop.next_checkpoint().state.params
    assert_equal(found, expected)
    assert len(programs_of(loop)) == 1


@pytest.mark.slow
def test_an_array_that_a_rate_is_set_to_stays_the_users():
    decaying = OptimizerDef(optax.sgd, learning_rate=decay)
    loop = loop_of(MultiOptimizer(("layers_0/.*", SGD), ("layers_2/.*", decaying)))
    loop.next_checkpoint()
    rate = jax.device_put(jnp.float32(0.5), loop.state_in_place.step.sharding)
    loop.set_hyperparams(learning_rate=rate)
    assert np.isfinite(loop.next_checkpoint().loss)
    assert float(rate) == 0.5


@pytest.mark.slow
def test_a_step_of_ones_own_may_change_the_key():
    @jax.jit
    def step(state, batch):
        key, _ = jax.random.split(state.key)
        params = jax.tree.map(lambda p: p + 1, state.params)
        state = state.replace(step=state.step + 1, params=params, key=key)
        return state, {"loss": (batch.inputs[0].sum(), jnp.ones(()))}

    loop = loop_of(None, step=step)
    key = loop.state.key
    for _ in range(int(loop.next_checkpoint().state.step)):
        key, _ = jax.random.split(key)
    assert_equal(loop.state.key, key)


def test_a_loop_whose_state_was_lost_says_so_and_continues_from_a_checkpoint():
    loop, other = loop_of(), loop_of()
    first, expected = next(loop), [next(other), next(other)][1]
    for leaf in jax.tree.leaves(loop.state_in_place):  # As a step does that is ended half-way.
        leaf.delete()
    with pytest.raises(RuntimeError, match=r"continue from a checkpoint, loop\.restore"):
        next(loop)
    loop.restore(first)
    assert next(loop).metrics == expected.metrics
