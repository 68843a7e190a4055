import jax
import jax.numpy as jnp
import optax
import pytest
from loops import assert_identical

from flaxfit import TrainState
from flaxfit.loop._state_layout import StateLayout


def state_of(params, key=0):
    return TrainState.create(optax.adam(0.1), {"params": params}, key=key)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_state_comes_back_as_it_was_with_its_keys(impl):
    state = state_of(
        {"a": jnp.ones(2), "b": {"c": jnp.zeros((2, 3))}}, jax.random.key(3, impl=impl)
    ).replace(model_state={"rngs": jax.random.key(1)})
    layout = StateLayout(state)
    leaves = layout.flatten(state)
    assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves)
    again = layout.unflatten(leaves)
    assert jax.random.key_impl(again.key) == impl
    assert_identical(again, state)


def test_a_state_of_other_arrays_stays_as_it_is():
    layout = StateLayout(state_of({"a": jnp.ones(1)}))
    other = state_of({"b": jnp.ones(1)})
    assert layout.restructured(other) is other


def test_names_of_axes_that_a_state_brings_along_stay_its_own():
    state = state_of({"a": jnp.ones(1)})
    other = state.replace(axes={"params_axes": {}})
    assert StateLayout(state).restructured(other).axes == {"params_axes": {}}
    assert StateLayout(state).restructured(state) is state
