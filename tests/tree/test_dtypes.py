import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.tree._dtypes import is_array, narrow, narrow_dtype, tangents


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "int64", "int8", "uint64", "bool", "complex128", "bfloat16"],
)
def test_the_narrow_dtype_is_the_one_that_jax_gives(dtype):
    array = np.zeros(2, jnp.dtype(dtype))
    assert narrow_dtype(array.dtype) == jnp.asarray(array).dtype


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [("U3", " For labels: np.unique"), ("S3", " For labels"), ("O", " Pad rows"), ("M8[s]", "$")],
)
def test_arrays_that_hold_no_numbers_are_refused(dtype, advice):
    with pytest.raises(TypeError, match=f"encode it as numbers first\\.{advice}"):
        narrow_dtype(np.dtype(dtype))


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([2**31]), np.int32),
        (np.array([-(2**31) - 1]), np.int32),
        (np.array([2**32], np.uint64), np.uint32),
    ],
)
def test_integers_that_do_not_fit_are_refused(array, dtype):
    with pytest.raises(ValueError, match=f"from {array[0]} to {array[0]}, which do not fit"):
        narrow(array, np.dtype(dtype))


def test_a_narrow_array_is_returned_itself():
    array = np.zeros(3, np.float32)
    assert narrow(array, array.dtype) is array
    least = narrow(np.array([-(2**31), 2**31 - 1]), np.dtype(np.int32))
    assert least.dtype == np.int32 and least.tolist() == [-(2**31), 2**31 - 1]
    assert narrow(np.zeros(0, np.int64), np.dtype(np.int32)).dtype == np.int32


def test_arrays_are_told_from_scalars_and_lists():
    assert is_array(np.zeros(2)) and is_array(jnp.zeros(2))
    assert not any(map(is_array, (np.float32(1), 1.0, [1.0], "text", None)))


def test_only_floats_have_tangents():
    arrays = [jnp.float32([2.0, 3.0]), jnp.int32([2]), jax.random.key(0)]
    moves = tangents(lambda x, scale: scale * x, arrays, [10.0, 0, 0])
    assert [x.dtype for x in moves[1:]] == [jax.dtypes.float0] * 2
    slope = jax.jvp(lambda x: (x[0] ** 2).sum() * x[1][0], (arrays,), (moves,))[1]
    assert slope == 2 * (2 * 2 * 20 + 2 * 3 * 30)
