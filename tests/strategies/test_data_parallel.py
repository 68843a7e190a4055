"""DataParallel: placing, splitting, joining and compiling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.strategies import DataParallel

TREE = {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "key": jax.random.key(1)}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_is_placed_is_whole_on_every_device(n):
    strategy = DataParallel(jax.devices()[:n])
    placed = strategy.place(TREE)
    assert placed["w"].shape == (2, 3) and placed["w"].is_fully_replicated
    assert len(placed["w"].addressable_shards) == n
    collected = strategy.collect(placed)
    assert collected["w"].devices() == {jax.devices()[0]}
    np.testing.assert_array_equal(collected["w"], TREE["w"])
    assert collected["key"] == TREE["key"]


@pytest.mark.parametrize("n", [1, 4])
def test_arrays_of_numpy_are_placed_as_others_are_and_may_change_then(n):
    strategy = DataParallel(jax.devices()[:n])
    arrays = {"x": np.ones((64, 16), np.float32), "n": np.arange(3), "flags": np.array([True])}
    expected = strategy.place(jax.tree.map(jnp.array, arrays))
    placed = strategy.place(arrays)
    for array in arrays.values():
        array[:] = 0
    jax.tree.map(np.testing.assert_array_equal, placed, expected)
    for one, other in zip(jax.tree.leaves(placed), jax.tree.leaves(expected), strict=True):
        assert one.sharding == other.sharding and one.aval == other.aval


def test_arrays_of_several_kinds_and_of_other_devices_are_placed():
    strategy = DataParallel(jax.devices()[:1])
    placed = strategy.place({"x": np.ones(2), "y": jax.device_put(np.ones(3), jax.devices()[3])})
    assert placed["x"].devices() == placed["y"].devices() == {jax.devices()[0]}


def test_an_array_in_another_order_of_bytes_is_refused():
    strategy = DataParallel(jax.devices()[:1])
    strategy.place(np.arange(3, dtype=np.float32))  # Of the same shape and, but for that, dtype.
    with pytest.raises(TypeError, match=">f4 is not a valid JAX array type"):
        strategy.place(np.arange(3, dtype=">f4"))


def test_a_program_may_return_whole_results_and_rows():
    strategy = DataParallel()
    x = np.arange(8, dtype=np.float32)
    arguments = strategy.place(np.float32(2)), strategy.split(x)

    def run(state, batch):
        return jax.lax.psum(batch.sum(), strategy.axis_name), state * batch

    total, rows = strategy.compile(run, arguments, has_rows=True)(*arguments)
    assert total == x.sum()
    np.testing.assert_array_equal(strategy.join(rows), 2 * x)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_a_batch_is_split_and_joined_in_order(make):
    strategy = DataParallel()
    x = make(np.arange(24.0, dtype=np.float32).reshape(8, 3))
    parts = strategy.split({"x": x})
    assert parts["x"].shape == (4, 2, 3)
    state = strategy.place(np.float32(2))
    run = strategy.compile_split(lambda s, b: {"y": s * b["x"]}, (state, parts))
    np.testing.assert_array_equal(strategy.join(run(state, parts))["y"], 2 * np.asarray(x))


def test_stacked_batches_are_split_batch_by_batch():
    parts = DataParallel(jax.devices()[:2]).split(np.arange(12).reshape(3, 4), n_stacked=3)
    np.testing.assert_array_equal(parts[0], [[0, 1], [4, 5], [8, 9]])
    np.testing.assert_array_equal(parts[1], [[2, 3], [6, 7], [10, 11]])


def test_narrow_takes_as_many_devices_as_divide_the_examples():
    strategy = DataParallel()
    assert [strategy.narrow(n).n_devices for n in (8, 6, 5, 3, 2, 1)] == [4, 3, 1, 3, 2, 1]
    assert strategy.narrow(4) is strategy and strategy.narrow(6) is strategy.narrow(3)


def test_a_single_device_has_no_axis_to_reduce_over():
    assert DataParallel().axis_name == "replica"
    assert DataParallel(jax.devices()[:1]).axis_name is None


def test_no_devices_are_refused():
    with pytest.raises(ValueError, match="at least one device"):
        DataParallel([])
