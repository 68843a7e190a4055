"""Random keys as plain arrays."""

import jax
import jax.numpy as jnp
import pytest

from flaxfit.loop._keys import key_types, without_types


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_told_and_give_their_data(impl):
    leaves = [jnp.ones(2), jax.random.key(3, impl=impl), 5, jax.random.PRNGKey(1)]
    types = key_types(leaves)
    plain = without_types(leaves, types)
    assert [*types] == [1] and plain[1].dtype == "uint32"
    assert plain[0] is leaves[0] and plain[2] == 5 and plain[3] is leaves[3]
    assert jax.random.wrap_key_data(plain[1], impl=types[1]) == leaves[1]
