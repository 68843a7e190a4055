"""Arrays of known shape and dtype that are read when they are accessed."""

import abc
import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from flaxfit.tree import Array, ArrayLike, Function

READERS = 8
"""The number of arrays read at once: keeps disks busy, and bounds the memory."""


class LazyArray(abc.ABC):
    """An array that is read on each access, without a cache.

    `T`, `transpose`, `reshape`, `astype` and `map` return lazy arrays, so that the rules of a
    `CheckpointTranslator` can treat one like a NumPy array. `np.asarray` reads it.

    >>> lazy = LazyThreadPoolArray((2, 3), "float32", lambda: np.ones((2, 3), np.float32))
    >>> lazy.T.astype("bfloat16")
    LazyThreadPoolArray(shape=(3, 2), dtype=bfloat16)
    >>> lazy.nbytes, lazy.get().sum()
    (24, np.float32(6.0))

    Args:
      shape: the shape of the array that is read.
      dtype: the dtype of the result; an array of another dtype is cast.
      get_fn: reads the array; whether it returns the array or is awaited depends on the subclass.
    """

    def __init__(self, shape: Sequence[int], dtype: DTypeLike, get_fn: Function) -> None:
        if dtype is None:
            raise TypeError("A lazy array needs a dtype: got None.")
        self._shape = tuple(int(size) for size in shape)
        self._dtype = np.dtype(dtype)
        self._get_fn = get_fn

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, known without reading."""
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype, known without reading."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the array in memory once it is read."""
        return self.size * self._dtype.itemsize

    @abc.abstractmethod
    def get(self) -> Array:
        """Reads the array; works in a running event loop too.

        >>> lazy.get().shape
        (2, 3)
        """

    @abc.abstractmethod
    async def get_async(self) -> Array:
        """Reads the array without blocking the event loop, several at the same time.

        >>> asyncio.run(lazy.get_async()).shape
        (2, 3)
        """

    @abc.abstractmethod
    def map(self, function: Function) -> "LazyArray":
        """Returns this array, changed by a function when it is read.

        The function is called at once on zeros that take no memory, to learn the shape.

        >>> lazy.map(lambda array: array[0]).shape
        (3,)
        """

    def astype(self, dtype: DTypeLike) -> "LazyArray":
        """Returns this array, cast to another dtype when it is read.

        >>> lazy.astype("float16").dtype
        dtype('float16')
        """
        return self.map(lambda array: array.astype(dtype))

    def reshape(self, *shape: int | Sequence[int]) -> "LazyArray":
        """Returns this array in another shape.

        >>> lazy.reshape(-1).shape
        (6,)
        """
        return self.map(lambda array: array.reshape(*shape))

    def transpose(self, *axes: int | Sequence[int]) -> "LazyArray":
        """Returns this array with its dimensions in another order.

        >>> lazy.transpose(1, 0).shape
        (3, 2)
        """
        return self.map(lambda array: array.transpose(*axes))

    @property
    def T(self) -> "LazyArray":
        """This array with its dimensions reversed."""
        return self.transpose()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.get())
        return array if dtype is None else array.astype(dtype, copy=bool(copy))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"

    def _example_of(self, function: Function) -> Array:
        return function(np.broadcast_to(np.zeros((), self.dtype), self.shape))

    def _checked(self, value: ArrayLike) -> Array:
        """Checks the shape of the array that was read, and casts it to the stated dtype."""
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        if array.shape != self.shape:
            raise ValueError(
                f"A lazy array of shape {self.shape} was read as one of shape {array.shape}: "
                "give LazyArray the shape that its get_fn returns."
            )
        return array if array.dtype == self.dtype else array.astype(self.dtype)


class LazyThreadPoolArray(LazyArray):
    """A lazy array whose `get_fn` blocks; `get_async` runs it in one of a few shared threads.

    >>> lazy = LazyThreadPoolArray((3,), np.int32, lambda: np.arange(3))
    >>> asyncio.run(lazy.get_async())
    array([0, 1, 2], dtype=int32)

    Args:
      shape, dtype, get_fn: as in `LazyArray`.
    """

    executor: ThreadPoolExecutor = ThreadPoolExecutor(READERS, thread_name_prefix="flaxfit-reader")

    def get(self) -> Array:
        """Reads the array in this thread."""
        return self._checked(self._get_fn())

    async def get_async(self) -> Array:
        """Reads the array in a thread of the pool."""
        return await asyncio.wrap_future(self.executor.submit(self.get))

    def map(self, function: Function) -> "LazyThreadPoolArray":
        """Returns this array, changed by a function when it is read."""
        example = self._example_of(function)
        return LazyThreadPoolArray(example.shape, example.dtype, lambda: function(self.get()))


class LazyAwaitableArray(LazyArray):
    """A lazy array whose `get_fn` is awaited, such as one of TensorStore.

    >>> async def read():
    ...     return np.arange(3)
    >>> LazyAwaitableArray((3,), np.int32, read).get()
    array([0, 1, 2], dtype=int32)

    Args:
      shape, dtype, get_fn: as in `LazyArray`.
    """

    def get(self) -> Array:
        """Reads the array in its own event loop and thread, as a loop may be running (Jupyter)."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self.get_async())).result()

    async def get_async(self) -> Array:
        """Reads the array in the running event loop."""
        return self._checked(await self._get_fn())

    def map(self, function: Function) -> "LazyAwaitableArray":
        """Returns this array, changed by a function when it is read."""
        example = self._example_of(function)

        async def read() -> Array:
            return function(await self.get_async())

        return LazyAwaitableArray(example.shape, example.dtype, read)

    @classmethod
    def from_tensor_store_spec(
        cls,
        ts_spec: Any,
        get_fn: Callable[[], Awaitable[ArrayLike]] | None = None,
        dtype: DTypeLike | None = None,
    ) -> "LazyAwaitableArray":
        """Returns the array that a `tensorstore.Spec` describes.

        uint16 means bfloat16: T5X once wrote bfloat16 as uint16, and models have no parameters of
        uint16.

        >>> import tensorstore
        >>> spec = tensorstore.Spec({"driver": "array", "array": [1, 2], "dtype": "int32"})
        >>> LazyAwaitableArray.from_tensor_store_spec(spec).get()
        array([1, 2], dtype=int32)

        Args:
          ts_spec: the spec of an opened store, which knows the shape.
          get_fn: reads the array; None opens the store and reads all of it.
          dtype: the dtype to cast to; None is the store's.
        """
        stored = np.dtype(ts_spec.dtype.numpy_dtype)
        real = np.dtype("bfloat16") if stored == np.uint16 else stored

        async def read() -> Array:
            array = await (get_fn() if get_fn else _read(ts_spec))
            return array.view(real) if array.dtype == np.uint16 else array

        lazy = cls(ts_spec.shape, real, read)
        return lazy if dtype is None else cls(lazy.shape, dtype, lazy.get_async)

    @classmethod
    def from_array(
        cls,
        array: ArrayLike,
        get_fn: Callable[[], Awaitable[ArrayLike]] | None = None,
        dtype: DTypeLike | None = None,
    ) -> "LazyAwaitableArray":
        """Returns an array, or a number, that is in memory as a lazy array.

        >>> LazyAwaitableArray.from_array(np.ones(2)).get()
        array([1., 1.])
        """

        async def read() -> ArrayLike:
            return array

        array = array if hasattr(array, "dtype") else np.asarray(array)
        return cls(array.shape, array.dtype if dtype is None else dtype, get_fn or read)

    @classmethod
    def from_tensor_store_spec_or_array(
        cls,
        spec_or_array: Any,
        get_fn: Callable[[], Awaitable[ArrayLike]] | None = None,
        dtype: DTypeLike | None = None,
    ) -> "LazyAwaitableArray":
        """Returns the lazy array of a `tensorstore.Spec`, an array or a number.

        >>> LazyAwaitableArray.from_tensor_store_spec_or_array(2.0).get()
        array(2.)
        """
        is_array = isinstance(spec_or_array, int | float | np.generic | np.ndarray | jax.Array)
        make = cls.from_array if is_array else cls.from_tensor_store_spec
        return make(spec_or_array, get_fn, dtype)


async def _read(ts_spec: Any) -> np.ndarray:
    import tensorstore

    store = await tensorstore.open(ts_spec, open=True, read=True)
    return await store.read()
