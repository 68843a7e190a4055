"""TrainState and how it is made."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit._state import as_key

X = np.ones((2, 3), np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        self.sow("intermediates", "x", x)
        return nn.Dropout(0.5, deterministic=False)(x)


def make_state(optimizer=None):
    return ff.init_state(Net().init, optimizer or optax.adam(0.1), jax.random.key(0), (X,))


def test_init_state_splits_parameters_from_other_collections():
    state = make_state()
    assert state.params["Dense_0"]["kernel"].shape == (3, 4)
    assert state.model_state.keys() == {"batch_stats"}
    assert int(state.step) == 0 and state.step.dtype == jnp.int32
    assert jnp.issubdtype(state.key.dtype, jax.dtypes.prng_key)
    assert state.variables.keys() == {"params", "batch_stats"}


def test_init_state_needs_only_shapes():
    shapes = (jax.ShapeDtypeStruct((2, 3), jnp.float32),)
    abstract = jax.eval_shape(lambda: ff.init_state(Net().init, optax.adam(0.1), 0, shapes))
    assert abstract.params["Dense_0"]["kernel"].shape == (3, 4)


def test_the_same_key_gives_the_same_state():
    a, b = make_state(), make_state()
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
    other = ff.init_state(Net().init, optax.adam(0.1), 1, (X,))
    assert not np.array_equal(a.params["Dense_0"]["kernel"], other.params["Dense_0"]["kernel"])


def test_apply_gradient_is_one_update_of_the_optimizer():
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    state = make_state(optimizer)
    grads = jax.tree.map(jnp.ones_like, state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    after = state.apply_gradient(optimizer, grads)
    jax.tree.map(
        np.testing.assert_array_equal, after.params, optax.apply_updates(state.params, updates)
    )
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, opt_state)
    assert int(after.step) == 1 and after.model_state is state.model_state
    assert after.key is state.key


def test_the_model_state_can_be_replaced_by_an_update():
    state = make_state()
    grads = jax.tree.map(jnp.ones_like, state.params)
    assert state.apply_gradient(optax.adam(0.1), grads, model_state={"a": 1}).model_state == {
        "a": 1
    }


def test_further_arguments_reach_the_optimizer():
    optimizer = optax.contrib.reduce_on_plateau(patience=1)
    state = ff.TrainState(jnp.int32(0), jnp.ones(2), optimizer.init(jnp.ones(2)), {}, as_key(0))
    after = state.apply_gradient(optimizer, jnp.ones(2), value=jnp.float32(3))
    assert float(after.opt_state.best_value) == 3.0


def test_parts_can_be_replaced():
    state = make_state()
    assert int(state.replace_step(7).step) == 7
    assert state.replace_params({"w": 1}).params == {"w": 1}
    inference = state.for_inference()
    assert inference.params is state.params and not hasattr(inference, "opt_state")
    assert inference.variables.keys() == {"params", "batch_stats"}


@pytest.mark.parametrize("key", [5, jax.random.key(5), jax.random.PRNGKey(5)])
def test_keys_of_every_kind_become_typed(key):
    assert as_key(key) == jax.random.key(5)


def test_given_weights_are_not_traced():
    class Given:
        gives_weights = True

        def __call__(self, rngs, x):
            assert not isinstance(x, jax.core.Tracer)
            return {"params": jnp.ones(3)}

    state = ff.init_state(Given(), optax.adam(0.1), 0, (X,))
    np.testing.assert_array_equal(state.params, np.ones(3))
