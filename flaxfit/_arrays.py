"""Arrays as users pass them to `fit`, `evaluate` and `predict`: together, weighted and split."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def prepare(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    seed: int = 0,
) -> tuple[Any, Any]:
    """The data to train on and the data to validate on.

    Returns:
      Each as a tuple `(x, y, weights)` where it is arrays, else as it came.

    Raises:
      ValueError: arguments that exclude each other, or parts of different lengths.
    """
    if isinstance(validation_data, tuple | list) and _all_arrays(validation_data):
        if not 1 <= len(validation_data) <= 3:
            raise ValueError(
                "validation_data must be (x, y) or (x, y, weights), "
                f"got {len(validation_data)} parts."
            )
        validation_data = (*validation_data, None, None)[:3]
    if not _all_arrays(x):
        given = {
            "y": y is not None,
            "sample_weight": sample_weight is not None,
            "class_weight": class_weight is not None,
            "validation_split": bool(validation_split),
        }
        wrong = [name for name, is_given in given.items() if is_given]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} can be used with arrays only, and x is a "
                f"{type(x).__name__}: let its batches hold (inputs, targets, weights), and pass "
                "validation_data."
            )
        return x, validation_data
    x, y = as_arrays(x), None if y is None else as_arrays(y)
    _check_lengths({"x": x, "y": y, "sample_weight": sample_weight})
    arrays = (x, y, weights(y, sample_weight, class_weight))
    if not validation_split:
        return arrays, validation_data
    if validation_data is not None:
        raise ValueError("Give either validation_data or validation_split, not both.")
    return split(arrays, validation_split, seed)


def weights(
    y: Any, sample_weight: Any = None, class_weight: Mapping[int, float] | None = None
) -> np.ndarray | None:
    """One weight per example: that of the example times that of its class; None for all equal."""
    w = None if sample_weight is None else np.asarray(sample_weight, np.float32)
    if w is not None and w.ndim != 1:
        raise ValueError(f"sample_weight must hold one number per example, got shape {w.shape}.")
    if class_weight is None:
        return w
    if not isinstance(y, np.ndarray | jax.Array):
        raise ValueError("class_weight needs targets y that are one array of labels.")
    labels = np.asarray(y)
    labels = labels.argmax(-1) if labels.ndim == 2 and labels.shape[1] > 1 else labels.reshape(-1)
    if len(labels) != len(y):
        raise ValueError(f"class_weight needs one label per example, got y of shape {y.shape}.")
    by_class = np.ones(len(labels), np.float32)
    for label, weight in class_weight.items():
        by_class[labels == label] = weight
    return by_class if w is None else w * by_class


def split(arrays: tuple[Any, ...], fraction: float, seed: int) -> tuple[Any, Any]:
    """Parts a random fraction of the examples from the rest, for validation."""
    if not 0 < fraction < 1:
        raise ValueError(f"validation_split must lie between 0 and 1, got {fraction}.")
    n = len(jax.tree.leaves(arrays)[0])
    n_validation = max(1, round(n * fraction))
    if n_validation >= n:
        raise ValueError(f"validation_split={fraction} leaves none of {n} examples to train on.")
    order = np.random.default_rng((seed, 0x5B11)).permutation(n)
    validation, training = np.sort(order[:n_validation]), np.sort(order[n_validation:])
    return tuple(
        jax.tree.map(lambda a, r=rows: np.asarray(a)[r], arrays) for rows in (training, validation)
    )


def as_arrays(part: Any) -> Any:
    """The arrays of a part of the data: lists of numbers become arrays, tables their values."""
    if isinstance(part, list | tuple) and not _all_arrays(part):
        return np.asarray(part)
    if isinstance(part, Mapping):
        return {name: as_arrays(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return tuple(as_arrays(value) for value in part)
    return part if isinstance(part, jax.Array) else np.asarray(part)


def _all_arrays(part: Any) -> bool:
    if isinstance(part, Mapping):
        return bool(part) and all(_all_arrays(value) for value in part.values())
    if isinstance(part, tuple):
        return bool(part) and all(_all_arrays(value) for value in part)
    return hasattr(part, "__array__") and not hasattr(part, "__next__")


def _check_lengths(parts: Mapping[str, Any]) -> None:
    rows = [(name, len(a)) for name, part in parts.items() for a in jax.tree.leaves(part)]
    (first, n), *rest = rows
    for name, other in rest:
        if other != n:
            raise ValueError(f"{first} has {n:,} rows but {name} has {other:,}.")
