"""Random keys as plain arrays, and back."""

import jax
import jax.numpy as jnp
import pytest

from flaxfit._keys import key_types, with_types, without_types


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_come_back_as_they_were(impl):
    leaves = [jnp.ones(2), jax.random.key(3, impl=impl), 5, jax.random.PRNGKey(1)]
    types = key_types(leaves)
    plain = without_types(leaves, types)
    assert [*types] == [1] and plain[1].dtype == "uint32"
    assert plain[0] is leaves[0] and plain[2] == 5 and plain[3] is leaves[3]
    back = with_types(plain, types)
    assert back[1].dtype == leaves[1].dtype
    assert jax.random.bits(back[1]) == jax.random.bits(leaves[1])
