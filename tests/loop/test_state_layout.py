import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxfit import TrainState
from flaxfit.loop._state_layout import StateLayout


def state_of(params, key=0):
    return TrainState.create(optax.adam(0.1), {"params": params}, key=key)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_state_comes_back_as_it_was(impl):
    state = state_of(
        {"a": jnp.ones(2), "b": {"c": jnp.zeros((2, 3))}}, jax.random.key(3, impl=impl)
    )
    layout = StateLayout(state)
    leaves = layout.flatten(state)
    assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves)
    again = layout.unflatten(leaves)
    assert jax.random.key_impl(again.key) == impl
    assert jax.tree.structure(again) == jax.tree.structure(state)
    np.testing.assert_array_equal(*(jax.random.key_data(each.key) for each in (again, state)))
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


def test_keys_among_the_collections_of_a_model_are_arrays_too():
    state = state_of({"a": jnp.ones(2)}).replace(model_state={"rngs": jax.random.key(1)})
    layout = StateLayout(state)
    again = layout.unflatten(layout.flatten(state))
    assert jnp.issubdtype(again.model_state["rngs"].dtype, jax.dtypes.prng_key)


def test_it_can_be_traced():
    state = state_of({"a": jnp.ones(2)})
    layout = StateLayout(state)

    @jax.jit
    def double(leaves):
        state = layout.unflatten(leaves)
        return layout.flatten(state.replace(params=jax.tree.map(lambda x: 2 * x, state.params)))

    assert layout.unflatten(double(layout.flatten(state))).params["a"].tolist() == [2, 2]


def test_a_state_of_plain_dicts_in_another_order_gets_the_structure():
    state = state_of({"b": jnp.ones(1), "a": jnp.zeros(2)})
    layout = StateLayout(state)
    other = jax.tree.map(lambda x: x, state).replace(opt_state=tuple(state.opt_state))
    same = layout.restructured(other)
    assert jax.tree.structure(same) == jax.tree.structure(state)
    assert same.params["a"].shape == (2,)


def test_a_state_of_other_arrays_stays_as_it_is():
    layout = StateLayout(state_of({"a": jnp.ones(1)}))
    other = state_of({"b": jnp.ones(1)})
    assert layout.restructured(other) is other


def test_names_of_axes_that_a_state_brings_along_stay_its_own():
    state = state_of({"a": jnp.ones(1)})
    other = state.replace(axes={"params_axes": {}})
    assert StateLayout(state).restructured(other).axes == {"params_axes": {}}
    assert StateLayout(state).restructured(state) is state
