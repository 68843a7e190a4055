"""as_stream: a stream of batches of arrays, loaders of other libraries, and iterables."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flaxfit.data._arrays import ArrayStream
from flaxfit.data._batch import three_parts
from flaxfit.data._indexed_batches import IndexedBatches, is_indexed, n_batches
from flaxfit.data._iterables import IterableStream
from flaxfit.data._libraries import (
    OpenPass,
    comes_from,
    is_hugging_face,
    length,
    opener,
    reads_own_shard,
    regular_size,
)
from flaxfit.data._stream import is_shared
from flaxfit.display import short_errors
from flaxfit.tree import Data, Json, PyTree, check_dense, is_array, is_node

_ACCEPTED = (
    "Give arrays, a tuple (x, y) or mapping of arrays, a list or other iterable of batches, an "
    "object with __getitem__ and __len__, a loader (Grain, torch, tf.data, Hugging Face), or a "
    "callable that returns one of these."
)


@short_errors
def as_stream(
    data: Data,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    epochs: int | None = None,
    drop_remainder: bool = False,
    shared: bool = True,
) -> Any:
    """Makes a stream of batches of arrays, loaders or iterables.

    Arrays, a tuple or mapping of arrays and a Hugging Face dataset are data sets, which are cut
    into batches. A list or any other iterable is a sequence of batches, which are used unchanged:
    `batch_size`, `shuffle` and `drop_remainder` raise an error. Batches by index, such as a
    `keras.utils.PyDataset`, can be shuffled. A callable is called for each pass. A stream that has
    `get_state` and `set_state` is returned unchanged.

    With several processes, each takes its own rows of arrays. Divide other data between the
    processes yourself: a Grain loader by its shard options, anything else with `shared=False`.

    >>> x, y = next(as_stream((np.zeros((10, 3)), np.arange(10)), batch_size=4))
    >>> x.shape, y.dtype
    ((4, 3), dtype('int32'))

    Args:
      data: arrays, an iterable or a loader.
      batch_size: the number of examples in a batch of a data set; None: 32.
      shuffle: whether each pass over a data set, or batches by index, has its own random order.
      seed: the seed of the random orders.
      epochs: the number of passes; None: a data set repeats forever, batches end once.
      drop_remainder: whether to leave out a smaller last batch of a data set.
      shared: whether every process receives the same data. False: you have divided the batches, so
        that each process brings its own part of every step. Several processes refuse to train on
        shared batches, since all of them would train on the same rows.

    Raises:
      TypeError: the data has none of these forms.
      ValueError: options for data sets were given with batches, or `shared=False` with arrays.
    """
    regular_size(batch_size)  # Checks it.
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "seed": seed,
        "drop_remainder": drop_remainder,
    }
    check_dense(data)
    if not shared and (_is_data_set(data) or isinstance(data, ArrayStream)):
        raise ValueError(
            "shared=False cannot be applied to arrays: each process takes its own rows of arrays "
            "that are the same in all of them. Give batches instead, such as "
            "as_stream([(x, y), ...], shared=False)."
        )
    if _is_data_set(data):
        return _array_stream(data, epochs, options)
    shared = shared and not reads_own_shard(data)
    has_position = all(hasattr(data, name) for name in ("__next__", "get_state", "set_state"))
    is_stream = has_position and not comes_from(data, "grain")
    if is_stream and (shared or not is_shared(data)):
        _check_unused(data, options)
        return data
    return IterableStream(
        _opener(data, options),
        name=type(data).__name__,
        once=isinstance(data, Iterator),
        epochs=1 if epochs is None else epochs,
        n_batches=n_batches(data) if is_indexed(data) else length(data, batch_size, drop_remainder),
        settings=_settings(data, options),
        shared=shared,
    )


def one_pass(data: Data, *, batch_size: int | None = None) -> Iterator[PyTree]:
    """Iterates over data exactly once, from its beginning; over an endless stream for one epoch.

    A second pass over a generator raises a `ValueError`.

    >>> len(list(one_pass(ArrayStream(np.zeros(100)))))
    4

    Args:
      data: anything that `as_stream` takes.
      batch_size: the number of examples in a batch of a data set; None: 32.
    """
    stream = as_stream(data, batch_size=batch_size)
    if hasattr(stream, "one_epoch"):
        return stream.one_epoch()
    name = type(stream).__name__
    return IterableStream(
        lambda epoch: iter(stream), name=name, once=True, shared=is_shared(stream)
    )


def _is_data_set(data: Data) -> bool:
    return is_array(data) or isinstance(data, tuple | Mapping) or is_node(data)


def _array_stream(data: Data, epochs: int | None, options: dict[str, Any]) -> ArrayStream:
    options = {**options, "batch_size": regular_size(options["batch_size"])}
    return ArrayStream(*three_parts(data, "data"), epochs=epochs, **options)


def _check_unused(data: Data, options: dict[str, Any]) -> None:
    """Rejects data set options for data that is already batched."""
    names = [name for name in ("batch_size", "shuffle", "drop_remainder") if options[name]]
    wrong = [
        f"{name}={options[name]}" for name in names if getattr(data, name, None) != options[name]
    ]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} cannot be applied to a {type(data).__name__}, which gives batches "
            "that are used unchanged: set this where the batches are made, or give arrays."
        )


def _opener(data: Data, options: dict[str, Any]) -> OpenPass:
    """Returns a function `epoch -> iterator over the batches of one pass`."""
    if isinstance(data, str | bytes | type):
        raise TypeError(f"Cannot read batches from {data!r:.60}. {_ACCEPTED}")
    if isinstance(data, list):
        _check_list(data)
    open_pass = opener(data, options)
    if open_pass is None and is_indexed(data):
        _check_unused(data, {**options, "shuffle": False})
        return IndexedBatches(data, shuffle=options["shuffle"], seed=options["seed"])
    if open_pass is not None or hasattr(data, "__iter__"):
        if not is_hugging_face(data):
            _check_unused(data, options)
        return open_pass or (lambda epoch: iter(data))
    if callable(data):
        return lambda epoch: _called(data(), epoch, options)
    raise TypeError(f"Cannot read batches from {type(data).__name__}: {data!r:.60}. {_ACCEPTED}")


def _settings(data: Data, options: dict[str, Any]) -> dict[str, Json]:
    if options["shuffle"] and is_indexed(data):
        return {"shuffle": True, "seed": options["seed"]}
    if is_hugging_face(data) or (options["shuffle"] and callable(data)):
        return {**options, "batch_size": regular_size(options["batch_size"])}
    return {}


def _called(data: Data, epoch: int, options: dict[str, Any]) -> Iterator[PyTree]:
    """Returns one pass over the data that a callable returned."""
    check_dense(data)
    if _is_data_set(data):
        stream = _array_stream(data, epoch + 1, options)
        stream.epoch = epoch  # Its order depends on the epoch.
        return stream
    return _opener(data, options)(epoch)


def _check_list(data: list[object]) -> None:
    if not data:
        raise ValueError("The list of batches is empty.")
    if isinstance(data[0], str | bytes | int | float | complex | np.generic):
        raise TypeError(
            f"A list is a sequence of batches, got a list of {type(data[0]).__name__}: "
            "convert it with np.asarray to use it as a data set."
        )
