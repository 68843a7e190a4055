"""Arrays to write with other libraries, and a check of what a reader returns for them."""

import ml_dtypes
import numpy as np

from flaxfit.importers import LazyArray

ARRAYS = {
    "body/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "body/bias": np.arange(3).astype(ml_dtypes.bfloat16),
    "count": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float16),
    "mask": np.array([True, False]),
}


def assert_holds(found, expected=ARRAYS):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert isinstance(found[name], LazyArray)
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        array = found[name].get()
        assert (array.shape, array.dtype) == (value.shape, value.dtype), name
        np.testing.assert_array_equal(array, value)


def write_zarr(folder, array, dtype=None, **metadata):
    """Writes an array as TensorStore does; returns the open store."""
    import tensorstore

    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(folder)},
        "metadata": {"shape": list(array.shape), **metadata},
        "dtype": dtype or str(array.dtype),
    }
    store = tensorstore.open(spec, create=True, open=True).result()
    store.write(array).result()
    return store
