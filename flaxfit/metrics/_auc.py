"""The area under the ROC curve, from sums alone: histograms of the digits of the scores."""

from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._metric import Metric
from flaxfit.metrics._scores import Ranked
from flaxfit.metrics._validity import warn_of
from flaxfit.tree import Array, ArrayLike, Sums

# A score is read as an ordered integer: a head of 12 bits (sign, exponent and, of float32, three
# bits of the mantissa), then digits of 4 bits. The head has a bin for each value. Each digit is
# counted in a count sketch (Charikar, Chen, Farach-Colton 2002): a hash of the bits before it
# chooses a row of bins in each of three copies, and the sign of the count. Two scores are compared
# where they first differ, so only scores with a common prefix compete, and only prefixes of many
# scores matter.
_HEAD, _DIGIT, _COPIES = 12, 4, 3


def _auc(
    *,
    n_bins: int = 2**15,
    average: str | None = "macro",
    multi_class: str | None = None,
    multilabel: bool = False,
    from_logits: bool = True,
    label_weights: Sequence[float] | None = None,
) -> Metric:
    if n_bins < 2:
        raise ValueError(f"The metric 'auc' needs at least 2 bins, got n_bins={n_bins}.")
    n_rows = -(-n_bins // 128)
    ranked = Ranked("auc", average, multi_class, multilabel, from_logits, label_weights)

    def counted(scores: jax.Array, actual: jax.Array, weights: jax.Array) -> jax.Array:
        places, signs, n_cells = _places(_ordered(scores), n_rows)
        sums = jnp.zeros((2, n_cells), weights.dtype)
        return sums.at[actual.astype(int)[:, None], places].add(weights[:, None] * signs)

    def measure(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        found = ranked.scores(outputs, targets, weights)
        columns = (found.scores, found.actual, found.weights)
        columns = [each.reshape(-1, each.shape[-1]) for each in columns]
        return {"counts": jax.vmap(counted, 1)(*columns), "doubts": found.doubts}

    def area(counts: np.ndarray) -> float:
        totals = counts[:, : 2**_HEAD].sum(1, keepdims=True)
        if not totals.prod() > 0:  # One class alone, or NaN.
            return np.nan
        return 0.5 + 0.5 * _excess(counts / totals, n_rows)

    def compute(sums: Sums) -> ArrayLike:
        warn_of(sums["doubts"], "auc")
        counts = np.asarray(sums["counts"], np.float64)
        return ranked.averaged([*map(area, counts)], counts[:, 1, : 2**_HEAD].sum(1))

    return Metric(measure, compute, "auc", _auc)


auc: Metric = _auc()
"""The area under the ROC curve of a single score, or of the scores of two classes.

Ties count half. The value is within 0.001 of the exact one for any finite scores, and usually much
closer: all bits of the scores count, so neither their scale nor their spread matters. The value
does not depend on the batches. More than the default of 32,768 bins, `auc(n_bins=...)`, improve it
if scores cluster in hundreds of separate places.

With `multi_class="ovr"` it is computed for each class against the others, by probability; with
`multilabel=True` for each label, of outputs and labels `(batch, labels)`. The value is their mean,
weighted by `label_weights` if given, or by frequency with `average="weighted"`; with None it is an
array. Classes that never or always occur are ignored. Each class takes half a megabyte, less with
fewer bins.
"""


def _ordered(scores: jax.Array) -> jax.Array:
    """Maps scores to unsigned integers in the same order."""
    n_bits = 8 * scores.dtype.itemsize
    scores = jnp.where(scores == 0, 0, scores)  # -0.0 is 0.0.
    bits = jax.lax.bitcast_convert_type(scores, f"uint{n_bits}")
    top = jnp.asarray(1 << (n_bits - 1), bits.dtype)
    return jnp.where(bits >= top, ~bits, bits | top)


def _places(numbers: jax.Array, n_rows: int) -> tuple[jax.Array, jax.Array, int]:
    """Returns the cells that count each number, their signs, and the total number of cells."""
    n_bits, base = 8 * numbers.dtype.itemsize, 2**_DIGIT
    places = [(numbers >> (n_bits - _HEAD)).astype(int)[:, None]]
    signs, n_cells = [jnp.ones_like(places[0])], 2**_HEAD
    for shift in range(n_bits - _HEAD - _DIGIT, -1, -_DIGIT):
        digits = (numbers >> shift) % base
        rows, of_rows = _hashed(jnp, numbers >> (shift + _DIGIT), n_rows)
        places.append(n_cells + rows.astype(int) * base + digits.astype(int)[:, None])
        signs.append(of_rows)
        n_cells += _COPIES * n_rows * base
    return jnp.concatenate(places, 1), jnp.concatenate(signs, 1), n_cells


def _hashed(numpy: ModuleType, prefixes: ArrayLike, n_rows: int) -> tuple[ArrayLike, ArrayLike]:
    """Hashes prefixes to one row in each copy, and to signs: both `(prefixes, copies)`."""
    if prefixes.dtype.itemsize == 8:
        prefixes = prefixes ^ (prefixes >> 32) * 0x9E3779B9
    mixed = prefixes.astype("uint32")
    for shift, factor in (16, 0x7FEB352D), (15, 0x846CA68B), (16, 1):  # C. Wellons, lowbias32.
        mixed = (mixed ^ (mixed >> shift)) * numpy.uint32(factor)
    copies = numpy.arange(_COPIES, dtype="uint32")
    hashes = mixed[:, None] * (2 * copies + 1) * numpy.uint32(0x9E3779B1)
    hashes = (hashes ^ (hashes >> 15)) * numpy.uint32(0x2C1B3C6D) ^ (copies << 7)
    hashes = hashes ^ (hashes >> 16)
    return (hashes >> 1) % n_rows + copies * n_rows, 1 - 2 * (hashes & 1).astype("int32")


def _excess(shares: np.ndarray, n_rows: int) -> float:
    """Returns the fraction of pairs ranked right minus the fraction ranked wrong.

    `shares` has a row for negatives and one for positives; each sums to 1 over the heads.
    """
    base = np.uint64(2**_DIGIT)
    heads, rest = np.split(shares, [2**_HEAD], 1)
    levels = rest.reshape(2, -1, _COPIES * n_rows, 2**_DIGIT)
    excess, prefixes, counts = _ranked(heads), np.arange(2**_HEAD, dtype=np.uint64), heads
    # Each level ranks the pairs that the levels before it have left in one bin.
    for level in range(levels.shape[1]):
        # Pairs within other prefixes count as ties: a fraction of at most 1 / (4 * n_rows).
        chosen = np.argsort(-counts.sum(0), kind="stable")[:n_rows]
        chosen = chosen[counts[:, chosen].sum(0) > 1e-7]
        prefixes, counts = prefixes[chosen], counts[:, chosen]
        if counts.prod(0).sum() < 1e-4:
            break
        digits = _projected(_decoded(levels[:, level], prefixes, n_rows), counts)
        excess += _ranked(digits)
        prefixes = (prefixes[:, None] * base + np.arange(base, dtype=np.uint64)).ravel()
        counts = digits.reshape(2, -1)
    return excess


def _decoded(cells: np.ndarray, prefixes: np.ndarray, n_rows: int) -> np.ndarray:
    """Estimates the digit counts of prefixes by least squares over all their rows."""
    rows, signs = _hashed(np, prefixes, n_rows)
    sketch = np.zeros((_COPIES * n_rows, len(prefixes)))
    sketch[rows.T, np.arange(len(prefixes))] = signs.T
    square = sketch.T @ sketch + 1e-9 * np.eye(len(prefixes))  # Two may share all their rows.
    return np.linalg.solve(square, sketch.T @ cells)


def _projected(digits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Projects digit counts onto a simplex: nonnegative, with the count of the prefix as sum."""
    descending = -np.sort(-digits, -1)
    surplus = (descending.cumsum(-1) - counts[..., None]) / np.arange(1, digits.shape[-1] + 1)
    last = (descending > surplus).sum(-1, keepdims=True) - 1
    return np.maximum(digits - np.take_along_axis(surplus, np.maximum(last, 0), -1), 0)


def _ranked(counts: np.ndarray) -> float:
    """Returns the pairs of bins ranked right minus the pairs ranked wrong, on the last axis."""
    negatives, positives = counts
    below = 2 * np.cumsum(negatives, -1) - negatives - negatives.sum(-1, keepdims=True)
    return float((positives * below).sum())
