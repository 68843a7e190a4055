"""Ranking metrics: the items of each row in the order of their scores, beside their relevance."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flaxfit.metrics._labels import floating, labels_of
from flaxfit.metrics._metric import Metric, mean
from flaxfit.tree._types import Array, ArrayLike


def _ranking(name: str, of_ranks: Callable[[Array, Array, int], Array]) -> Metric:
    def configure(*, k: int | None = None) -> Metric:
        def values(scores: ArrayLike, relevance: ArrayLike) -> Array:
            scores, relevance = floating(scores), jnp.asarray(relevance)
            if relevance.shape != scores.shape:  # The number of the one relevant item.
                labels, _ = labels_of(scores, relevance)
                relevance = jax.nn.one_hot(labels, scores.shape[-1])
            order = jnp.argsort(-scores, axis=-1, stable=True)
            ranked = jnp.take_along_axis(floating(relevance), order, -1)
            found = of_ranks(ranked, floating(relevance), k or scores.shape[-1])
            return jnp.where(jnp.isnan(scores).any(-1), jnp.nan, found)

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
equal scores, the first comes first.
"""


def _reciprocal(ranked: Array, relevance: Array, k: int) -> Array:
    is_relevant = ranked[..., :k] > 0
    return jnp.where(is_relevant.any(-1), 1 / (1 + is_relevant.argmax(-1)), 0)


mrr = _ranking("mrr", _reciprocal)
"""The mean over the rows of one over the rank of the first relevant item; see `ndcg`."""
