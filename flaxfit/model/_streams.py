"""Makes the streams of batches for `fit`, `evaluate` and `predict`."""

import contextlib
from collections.abc import Callable, Mapping

import jax
import numpy as np

from flaxfit.callbacks._progress import ENDLESS
from flaxfit.data import ArrayStream, DataStream, as_stream, prefetch
from flaxfit.data._class_weights import BALANCED, ClassWeightedStream, balanced_by_pass
from flaxfit.data._indexed_batches import is_indexed
from flaxfit.data._libraries import is_hugging_face, regular_size
from flaxfit.data._roles import NO_ROLES
from flaxfit.data._stream import is_read_once, pass_length
from flaxfit.display import say
from flaxfit.loop import knows_rows
from flaxfit.tree import Data, PyTree


def training_stream(
    data: Data,
    *,
    batch_size: int | None,
    shuffle: bool | None,
    seed: int,
    epochs: int,
    steps_per_epoch: int | None,
    n_before: int,
    class_weight: Mapping[int, float] | str | None = None,
    form: Callable[[PyTree], PyTree] = NO_ROLES,
) -> DataStream:
    """Returns the stream of `fit` over prepared data, starting after `n_before` epochs.

    With `steps_per_epoch` the data repeats as often as needed. `class_weight` applies to batches,
    which `form` converts; prepared arrays have it in their weights.
    """
    if shuffle not in (None, True, False):
        raise ValueError(f"shuffle must be True, False or None, got {shuffle!r:.60}.")
    if steps_per_epoch is None and epochs > 1 and is_read_once(data):
        raise ValueError(
            f"A {type(data).__name__} can be iterated only once, but epochs={epochs} needs "
            f"{epochs} passes: pass a list of batches, a loader, or a callable that returns a new "
            "one (lambda: batches()). Or pass steps_per_epoch, and enough batches for all epochs."
        )
    if isinstance(data, tuple):
        return _of_arrays(data, regular_size(batch_size), shuffle is not False, seed, n_before)
    # Indexed batches may be shuffled in their order, even if they shuffle rows themselves.
    shuffles = getattr(data, "shuffle", False) is True and not is_indexed(data)
    if shuffle is False and shuffles:
        raise ValueError(
            f"shuffle=False cannot be applied to a {type(data).__name__} that shuffles itself: "
            "pass it where you create that object."
        )
    shuffle = is_hugging_face(data) if shuffle is None else bool(shuffle)
    stream = as_stream(data, batch_size=batch_size, shuffle=shuffle, seed=seed)
    is_apart = steps_per_epoch is None and length_of(stream) is None
    if hasattr(stream, "passes") and (is_apart or stream is not data):
        n_passes = None if steps_per_epoch else epochs
        stream = stream.passes(n_passes, start=n_before, is_apart=is_apart)
    if class_weight is None:
        return stream
    if isinstance(class_weight, str) and class_weight == BALANCED:
        class_weight = balanced_by_pass(data, batch_size, form)
    return ClassWeightedStream(stream, class_weight, form)


def _of_arrays(
    arrays: tuple[PyTree, ...], batch_size: int, shuffle: bool, seed: int, n_before: int
) -> ArrayStream:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(arrays[0])]
    is_square = any(shape[:2] == 2 * shape[:1] for shape in shapes)
    if shuffle and is_square and len(shapes) > 1:
        say(
            "the rows of all inputs are shuffled, but not the columns of a square one: if it "
            "relates rows to each other, as an adjacency matrix does, pass shuffle=False"
        )
    stream = ArrayStream(*arrays, batch_size=batch_size, shuffle=shuffle, seed=seed)
    stream.epoch = n_before  # The order of an epoch depends on the seed and its number alone.
    return stream


def in_order(data: Data, batch_size: int | None) -> Data:
    """Returns one pass over prepared data, in order; divides arrays and data sets into batches."""
    if isinstance(data, tuple):
        return ArrayStream(*data, batch_size=regular_size(batch_size), epochs=1)
    return data if batch_size is None else as_stream(data, batch_size=batch_size)


def known_length(data: Data) -> int | None:
    """Returns the number of batches in a pass; None if it is infinite or unknown."""
    with contextlib.suppress(TypeError):
        return n if (n := len(as_stream(data))) < ENDLESS else None
    return None


def length_of(stream: DataStream) -> int | None:
    """Returns the number of batches in a pass, or None if unknown; raises if it is endless."""
    return pass_length(stream, "Give steps_per_epoch, or data that ends.")


def prefetched(stream: DataStream) -> DataStream:
    """Prefetches batches of a stream, if that is useful and safe.

    Resident data and rows divided between processes need no assembly here. Batches prefetched from
    a generator would be lost to later readers.
    """
    is_resident = getattr(stream, "resident", False) or knows_rows(stream)
    is_repeatable = getattr(stream, "is_repeatable", isinstance(stream, ArrayStream))
    return prefetch(stream) if is_repeatable and not is_resident else stream
