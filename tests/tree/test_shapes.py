"""Shapes and dtypes stand for arrays."""

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.tree._shapes import shapes_of, structure_of

TREE = {"a": jnp.ones((2, 3)), "b": (np.zeros(4, np.int8), None)}


def test_arrays_on_host_and_devices_become_shapes_which_stay_as_they_are():
    shapes = shapes_of(TREE)
    a, b = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((4,), "int8")
    assert shapes == shapes_of(shapes) == {"a": a, "b": (b, None)}


def test_a_key_is_that_of_all_arrays_alike_and_of_no_others():
    key = structure_of(TREE)
    assert {key: "found"}[structure_of(jax.tree.map(np.asarray, TREE))] == "found"
    for other in (
        {"a": TREE["a"], "b": [*TREE["b"]]},
        {"a": TREE["a"][:1], "b": TREE["b"]},
        {"a": TREE["a"].astype(jnp.bfloat16), "b": TREE["b"]},
    ):
        assert structure_of(other) != key
