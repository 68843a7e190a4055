"""Lazy arrays: known without reading, read when asked, also inside a running event loop."""

import asyncio
import threading

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from weight_files import write_zarr

from flaxfit.importers import LazyAwaitableArray, LazyThreadPoolArray

pytest.importorskip("tensorstore", reason="tensorstore is not installed")
NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3)


def threaded(array, counts):
    def read():
        counts.append(1)
        return array

    return LazyThreadPoolArray(array.shape, array.dtype, read)


def awaited(array, counts):
    async def read():
        counts.append(1)
        return array

    return LazyAwaitableArray(array.shape, array.dtype, read)


KINDS = pytest.mark.parametrize("make", [threaded, awaited])


@KINDS
def test_nothing_is_read_until_it_is_asked_for(make):
    counts = []
    lazy = make(NUMBERS, counts)
    changed = lazy.T.reshape(6).astype("bfloat16")
    assert (lazy.shape, lazy.dtype, lazy.nbytes, lazy.ndim) == ((2, 3), np.float32, 24, 2)
    assert (changed.shape, changed.dtype, changed.nbytes) == ((6,), ml_dtypes.bfloat16, 12)
    assert not counts
    np.testing.assert_array_equal(lazy.get(), NUMBERS)
    assert len(counts) == 1


@KINDS
def test_changes_are_made_when_it_is_read(make):
    lazy = make(NUMBERS, [])
    changed = lazy.transpose(1, 0).reshape(3, 2, 1).map(lambda array: array * 2).astype(np.int32)
    expected = (NUMBERS.T.reshape(3, 2, 1) * 2).astype(np.int32)
    np.testing.assert_array_equal(changed.get(), expected)
    np.testing.assert_array_equal(asyncio.run(changed.get_async()), expected)
    assert isinstance(changed, type(lazy))


@KINDS
def test_numpy_and_jax_read_it_as_an_array(make):
    lazy = make(NUMBERS, [])
    np.testing.assert_array_equal(np.asarray(lazy), NUMBERS)
    np.testing.assert_array_equal(jnp.asarray(lazy), NUMBERS)
    assert np.asarray(lazy, np.int64).dtype == np.int64


@KINDS
def test_it_can_be_read_inside_a_running_event_loop(make):
    async def cell():
        return make(NUMBERS, []).astype(np.int32).get()

    np.testing.assert_array_equal(asyncio.run(cell()), NUMBERS.astype(np.int32))


@KINDS
def test_many_are_read_at_once(make):
    async def read_all():
        lazies = [make(np.full(3, number), []) for number in range(50)]
        return await asyncio.gather(*(lazy.get_async() for lazy in lazies))

    for number, array in enumerate(asyncio.run(read_all())):
        np.testing.assert_array_equal(array, np.full(3, number))


def test_blocking_reads_overlap_in_threads():
    both = threading.Barrier(2, timeout=20)

    def read():
        both.wait()  # Only two reads at the same time get past this.
        return np.zeros(1)

    async def read_two():
        lazy = LazyThreadPoolArray((1,), np.float64, read)
        await asyncio.gather(lazy.get_async(), lazy.get_async())

    asyncio.run(read_two())


def test_a_python_number_and_a_jax_array_are_accepted_from_a_reader():
    assert LazyThreadPoolArray((), np.int32, lambda: 7).get() == 7
    lazy = LazyThreadPoolArray((2,), np.float32, lambda: jnp.ones(2, jnp.bfloat16))
    assert lazy.get().dtype == np.float32


def test_a_reader_that_gives_another_shape_is_an_error():
    lazy = LazyThreadPoolArray((2,), np.float32, lambda: np.zeros(3))
    with pytest.raises(ValueError, match=r"shape \(2,\) was read as one of shape \(3,\)"):
        lazy.get()


def test_a_lazy_array_needs_a_dtype():
    with pytest.raises(TypeError, match="needs a dtype"):
        LazyThreadPoolArray((2,), None, lambda: np.zeros(2))


def test_a_tensorstore_spec_is_read_without_a_function(tmp_path):
    spec = write_zarr(tmp_path, NUMBERS).spec(retain_context=False)
    lazy = LazyAwaitableArray.from_tensor_store_spec(spec)
    assert (lazy.shape, lazy.dtype) == ((2, 3), np.float32)
    np.testing.assert_array_equal(lazy.get(), NUMBERS)
    halves = LazyAwaitableArray.from_tensor_store_spec_or_array(spec, dtype="float16")
    assert halves.get().dtype == np.float16


def test_uint16_in_a_store_means_the_bits_of_bfloat16(tmp_path):
    numbers = NUMBERS.astype(ml_dtypes.bfloat16)
    opened = write_zarr(tmp_path, numbers.view(np.uint16))

    async def read():
        return await opened.read()

    for get_fn in (None, read):
        lazy = LazyAwaitableArray.from_tensor_store_spec(opened.spec(), get_fn)
        assert lazy.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(lazy.get(), numbers)
        as_float = LazyAwaitableArray.from_tensor_store_spec(opened.spec(), get_fn, np.float32)
        np.testing.assert_array_equal(as_float.get(), NUMBERS)


def test_an_array_that_is_there_can_stand_for_a_lazy_one():
    async def read():
        return NUMBERS

    for lazy in (
        LazyAwaitableArray.from_array(NUMBERS),
        LazyAwaitableArray.from_array(NUMBERS, read),
        LazyAwaitableArray.from_tensor_store_spec_or_array(NUMBERS, read),
    ):
        np.testing.assert_array_equal(lazy.get(), NUMBERS)
    assert LazyAwaitableArray.from_tensor_store_spec_or_array(3, dtype=np.float32).get() == 3.0
