"""The streams of batches that `fit`, `evaluate` and `predict` read."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

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
    """Returns the stream of `fit` over what `prepare` returned, after `n_before` epochs.

    With `steps_per_epoch` the data is repeated as often as needed. The `class_weight` is applied to
    batches, which `form` brings into form; arrays have it already.

    Raises:
      ValueError: a generator is to be passed over several times; or an option is not for this data.
    """
    if shuffle not in (None, True, False):
        raise ValueError(f"shuffle must be True, False or None, got {shuffle!r:.60}.")
    if steps_per_epoch is None and epochs > 1 and is_read_once(data):
        raise ValueError(
            f"A {type(data).__name__} can be iterated only once, but epochs={epochs} needs "
            f"{epochs} passes: pass a list of batches, a loader, or a callable that returns a new "
            "one (lambda: batches()). Or pass steps_per_epoch, and enough batches for all epochs."
        )
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed}
    stream = _passes(data, epochs, steps_per_epoch, n_before, **options)
    if class_weight is None or isinstance(data, tuple):
        return stream
    if isinstance(class_weight, str) and class_weight == BALANCED:
        class_weight = balanced_by_pass(data, batch_size, form)
    return ClassWeightedStream(stream, class_weight, form)


def _passes(
    data: Data,
    epochs: int,
    steps_per_epoch: int | None,
    n_before: int,
    *,
    batch_size: int | None,
    shuffle: bool | None,
    seed: int,
) -> DataStream:
    if isinstance(data, tuple):
        size, shuffle = regular_size(batch_size), shuffle is not False
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(data[0])]
        is_square = any(shape[:2] == 2 * shape[:1] for shape in shapes)
        if shuffle and is_square and len(shapes) > 1:
            say(
                "the rows of all inputs are shuffled, but not the columns of one that is square: "
                "if it relates the rows to each other, as adjacency does, pass shuffle=False"
            )
        stream = ArrayStream(*data, batch_size=size, shuffle=shuffle, seed=seed)
        stream.epoch = n_before
        return stream
    # Batches by index may be shuffled within, and in their order.
    shuffles = getattr(data, "shuffle", False) is True and not is_indexed(data)
    if shuffle is False and shuffles:
        raise ValueError(
            f"shuffle=False cannot be applied to a {type(data).__name__} that shuffles: set it "
            "where you create that."
        )
    shuffle = is_hugging_face(data) if shuffle is None else bool(shuffle)
    stream = as_stream(data, batch_size=batch_size, shuffle=shuffle, seed=seed)
    is_apart = steps_per_epoch is None and length_of(stream) is None
    if not hasattr(stream, "passes") or (stream is data and not is_apart):
        return stream
    n_passes = None if steps_per_epoch else epochs
    return stream.passes(n_passes, start=n_before, is_apart=is_apart)


def in_order(data: Data, batch_size: int | None) -> Data:
    """Returns one pass over what `prepare` returned; arrays and data sets are cut into batches."""
    if isinstance(data, tuple):
        return ArrayStream(*data, batch_size=regular_size(batch_size), epochs=1)
    return data if batch_size is None else as_stream(data, batch_size=batch_size)


def known_length(data: Data) -> int | None:
    """Returns the number of batches in a pass; None if there is no end, or it is not known."""
    with contextlib.suppress(TypeError):
        return n if (n := len(as_stream(data))) < ENDLESS else None
    return None


def length_of(stream: DataStream) -> int | None:
    """Returns the number of batches in a pass, or None if unknown; raises if it is endless."""
    return pass_length(stream, "Give steps_per_epoch, or data that ends.")


def prefetched(stream: DataStream) -> DataStream:
    """Assembles batches ahead, where that helps and loses nothing.

    Resident data and rows divided between processes are not assembled here. What was read ahead of
    a generator would be lost to later readers.
    """
    is_resident = getattr(stream, "resident", False) or knows_rows(stream)
    is_repeatable = getattr(stream, "is_repeatable", isinstance(stream, ArrayStream))
    return prefetch(stream) if is_repeatable and not is_resident else stream
