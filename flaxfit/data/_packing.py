"""pack: several token sequences in each row, in rows of one length."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from flaxfit.data._arrays import ArrayStream
from flaxfit.tree import ArrayLike, whole_number

_Arrays = list[np.ndarray]


def pack(
    sequences: Iterable[ArrayLike],
    length: int,
    *,
    targets: Iterable[ArrayLike] | None = None,
    weights: Iterable[ArrayLike] | None = None,
    split: bool = False,
    **options: Any,
) -> ArrayStream:
    """Packs token sequences into rows of one length, several in each row.

    In the given order, each sequence goes into the first row that has room for it. A batch is
    `({"tokens": ..., "segment_ids": ..., "positions": ...}, targets, weights)`, each array of shape
    `(batch, length)`. The segments of a row count from 1, the positions of a segment from 0;
    padding has segment 0 and weight 0.

    Without `targets`, the target of a token is the next one: a sequence of n tokens takes n - 1
    places, and one of fewer than two takes none.

    >>> inputs, targets, weights = next(pack([[5, 6, 7], [1, 2, 3, 4], [8, 9]], length=3))
    >>> inputs["tokens"].tolist(), targets.tolist()
    ([[5, 6, 8], [1, 2, 3]], [[6, 7, 9], [2, 3, 4]])
    >>> inputs["segment_ids"].tolist(), inputs["positions"].tolist()
    ([[1, 1, 2], [1, 1, 1]], [[0, 1, 0], [0, 1, 2]])

    Args:
      sequences: token ids, a list or an array for each sequence.
      length: the number of places in a row.
      targets: the target of each token, in the form of the sequences; None: the next token.
      weights: the weight of each token as a target, in the form of the sequences; None: 1.
      split: whether a sequence that is longer than a row is divided into several independent
        segments. False: it raises an error.
      options: options of `ArrayStream`, such as `batch_size`. `shuffle` changes the order of the
        rows in each epoch, not their contents.

    Raises:
      TypeError: a sequence does not hold token ids.
      ValueError: a sequence is too long, its targets or weights differ in number from its tokens,
        or no sequence has a target.
    """
    length = whole_number("length", length)
    parts = _parts(sequences, targets, weights)
    sizes = [len(tokens) for tokens in parts[0]]
    _check_sizes(sizes, length, split)
    pieces = [min(length, size - at) for size in sizes for at in range(0, size, length)]
    rows, offsets, segments = _first_fit(pieces, length)
    positions = np.arange(sum(pieces)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    places = np.repeat(rows * length + offsets, pieces) + positions

    def placed(values: np.ndarray) -> np.ndarray:
        array = np.zeros((rows.max() + 1, length), values.dtype)
        array.reshape(-1)[places] = values
        return array

    # Leave out empty lists: they become float arrays.
    tokens, targets, weights = (
        placed(np.concatenate([each for each in part if len(each)])) for part in parts
    )
    segment_ids = placed(np.repeat(segments, pieces))
    inputs = {"tokens": tokens, "segment_ids": segment_ids, "positions": placed(positions)}
    return ArrayStream(inputs, targets, weights.astype(np.float32), **options)


def _parts(
    sequences: Iterable[ArrayLike],
    targets: Iterable[ArrayLike] | None,
    weights: Iterable[ArrayLike] | None,
) -> tuple[_Arrays, _Arrays, _Arrays]:
    """Returns the inputs, targets and weights of each sequence, one number per position."""
    tokens = list(map(np.asarray, sequences))
    for at, each in enumerate(tokens):
        if each.ndim != 1 or (len(each) and each.dtype.kind not in "iu"):
            raise TypeError(
                f"Each sequence must be a list or an array of token ids, got sequences[{at}] of "
                f"shape {each.shape} and dtype {each.dtype}."
            )
    labels = tokens if targets is None else _matching("targets", targets, tokens)
    ones = (np.ones(len(each), np.float32) for each in tokens)
    scales = _matching("weights", ones if weights is None else weights, tokens)
    if targets is not None:
        return tokens, labels, scales
    return [t[:-1] for t in tokens], [t[1:] for t in labels], [w[1:] for w in scales]


def _matching(name: str, part: Iterable[ArrayLike], tokens: _Arrays) -> _Arrays:
    """Converts targets or weights to arrays, and checks that they have the sequences' lengths."""
    arrays = list(map(np.asarray, part))
    if len(arrays) != len(tokens):
        raise ValueError(f"There are {len(tokens):,} sequences but {len(arrays):,} {name}.")
    for at, (each, of) in enumerate(zip(arrays, tokens, strict=True)):
        if each.shape != of.shape:
            raise ValueError(
                f"{name}[{at}] must hold one number for each token of sequences[{at}], of shape "
                f"{of.shape}, got the shape {each.shape}."
            )
    return arrays


def _check_sizes(sizes: Sequence[int], length: int, split: bool) -> None:
    """Checks that there are tokens to pack, and that they fit into rows."""
    longest = max(sizes, default=0)
    if not longest:
        raise ValueError(
            f"Cannot pack {len(sizes):,} sequences, none of which has a target: a sequence needs "
            "at least one token, or two if the next token is the target."
        )
    if longest > length and not split:
        raise ValueError(
            f"Cannot pack sequences[{sizes.index(longest)}] into rows of {length:,}, since it "
            f"takes {longest:,} places: use longer rows or shorter sequences, or split=True to "
            "divide it into independent segments."
        )


def _first_fit(sizes: Sequence[int], length: int) -> np.ndarray:
    """Returns the row of each piece, its offset there, and its number in the row, from 1.

    Rows are the leaves of a binary tree whose nodes hold the largest free room below them, which
    finds the first row with enough room in logarithmic time.
    """
    n_leaves = 1 << (len(sizes) - 1).bit_length()
    room = [length] * (2 * n_leaves)
    n_pieces = [0] * n_leaves
    placed = []
    for size in sizes:
        node = 1
        while node < n_leaves:
            node *= 2
            node += room[node] < size
        row = node - n_leaves
        n_pieces[row] += 1
        placed.append((row, length - room[node], n_pieces[row]))
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return np.array(placed).T
