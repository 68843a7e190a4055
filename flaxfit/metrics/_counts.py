"""True and false positives and negatives by class: the sums that all rates are computed from."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._labels import (
    Answers,
    binary_answers,
    class_answers,
    one_class_answers,
    top_k_answers,
)
from flaxfit.metrics._validity import counted_weights, warn_of
from flaxfit.tree import Array, ArrayLike, Sums, broadcast_weights


class Counts(NamedTuple):
    """Weighted confusion counts: by class `(classes,)`, or by example `(batch, ...)`."""

    tp: ArrayLike
    """True positives: has the class, predicted."""
    fp: ArrayLike
    """False positives: lacks the class, predicted."""
    fn: ArrayLike
    """False negatives: has the class, not predicted."""
    tn: ArrayLike
    """True negatives: lacks the class, not predicted."""


def count_answers(
    name: str,
    *,
    average: str | None = "auto",
    threshold: float | None = None,
    from_logits: bool = True,
    multilabel: bool = False,
    top_k: int | None = None,
    class_id: object = None,
) -> Callable[..., tuple[Answers, Array, Sums]]:
    """Makes `(outputs, targets, weights) -> (answers, weights, sums)` from a rate's options.

    The sums hold the counts by class: `tp`, `fp`, `fn`, for several labels `tn`, and `doubts`.
    """
    options = {"threshold": threshold, "from_logits": from_logits}

    def answers_of(outputs: Array, targets: Array) -> Answers:
        if top_k is not None:
            return top_k_answers(outputs, targets, top_k, **options)
        if multilabel:
            return binary_answers(outputs, targets, name=name, **options)
        shape = jnp.shape(outputs)
        n_scores = shape[-1] if len(shape) > 1 else 1
        if average == "binary" and shape == jnp.shape(targets) and n_scores != 2:
            found = binary_answers(outputs, targets, name=name, **options)
            actual, predicted = found.actual.astype(int), found.predicted.astype(int)
            return found._replace(actual=actual, predicted=predicted, n_classes=2)
        if class_id is not None and threshold is not None and n_scores > 2:
            return one_class_answers(outputs, targets, **options)
        found = class_answers(outputs, targets, **options)
        if threshold is not None and found.n_classes != 2:
            raise ValueError(
                f"The metric {name!r} predicts the highest of {found.n_classes} scores and uses no "
                "threshold. Pass class_id= to apply it to one class, or multilabel=True."
            )
        if average == "binary" and found.n_classes != 2:
            raise ValueError(
                f"Cannot take the binary {name!r} of {found.n_classes} classes: use "
                f"{name}(average='macro') or {name}(average='micro')."
            )
        return found

    def count(outputs: Array, targets: Array, weights: Array | None) -> tuple[Answers, Array, Sums]:
        found = answers_of(outputs, targets)
        counted, doubts = counted_weights(found, weights, from_logits=from_logits)
        is_marked = found.actual.dtype == bool
        if is_marked:
            counted = broadcast_weights(counted, found.actual.shape)
        counts = _of_marks(found, counted) if is_marked else _of_labels(found, counted)
        return found, counted, {**counts, "doubts": doubts}

    return count


def counts_of(sums: Sums, name: str) -> Counts:
    """Returns the counts by class from sums, on the host; all NaN if empty or if one is NaN."""
    warn_of(sums["doubts"], name)
    tp, fp, fn = (np.asarray(sums[part], np.float64) for part in ("tp", "fp", "fn"))
    if "tn" in sums:
        tn = np.asarray(sums["tn"], np.float64)
    else:
        tn = _of_other_classes(tp + fn) - fp
        # Below the rounding error of the float32 sums: none.
        tn = np.where(tn < 1e-6 * _of_other_classes(tp + fn), 0, tn)
    counts = Counts(tp, fp, fn, tn)
    total = sum(each.sum() for each in counts)
    return counts if total > 0 else Counts(*(np.full_like(tp, np.nan) for _ in counts))


def micro(counts: Counts) -> Counts:
    """Sums the counts over the classes."""
    return Counts(*(np.sum(each) for each in counts))


def by_example(answers: Answers, weights: Array) -> Counts:
    """Counts the labels of each multilabel example, without labels of weight 0.

    The counts do not include the weight of the example.
    """
    marks = _marks(answers)
    return Counts(*((mark & (weights != 0)).sum(-1) for mark in marks))


def add_by_class(n_classes: int, weights: Array, *classes: Array) -> jax.Array:
    """Sums the weights by class, or by pair of classes."""
    return jnp.zeros((n_classes,) * len(classes), weights.dtype).at[classes].add(weights)


def _of_labels(answers: Answers, weights: Array) -> Sums:
    """Returns the counts by class of examples with one label each."""
    n, actual, predicted = answers.n_classes, answers.actual, answers.predicted
    is_right = actual == predicted
    # NaN * False is NaN: an invalid answer turns every sum of its classes into NaN.
    return {
        "tp": add_by_class(n, weights * is_right, actual),
        "fp": add_by_class(n, weights * ~is_right, predicted),
        "fn": add_by_class(n, weights * ~is_right, actual),
    }


def _of_marks(answers: Answers, weights: Array) -> Sums:
    """Returns the counts by class of examples with several labels."""
    axes = tuple(range(answers.actual.ndim - 1))
    return {part: (weights * marks).sum(axes) for part, marks in _marks(answers)._asdict().items()}


def _marks(answers: Answers) -> Counts:
    actual, predicted = answers.actual, answers.predicted
    return Counts(
        actual & predicted, ~actual & predicted, actual & ~predicted, ~actual & ~predicted
    )


def _of_other_classes(counts: np.ndarray) -> np.ndarray:
    """Returns for each class the count of the others: exactly 0 if they have none."""
    # Not `counts.sum() - counts`, whose rounding error would pass for a count.
    before = np.concatenate([[0.0], np.cumsum(counts)[:-1]])
    after = np.concatenate([np.cumsum(counts[::-1])[-2::-1], [0.0]])
    return before + after
