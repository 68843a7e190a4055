"""Ranking metrics: the items of each row in the order of their scores, beside their relevance."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flaxfit.metrics._labels import floating, labels_of
from flaxfit.metrics._metric import Metric, mean
from flaxfit.tree._types import Array, ArrayLike


def _ranking(
    name: str, of_ranks: Callable[[Array, Array, int], Array], default: int | None = None
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
            if relevance.shape != scores.shape:  # The number of the one relevant item.
                labels, _ = labels_of(scores, relevance)
                relevance = jax.nn.one_hot(labels, scores.shape[-1])
            else:
                scores = jnp.where(counts, scores, -jnp.inf)
                counts = counts.any(-1)
            order = jnp.argsort(-scores, axis=-1, stable=True)
            ranked = jnp.take_along_axis(floating(relevance), order, -1)
            found = of_ranks(ranked, floating(relevance), k or scores.shape[-1])
            return jnp.where(jnp.isnan(scores).any(-1), jnp.nan, found), counts

        return dataclasses.replace(mean(values, name=name), configure=configure, mode="max")

    return configure()


def _gain(ranked: Array, k: int) -> Array:
    return (ranked[..., :k] / jnp.log2(jnp.arange(2, 2 + ranked[..., :k].shape[-1]))).sum(-1)


def _ndcg(ranked: Array, relevance: Array, k: int) -> Array:
    best = _gain(-jnp.sort(-relevance, axis=-1), k)
    return jnp.where(best > 0, _gain(ranked, k) / jnp.where(best > 0, best, 1), 0)


ndcg = _ranking("ndcg", _ndcg)
"""The normalised discounted cumulative gain, with gains as given (Järvelin, Kekäläinen 2002).

Outputs are scores `(batch, items)`; targets their relevance, or the number of the one relevant
item. `k` counts the first items alone. The mean over the rows; 0 where nothing is relevant. Of
equal scores, the first comes first. Items whose target is `ignore_label`, such as padding, do not
count, nor do rows of them alone.
"""


def _reciprocal(ranked: Array, relevance: Array, k: int) -> Array:
    is_relevant = ranked[..., :k] > 0
    return jnp.where(is_relevant.any(-1), 1 / (1 + is_relevant.argmax(-1)), 0)


mrr = _ranking("mrr", _reciprocal)
"""The mean over the rows of one over the rank of the first relevant item; see `ndcg`."""


def _precision(ranked: Array, relevance: Array, k: int) -> Array:
    return (ranked[..., :k] > 0).sum(-1) / k


precision_at_k = _ranking("precision_at_k", _precision, 10)
"""The share of relevant items among the first `k`, 10 unless given; see `ndcg`."""


def _recall(ranked: Array, relevance: Array, k: int) -> Array:
    n_relevant = (relevance > 0).sum(-1)
    return (ranked[..., :k] > 0).sum(-1) / jnp.maximum(n_relevant, 1)


recall_at_k = _ranking("recall_at_k", _recall, 10)
"""The share of the relevant items that are among the first `k`, 10 unless given; see `ndcg`.

With one relevant item in each row it is the hit rate; where none is relevant, 0.
"""
