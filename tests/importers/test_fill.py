"""fill: a checkpoint's arrays in the places of a tree, or one error that lists every misfit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxfit.importers import CheckpointTranslator, LazyArray, LazyThreadPoolArray, fill

TREE = {"body": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}, "head": jnp.ones(4)}
VALUES = {
    "body/kernel": np.arange(6.0).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "body/bias": np.arange(3.0),
    "head": np.full(4, 7, np.float32),
}


def test_arrays_take_their_places_and_the_dtypes_of_the_tree():
    filled = fill(TREE, VALUES)
    assert jax.tree.map(lambda x: x.dtype, filled) == jax.tree.map(lambda x: x.dtype, TREE)
    np.testing.assert_array_equal(filled["body"]["kernel"], np.arange(6.0).reshape(2, 3))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(filled))


def test_floating_arrays_take_a_dtype_that_is_asked_for():
    filled = fill(TREE | {"count": jnp.int32(0)}, VALUES | {"count": 3}, dtype="bfloat16")
    assert filled["head"].dtype == jnp.bfloat16
    assert filled["count"].dtype == jnp.int32


def test_a_tree_of_shapes_is_filled_where_it_says():
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    shapes = {"head": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)}
    assert fill(shapes, {"head": VALUES["head"]})["head"].sharding == sharding
    plain = {"head": jax.ShapeDtypeStruct((4,), jnp.float32)}
    np.testing.assert_array_equal(fill(plain, {"head": VALUES["head"]})["head"], VALUES["head"])


def test_numpy_leaves_and_numbers_stay_what_they_are():
    filled = fill({"a": np.zeros(2, np.float32), "n": 0}, {"a": jnp.ones(2), "n": np.int64(5)})
    assert type(filled["a"]) is np.ndarray
    assert type(filled["n"]) is int and filled["n"] == 5


def test_everything_that_does_not_fit_is_in_one_error():
    translator = CheckpointTranslator()
    translator.add("w/(.*)")(lambda opts, name, value, rest: (rest, value))
    translator.add("again")(lambda opts, name, value: ("head", value))
    values = {
        "w/body/kernel": np.zeros((3, 2)),
        "w/body/bias_": np.zeros(3),
        "w/head": np.zeros(4, np.int32),
        "again": np.zeros(4),
        "odd": np.zeros(1),
    }
    with pytest.raises(ValueError) as caught:
        fill(TREE, values, translator=translator)
    for part in (
        "6 problems",
        "odd: no rule matches",
        "w/head and again all become head",
        "body/bias is not in the checkpoint (nearest: body/bias_)",
        "body/bias_ (from w/body/bias_) has no place here (nearest: body/bias)",
        "body/kernel (from w/body/kernel) is float64 (3, 2) in the checkpoint, float32 (2, 3) here",
        "head (from w/head) is int32 (4,) in the checkpoint, float32 (4,) here",
    ):
        assert part in str(caught.value)


def test_nothing_is_read_when_something_does_not_fit():
    def read():
        raise AssertionError("read in vain")

    lazy = LazyThreadPoolArray((5,), np.float32, read)
    with pytest.raises(ValueError, match="is not in the checkpoint"):
        fill(TREE, {"head": lazy})


def test_not_strict_leaves_out_what_has_no_place_and_nothing_else():
    translator = CheckpointTranslator()
    translator.add("(body/.*|head|extra)")(lambda opts, name, value, _: (name, value))
    values = VALUES | {"extra": np.zeros(1), "odd": np.zeros(1)}
    filled = fill(TREE, values, translator=translator, strict=False)
    np.testing.assert_array_equal(filled["head"], VALUES["head"])
    with pytest.raises(ValueError, match="head is not in the checkpoint"):
        fill(TREE, {k: v for k, v in values.items() if k != "head"}, strict=False)
    with pytest.raises(ValueError, match="head is float32"):
        fill(TREE, values | {"head": np.zeros(5, np.float32)}, strict=False)


def test_leaves_named_as_partial_keep_their_values():
    body = {name: value for name, value in VALUES.items() if name != "head"}
    for partial in (True, "head", "he.*"):
        np.testing.assert_array_equal(fill(TREE, body, partial=partial)["head"], np.ones(4))
    with pytest.raises(ValueError, match="head is not in the checkpoint"):
        fill(TREE, body, partial="body/.*")
    with pytest.raises(ValueError, match="head is not in the checkpoint"):
        fill(jax.eval_shape(lambda: TREE), body, partial=True)


def test_lazy_leaves_arrays_to_be_read_later():
    lazy = LazyThreadPoolArray((4,), np.float64, lambda: np.ones(4))
    filled = fill({"head": jnp.zeros(4)}, {"head": lazy}, lazy=True)
    assert isinstance(filled["head"], LazyArray)
    assert filled["head"].get().dtype == np.float32


def test_an_error_of_a_reader_reaches_the_caller():
    def read():
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        fill({"a": jnp.zeros(1)}, {"a": LazyThreadPoolArray((1,), np.float32, read)})
