"""Metrics of text: BLEU, ROUGE and error rates, of sequences of tokens or of decoded text."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._metric import Metric
from flaxfit.metrics._rows import collecting
from flaxfit.tree import Array

Pairs: TypeAlias = list[tuple[Sequence[Any], Sequence[Any]]]
"""Predicted and expected sequences of tokens, words or characters."""
Value: TypeAlias = Callable[[Pairs, list[float]], float]
"""`(pairs, weights) -> value`: a weight of n counts as n equal pairs."""


def _text(name: str, value: Value, *, by_letter: bool = False) -> Metric:
    """Makes a metric of texts.

    Outputs are logits `(batch, tokens, vocabulary)` or integer tokens `(batch, tokens)`; targets
    are integer tokens. Tokens of weight 0 are ignored in the targets, and, with logits, in the
    outputs. An example without counted tokens is ignored; others are weighted by example. Options:
      decode: converts an array of tokens to a string, to compare its words (`cer`: letters); None
        compares tokens.
      ignore_label: the padding token of the targets, which is ignored.
      end: the token that ends a sequence; it is ignored, with all later tokens.
    """

    def configure(
        *,
        decode: Callable[[np.ndarray], str] | None = None,
        ignore_label: int | None = None,
        end: int | None = None,
    ) -> Metric:
        def prepare(
            outputs: Array, targets: Array, *, weights: Array | None = None
        ) -> tuple[Any, Array | None]:
            outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
            tokens = outputs.argmax(-1) if outputs.ndim == targets.ndim + 1 else outputs
            if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
                raise ValueError(
                    f"The metric {name!r} expects logits (batch, tokens, vocabulary) or integer "
                    f"tokens (batch, tokens), got outputs {outputs.shape} "
                    f"and targets {targets.shape}."
                )
            counts = jnp.ones(targets.shape, bool)
            if weights is not None:
                counts &= weights.reshape(len(targets), -1) != 0
            if ignore_label is not None:
                counts &= targets != ignore_label
            known = counts if outputs.ndim == 3 else jnp.ones(tokens.shape, bool)
            return (tokens, known, targets, counts), weights

        def units(tokens: np.ndarray, known: np.ndarray) -> Sequence[Any]:
            tokens = tokens[known]
            if end is not None and (tokens == end).any():
                tokens = tokens[: (tokens == end).argmax()]
            if decode is None:
                return tokens.tolist()
            return decode(tokens) if by_letter else decode(tokens).split()

        def of(
            tokens: np.ndarray,
            known: np.ndarray,
            targets: np.ndarray,
            counts: np.ndarray,
            weights: np.ndarray,
        ) -> float:
            chosen = counts.any(1)
            if not chosen.any():
                return math.nan
            rows = zip(*(each[chosen] for each in (tokens, known, targets, counts)), strict=True)
            pairs = [(units(a, b), units(c, d)) for a, b, c, d in rows]
            return value(pairs, _by_example(name, weights[chosen]))

        return collecting(name, prepare, of, configure)

    return configure()


def _by_example(name: str, weights: np.ndarray) -> list[float]:
    """Returns the weight of each example, from weights of examples or of tokens (0: ignored)."""
    weights = weights.reshape(len(weights), -1)
    largest = weights.max(1, keepdims=True)
    if ((weights != 0) & (weights != largest)).any():
        raise ValueError(
            f"The metric {name!r} weighs examples, not tokens, and the weights of tokens differ "
            "within an example. Give each token of an example the same weight, or 0 to leave it "
            "out."
        )
    return largest[:, 0].tolist()


def _total(values: Iterable[float], weights: list[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True))


def _grams(units: Sequence[Any], n: int) -> Counter[Any]:
    return Counter(zip(*(units[i:] for i in range(n)), strict=False))


def _bleu(pairs: Pairs, weights: list[float]) -> float:
    logs = []
    for n in range(1, 5):
        found = [(_grams(a, n), _grams(b, n)) for a, b in pairs]
        right = _total(((a & b).total() for a, b in found), weights)
        total = _total((a.total() for a, _ in found), weights)
        if not right:
            return 0.0
        logs.append(math.log(right / total))
    lengths = [_total(map(len, side), weights) for side in zip(*pairs, strict=True)]
    return math.exp(sum(logs) / 4 + min(0.0, 1 - lengths[1] / lengths[0]))


def _f1(shared: int, a: int, b: int) -> float:
    return 2 * shared / (a + b) if a + b else 0.0


def _rouge(n: int) -> Value:
    def value(pairs: Pairs, weights: list[float]) -> float:
        found = [(_grams(a, n), _grams(b, n)) for a, b in pairs]
        each = [_f1((a & b).total(), a.total(), b.total()) for a, b in found]
        return _total(each, weights) / sum(weights)

    return value


def _longest(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Returns the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for j, y in enumerate(b):
            row.append(before[j] + 1 if x == y else max(before[j + 1], row[j]))
    return row[-1]


def _rouge_longest(pairs: Pairs, weights: list[float]) -> float:
    each = [_f1(_longest(a, b), len(a), len(b)) for a, b in pairs]
    return _total(each, weights) / sum(weights)


def _edits(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Returns the fewest insertions, deletions and replacements between sequences (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before = row
        row = [i]
        for j, y in enumerate(b):
            row.append(min(before[j + 1] + 1, row[j] + 1, before[j] + (x != y)))
    return row[-1]


def _error_rate(pairs: Pairs, weights: list[float]) -> float:
    n = _total((len(b) for _, b in pairs), weights)
    return _total((_edits(a, b) for a, b in pairs), weights) / n if n else math.nan


bleu: Metric = _text("bleu", _bleu)
"""BLEU of the corpus, of 1 to 4 units, with the brevity penalty (Papineni et al. 2002); 0 to 1."""

rouge_1: Metric = _text("rouge_1", _rouge(1))
"""The mean over the examples of the F1 of shared units (Lin 2004)."""

rouge_2: Metric = _text("rouge_2", _rouge(2))
"""The mean over the examples of the F1 of shared pairs of units (Lin 2004)."""

rouge_l: Metric = _text("rouge_l", _rouge_longest)
"""The mean over the examples of the F1 of the longest common subsequence (Lin 2004)."""

wer: Metric = _text("wer", _error_rate)
"""The word error rate: edits over the number of expected words, or tokens without `decode`."""

cer: Metric = _text("cer", _error_rate, by_letter=True)
"""The character error rate of decoded texts; without `decode` that of tokens."""
