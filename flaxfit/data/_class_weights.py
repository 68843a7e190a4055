"""Weights of examples or tokens by label, for arrays and for batches of a stream."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import numpy as np

from flaxfit.data._adapters import as_stream
from flaxfit.data._arrays import ArrayStream
from flaxfit.data._batch import three_parts
from flaxfit.data._indexed_batches import is_indexed, n_batches
from flaxfit.data._libraries import is_hugging_face
from flaxfit.data._sample_weights import check_weights
from flaxfit.display import say
from flaxfit.tree import ArrayLike, Data, PyTree, is_array, product, which_count

BALANCED = "balanced"


def weights_by_class(
    y: PyTree,
    class_weight: Mapping[int, float] | str,
    sample_weight: ArrayLike | None = None,
    all_of: PyTree = None,
) -> np.ndarray:
    """Returns the class weight of each example or token; 1 unless given.

    "balanced" is `n / (classes * count)` as in scikit-learn's `compute_class_weight`, counting only
    labels whose `sample_weight` is not 0. If `y` is a part of the targets `all_of`, each label of
    `class_weight` must occur there.
    """
    read = _LabelReader()
    every = read(y if all_of is None else all_of)
    labels = read(y)
    if isinstance(class_weight, str) and class_weight == BALANCED:
        return _looked_up(labels, _balanced([(labels, sample_weight)]))
    class_weight = _checked(class_weight, ", or be 'balanced'")
    there_are = np.unique(every).tolist()
    absent = [label for label in class_weight if label not in there_are]
    if absent:
        more = ", ..." if len(there_are) > 20 else ""
        raise ValueError(
            f"class_weight has labels that do not occur in y, {absent!r:.60}. y has "
            f"{', '.join(map(str, there_are[:20]))}{more}."
        )
    return _looked_up(labels, class_weight)


def balanced_by_pass(
    data: Data, batch_size: int | None = None, form: Callable[[PyTree], PyTree] = lambda item: item
) -> dict[int, float]:
    """Returns "balanced" class weights, counted in a pass that does not change the data.

    >>> balanced_by_pass([(np.zeros(3), np.array([0, 0, 0])), (np.zeros(1), np.array([1]))])
    {0: 0.6666666666666666, 1: 2.0}

    `form` converts an item with columns to `(inputs, targets, weights)`.
    """
    read = _LabelReader(of_batches=True)
    parts = (_three_parts(form(item)) for item in _read_apart(data, batch_size))
    found = _balanced((read(targets), weights) for _, targets, weights in parts)
    found = {int(k) if isinstance(k, float) else k: value for k, value in found.items()}
    kind = type(data).__name__
    shown = ", ".join(f"{label}: {weight:.4g}" for label, weight in [*found.items()][:10])
    say(f"class_weight='balanced' read the {kind} once to count its labels: {shown}")
    return found


def _read_apart(data: Data, batch_size: int | None) -> Iterable[PyTree]:
    """Reads all batches of data without changing its position, order or random draws."""
    if isinstance(data, ArrayStream):  # All rows, those of other processes and remainders too.
        size = data.batch_size
        return (data.pick(slice(i, i + size)) for i in range(0, data.n_examples, size))
    if isinstance(data, list):
        return data
    if is_indexed(data) and n_batches(data) != sys.maxsize:
        return (data[index] for index in range(n_batches(data)))
    if is_hugging_face(data) and hasattr(data, "__getitem__"):
        return as_stream(data, batch_size=batch_size)
    raise ValueError(
        "class_weight='balanced' needs the labels of all examples, and reading a "
        f"{type(data).__name__} to count them may change what it gives later, or have no end: pass "
        "{label: n / (classes * count)}, or arrays, an ArrayStream, a list of batches or an object "
        "with __getitem__ and __len__."
    )


class ClassWeightedStream:
    """Weights the batches of a stream by class; its position is the stream's.

    >>> stream = ClassWeightedStream(iter([(np.zeros(2), np.array([0, 1]))]), {1: 3.0})
    >>> next(stream)[2].tolist()
    [1.0, 3.0]

    `form` converts an item with columns to `(inputs, targets, weights)`.
    """

    def __init__(
        self,
        stream: Any,
        class_weight: Mapping[int, float] | str,
        form: Callable[[PyTree], PyTree] = lambda item: item,
    ):
        if isinstance(class_weight, str) and class_weight == BALANCED:
            raise ValueError(
                "class_weight='balanced' needs the labels of all examples, but one batch has only "
                "some of them: count them yourself and pass {label: n / (classes * count)}."
            )
        self._class_weight = _checked(class_weight)
        if wrong := [label for label in class_weight if not isinstance(label, int | np.integer)]:
            raise TypeError(f"The labels of class_weight must be integers, got {wrong[0]!r:.60}.")
        self._stream, self._form = stream, form
        self._read = _LabelReader(of_batches=True)

    def __len__(self) -> int:
        return len(self._stream)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PyTree:
        return self._weighted(next(self._stream))

    def whole(self) -> PyTree:
        """Returns all examples as one batch, or None if the stream cannot."""
        whole = self._stream.whole() if hasattr(self._stream, "whole") else None
        return None if whole is None else self._weighted(whole)

    def __getattr__(self, name: str) -> Any:
        """Passes on the attributes that a loop reads, but not `next_rows`: rows have no weights."""
        if name not in ("get_state", "set_state", "epoch", "shared", "is_repeatable", "close"):
            raise AttributeError(name)
        return getattr(self._stream, name)

    def _weighted(self, item: PyTree) -> PyTree:
        inputs, targets, weights = _three_parts(self._form(item))
        by_class = _looked_up(self._read(targets), self._class_weight)
        weights = by_class if weights is None else product(np.asarray(weights), by_class)
        return inputs, targets, weights


def _three_parts(item: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    inputs, targets, weights = three_parts(item, "a batch")
    if isinstance(weights, Mapping):
        raise ValueError(WEIGHTS_BY_OUTPUT)
    return inputs, targets, weights


WEIGHTS_BY_OUTPUT = (
    "class_weight cannot be combined with sample_weight by output: multiply the weights of that "
    "output by the class weights instead."
)


class _LabelReader:
    """Reads labels from targets; the first targets decide whether rows are one-hot or soft.

    With `of_batches`, the first batch cannot show whether integers are one-hot rows or labels of
    tokens.
    """

    def __init__(self, *, of_batches: bool = False):
        self._of_batches = of_batches
        self._are_rows: bool | None = None

    def __call__(self, y: PyTree) -> np.ndarray:
        """Returns labels as integers or floats."""
        while isinstance(y, list | tuple) and len(y) == 1:
            (y,) = y
        if not is_array(y):
            raise ValueError("class_weight needs a single array of labels as targets y.")
        labels = np.asarray(y)
        if labels.ndim > 1 and labels.shape[-1] == 1:
            labels = labels[..., 0]
        elif labels.ndim > 1 and self._are_rows is not False:
            are_rows = bool((labels >= 0).all() and np.allclose(labels.sum(-1), 1, atol=0.02))
            self._check_rows(labels, are_rows)
            self._are_rows = are_rows
            if are_rows:
                return labels.argmax(-1)
        if labels.dtype.kind == "f" and not np.array_equal(labels, np.round(labels)):
            raise ValueError(
                "class_weight needs labels as targets y, got numbers that are not whole."
            )
        return labels

    def _check_rows(self, labels: np.ndarray, are_rows: bool) -> None:
        if self._are_rows and not are_rows:
            raise ValueError(
                "class_weight read the targets y of earlier batches as one-hot rows, but this "
                f"batch has other targets. {_ADVICE}"
            )
        is_first = self._of_batches and self._are_rows is None
        if is_first and are_rows and labels.dtype.kind in "biu":
            raise ValueError(
                "class_weight cannot tell whether the integers in the targets y of this batch, of "
                f"shape {labels.shape}, are one-hot rows or the labels of tokens. {_ADVICE}"
            )


_ADVICE = "Pass one-hot rows as floats, or weights of tokens instead of class_weight."


def _checked(class_weight: Any, alternative: str = "") -> Mapping[int, float]:
    if not isinstance(class_weight, Mapping):
        raise TypeError(
            f"class_weight must map labels to weights, such as {{0: 1.0, 1: 2.5}}{alternative}, "
            f"got {type(class_weight).__name__}: {class_weight!r:.60}"
        )
    for label, weight in class_weight.items():
        if not isinstance(weight, int | float | np.number):
            raise TypeError(f"The class_weight of {label!r} must be a number, got {weight!r:.60}.")
    if class_weight:
        check_weights(list(class_weight.values()), "class_weight")
    return class_weight


def _balanced(parts: Iterable[tuple[np.ndarray, ArrayLike | None]]) -> dict[Any, float]:
    """Returns weights by label, from labels and weights of parts of the data."""
    counts = Counter()
    for labels, weights in parts:
        if weights is not None:
            counted = which_count(np.asarray(weights), labels.shape)
            labels = labels[np.broadcast_to(counted, labels.shape)]
        there_are, n = np.unique(labels, return_counts=True)
        counts.update(dict(zip(there_are.tolist(), n.tolist(), strict=True)))
    total = sum(counts.values())
    return {label: total / (len(counts) * n) for label, n in sorted(counts.items())}


def _looked_up(labels: np.ndarray, class_weight: Mapping[int, float]) -> np.ndarray:
    """Looks up the weights of labels; other labels have the weight 1."""
    if not class_weight:
        return np.ones(labels.shape, np.float32)
    names = np.array(sorted(class_weight))
    weights = np.array([class_weight[name] for name in names.tolist()], np.float32)
    places = np.minimum(np.searchsorted(names, labels), len(names) - 1)
    return np.where(names[places] == labels, weights[places], np.float32(1))
