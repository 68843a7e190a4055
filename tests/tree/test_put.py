"""Copies: a placed array never shares memory with the array that it was made from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.tree import copied, put, put_like

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
COPIES = {
    "copied": copied,
    "put": lambda x: put(x, ONE, may_alias=False),
    "put_like": lambda x: put_like(x, jax.device_put(0.0, ONE)),
    "put_like, anywhere": lambda x: put_like(x, None),
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_a_host_array_keeps_its_values(copy):
    for _ in range(8):  # Whether JAX could share the memory depends on its address.
        array = np.zeros(2**16, np.float32)
        found = COPIES[copy](array)
        array[:] = 1
        assert not np.asarray(found).any()


def test_a_copy_of_a_device_array_outlives_it():
    given = {"w": jnp.arange(3.0), "key": jax.random.key(1)}
    expected = jax.random.key_data(given["key"]).tolist()
    found = copied(given)
    jax.tree.map(lambda x: x.delete(), given)
    assert found["w"].tolist() == [0, 1, 2]
    assert jax.random.key_data(found["key"]).tolist() == expected


def test_a_copy_stays_where_the_array_is():
    mesh = jax.make_mesh((4,), ("data",))
    split = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("data")))
    assert copied(split).sharding == split.sharding
    assert not copied(jnp.ones(2)).committed


def test_copies_can_be_traced():
    assert jax.jit(copied)({"x": 2.0})["x"] == 2
