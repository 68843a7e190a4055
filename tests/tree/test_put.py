"""Copies, which never share memory with their originals, and shapes, which stand for arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.tree import copied, put, put_like, shapes_of, structure_of

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


ARRAYS = {"a": jnp.ones((2, 3)), "b": (np.zeros(4, np.int8), None)}


def test_arrays_on_host_and_devices_become_shapes_which_stay_as_they_are():
    shapes = shapes_of(ARRAYS)
    a, b = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((4,), "int8")
    assert shapes == shapes_of(shapes) == {"a": a, "b": (b, None)}


def test_a_key_is_that_of_all_arrays_alike_and_of_no_others():
    key = structure_of(ARRAYS)
    assert {key: "found"}[structure_of(jax.tree.map(np.asarray, ARRAYS))] == "found"
    for other in (
        {"a": ARRAYS["a"], "b": [*ARRAYS["b"]]},
        {"a": ARRAYS["a"][:1], "b": ARRAYS["b"]},
        {"a": ARRAYS["a"].astype(jnp.bfloat16), "b": ARRAYS["b"]},
    ):
        assert structure_of(other) != key
