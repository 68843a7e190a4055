"""Arrays of known shape and dtype that are read when they are asked for."""

import abc
import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from flaxfit.tree._types import ArrayLike, Function

_READERS = 8
"""How many arrays are read at once: enough for disks, and a bound on the memory in use."""


class LazyArray(abc.ABC):
    """An array that is read when it is asked for, again each time; it keeps nothing.

    `T`, `transpose`, `reshape`, `astype` and `map` give lazy arrays again, so that the rules of a
    `CheckpointTranslator` can treat one as if it were a NumPy array. `np.asarray` reads it.

    >>> lazy = LazyThreadPoolArray((2, 3), "float32", lambda: np.ones((2, 3), np.float32))
    >>> lazy.T.astype("bfloat16")
    LazyThreadPoolArray(shape=(3, 2), dtype=bfloat16)
    >>> lazy.nbytes, lazy.get().sum()
    (24, np.float32(6.0))

    Args:
      shape: the shape that reading will give.
      dtype: the dtype that reading will give; other values are cast to it.
      get_fn: reads the array; a plain function or one to await, as the subclass says.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, get_fn: Callable[[], Any]) -> None:
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
        """The bytes that the array will take when it has been read."""
        return self.size * self._dtype.itemsize

    @abc.abstractmethod
    def get(self) -> Any:
        """Reads the array; works in a running event loop too."""

    @abc.abstractmethod
    async def get_async(self) -> Any:
        """Reads the array without blocking the event loop; several are read at the same time."""

    @abc.abstractmethod
    def map(self, function: Function) -> "LazyArray":
        """This array changed by a function when it is read.

        The function is tried at once on an array of zeros that takes no memory, for the shape.
        """

    def astype(self, dtype: Any) -> "LazyArray":
        """This array cast to another dtype when it is read."""
        return self.map(lambda array: array.astype(dtype))

    def reshape(self, *shape: Any) -> "LazyArray":
        """This array in another shape."""
        return self.map(lambda array: array.reshape(*shape))

    def transpose(self, *axes: Any) -> "LazyArray":
        """This array with its dimensions in another order."""
        return self.map(lambda array: array.transpose(*axes))

    @property
    def T(self) -> "LazyArray":
        """This array with its dimensions reversed."""
        return self.transpose()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.get())
        return array if dtype is None else array.astype(dtype, copy=bool(copy))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"

    def _example_of(self, function: Function) -> Any:
        """What a function makes of an array like this one."""
        return function(np.broadcast_to(np.zeros((), self.dtype), self.shape))

    def _checked(self, value: Any) -> Any:
        """What was read, as an array of the promised shape and dtype."""
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
    """

    executor = ThreadPoolExecutor(_READERS, thread_name_prefix="flaxfit-reader")

    def get(self) -> Any:
        """Reads the array in this thread."""
        return self._checked(self._get_fn())

    async def get_async(self) -> Any:
        """Reads the array in a thread of the pool."""
        return await asyncio.wrap_future(self.executor.submit(self.get))

    def map(self, function: Function) -> "LazyThreadPoolArray":
        """This array changed by a function when it is read."""
        example = self._example_of(function)
        return LazyThreadPoolArray(example.shape, example.dtype, lambda: function(self.get()))


class LazyAwaitableArray(LazyArray):
    """A lazy array whose `get_fn` is awaited, as those of TensorStore are.

    >>> async def read():
    ...     return np.arange(3)
    >>> LazyAwaitableArray((3,), np.int32, read).get()
    array([0, 1, 2], dtype=int32)
    """

    def get(self) -> Any:
        """Reads the array in an event loop of its own, so that a running one (Jupyter's) may."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self.get_async())).result()

    async def get_async(self) -> Any:
        """Reads the array in the running event loop."""
        return self._checked(await self._get_fn())

    def map(self, function: Function) -> "LazyAwaitableArray":
        """This array changed by a function when it is read."""
        example = self._example_of(function)

        async def read() -> Any:
            return function(await self.get_async())

        return LazyAwaitableArray(example.shape, example.dtype, read)

    @classmethod
    def from_tensor_store_spec(
        cls, ts_spec: Any, get_fn: Callable[[], Awaitable[Any]] | None = None, dtype: Any = None
    ) -> "LazyAwaitableArray":
        """The array that a `tensorstore.Spec` describes.

        uint16 means bfloat16: T5X once wrote the bits of the one as the other, and models have
        no parameters of the former.

        Args:
          ts_spec: the spec of an opened store, which knows the shape.
          get_fn: reads the array; None opens the store and reads all of it.
          dtype: the dtype to cast to; None is that of the store.
        """
        stored = np.dtype(ts_spec.dtype.numpy_dtype)
        real = np.dtype("bfloat16") if stored == np.uint16 else stored

        async def read() -> Any:
            array = await (get_fn() if get_fn else _read(ts_spec))
            return array.view(real) if array.dtype == np.uint16 else array

        lazy = cls(ts_spec.shape, real, read)
        return lazy if dtype is None else cls(lazy.shape, dtype, lazy.get_async)

    @classmethod
    def from_array(
        cls, array: ArrayLike, get_fn: Callable[[], Awaitable[Any]] | None = None, dtype: Any = None
    ) -> "LazyAwaitableArray":
        """The lazy form of an array, or number, that is there already."""

        async def read() -> Any:
            return array

        array = array if hasattr(array, "dtype") else np.asarray(array)
        return cls(array.shape, array.dtype if dtype is None else dtype, get_fn or read)

    @classmethod
    def from_tensor_store_spec_or_array(
        cls, spec_or_array: Any, get_fn: Any = None, dtype: Any = None
    ) -> "LazyAwaitableArray":
        """The lazy form of whichever of the two is given."""
        is_array = isinstance(spec_or_array, int | float | np.generic | np.ndarray | jax.Array)
        make = cls.from_array if is_array else cls.from_tensor_store_spec
        return make(spec_or_array, get_fn, dtype)


async def _read(ts_spec: Any) -> Any:
    import tensorstore

    store = await tensorstore.open(ts_spec, open=True, read=True)
    return await store.read()
