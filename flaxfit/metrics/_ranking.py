"""Ranking metrics: of the relevance of each row's items, ordered by score."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.losses._shared import floating
from flaxfit.metrics._labels import labels_of
from flaxfit.metrics._metric import Metric, mean
from flaxfit.tree import Array, ArrayLike, Sums


class _Ranked(NamedTuple):
    """Expected values by rank, over all orders of items with equal scores; and the relevance."""

    gains: jax.Array
    hits: jax.Array
    """The probability that the item at this rank is relevant."""
    first_hits: jax.Array
    """The same probability, given that no item before it is relevant."""
    relevance: jax.Array


def _ranked(scores: jax.Array, relevance: jax.Array) -> _Ranked:
    # Items that do not count have the score NaN, which sorts last and ties with nothing.
    falling, relevant = jax.lax.sort((-scores, relevance), num_keys=1)
    first, end = (
        jnp.vectorize(
            lambda row, side=side: jnp.searchsorted(row, row, side), signature="(n)->(n)"
        )(falling)
        for side in ("left", "right")
    )
    sums = jnp.stack([relevant, relevant > 0]).cumsum(-1)
    sums = jnp.pad(sums, [(0, 0)] * scores.ndim + [(1, 0)])
    gains, hits = (
        jnp.take_along_axis(each, end, -1) - jnp.take_along_axis(each, first, -1) for each in sums
    )
    # If none of the tied items before a rank was relevant, all hits are among the `n_left` others.
    n_equal, n_left = end - first, end - jnp.arange(scores.shape[-1])
    gains = jnp.where(n_equal == 1, relevant, gains / n_equal)
    return _Ranked(gains, hits / n_equal, jnp.minimum(hits / n_left, 1), relevance)


def _ranking(
    name: str, of_ranks: Callable[[_Ranked, int], Array], default: int | None = None
) -> Metric:
    def configure(*, k: int | None = default, ignore_label: int | None = None) -> Metric:
        if k is not None and k < 1:
            raise ValueError(f"Cannot rank the first {k} items: k must be at least 1.")

        def values(scores: ArrayLike, relevance: ArrayLike) -> tuple[Array, Array]:
            scores, relevance = floating(scores), jnp.asarray(relevance)
            counts = jnp.ones(relevance.shape, bool)
            if ignore_label is not None:
                counts = relevance != ignore_label
                relevance = jnp.where(counts, relevance, 0)
            if relevance.shape != scores.shape:  # The index of the relevant item.
                labels, is_valid = labels_of(scores, relevance)
                relevance, is_item = jax.nn.one_hot(labels, scores.shape[-1]), jnp.array(True)
            else:
                is_valid, is_item, counts = ~(relevance < 0).any(-1), counts, counts.any(-1)
            ranked = _ranked(jnp.where(is_item, scores, jnp.nan), floating(relevance))
            found = of_ranks(ranked, k or scores.shape[-1])
            found = jnp.where((jnp.isnan(scores) & is_item).any(-1), jnp.nan, found)
            return jnp.where(is_valid, found, jnp.inf), counts  # `compute` rejects inf.

        metric = mean(values, name=name)

        def compute(sums: Sums) -> ArrayLike:
            if np.isposinf(sums["sum"]):
                raise ValueError(
                    f"The metric {name!r} got negative targets, or indices of items that do not "
                    "exist. Use 0 for irrelevant items, and ignore items that do not count, such "
                    f"as padding: {name}(ignore_label=-1)."
                )
            return metric.compute(sums)

        return dataclasses.replace(metric, compute=compute, configure=configure)

    return configure()


def _gain(gains: Array, k: int) -> Array:
    return (gains[..., :k] / jnp.log2(jnp.arange(2, 2 + gains[..., :k].shape[-1]))).sum(-1)


def _ndcg(ranked: _Ranked, k: int) -> Array:
    best = _gain(-jnp.sort(-ranked.relevance, axis=-1), k)
    return jnp.where(best > 0, _gain(ranked.gains, k) / jnp.where(best > 0, best, 1), 0)


ndcg: Metric = _ranking("ndcg", _ndcg)
"""The normalised discounted cumulative gain, with gains as given (Järvelin, Kekäläinen 2002).

Outputs are scores `(batch, items)`; targets are their relevance, or the index of the only relevant
item. The value is the mean over the rows, of the first `k` items if `k` is given; a row without
relevant items gives 0. Ties are averaged over all orders. Items whose target is `ignore_label`,
such as padding, do not count, nor do rows of only such items; other negative targets raise.
"""


def _reciprocal(ranked: _Ranked, k: int) -> Array:
    first = ranked.first_hits[..., :k]
    none_yet = jnp.cumprod(1 - first, -1)  # P(no relevant item up to each rank).
    chances = first.at[..., 1:].multiply(none_yet[..., :-1])
    return (chances / (1 + jnp.arange(first.shape[-1]))).sum(-1)


mrr: Metric = _ranking("mrr", _reciprocal)
"""The mean reciprocal rank of the first relevant item in each row; see `ndcg`."""


def _precision(ranked: _Ranked, k: int) -> Array:
    return ranked.hits[..., :k].sum(-1) / k


precision_at_k: Metric = _ranking("precision_at_k", _precision, 10)
"""The fraction of the first `k` items, 10 unless given, that are relevant; see `ndcg`."""


def _recall(ranked: _Ranked, k: int) -> Array:
    n_relevant = (ranked.relevance > 0).sum(-1)
    return ranked.hits[..., :k].sum(-1) / jnp.maximum(n_relevant, 1)


recall_at_k: Metric = _ranking("recall_at_k", _recall, 10)
"""The fraction of relevant items that are among the first `k`, 10 unless given; see `ndcg`.

With one relevant item in each row it is the hit rate; where none is relevant, 0.
"""
