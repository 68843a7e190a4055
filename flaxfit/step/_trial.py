"""Trials: compare the results of a pass over changed, shortened or divided batches."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.data._batch import Batch, n_examples
from flaxfit.tree import PyTree, flat, is_key, product

N_ROWS = 14
"""The number of examples in a trial. Halves of 7 reveal dependence on periodic positions, such as
parity, and no other axis is likely to have 14 elements."""
_SAME = 1e-5
"""The tolerance between two runs of one program, relative to the largest element."""
CLOSE = 1e-4
"""The tolerance between programs for different batch sizes, which may add in another order."""
COARSE = 1e-2
"""The same tolerance for programs that compute in 16 bits."""
_NOISE = 1e-6
"""The tolerance relative to min(1, typical element): elements near zero are rounding errors."""
_ALIKE = 0.3
"""The tolerance between magnitudes of random results; a sum over half the examples halves."""
_N_SEEDS = 32
MODEL = "The model"
"""The owner of all outputs, and the start of the owner of one of several."""
_MOST_PARTS = 32
"""The number of parts that are compared, evenly distributed over the batch."""


class Pass(NamedTuple):
    """The results of a pass that must not depend on the division of the batch."""

    rows: Mapping[str, PyTree]
    """Arrays with one row per example, by owner; other arrays are ignored."""
    sums: Mapping[str, PyTree] = {}
    """Sums over the examples, by owner."""
    state: PyTree = ()
    """The new model state."""
    penalty: PyTree = ()
    """The terms added to the mean loss."""


class Difference(NamedTuple):
    """The results that dividing a batch would change; "" for no change."""

    rows: str = ""
    """The owner of rows or sums that depend on other examples, or on the batch size."""
    state: str = ""
    """The path of a state array that is not the mean over the parts."""
    chained: str = ""
    """The path of a state array that differs if each part continues from the previous one."""
    penalty: str = ""
    """The paths of penalty terms that are not the mean over the parts."""
    shared: str = ""
    """The owner of an output without rows that is not the mean over the parts."""


Run = Callable[[PyTree, Batch, int], Pass]
"""`(state, batch, seed) -> results`; the seed determines random numbers."""


def try_rows(run: Run, state: PyTree, batch: Batch, *, all_rows: bool = False) -> str:
    """Returns the owner of rows that change if other rows of the batch are replaced, or "".

    It replaces the first half, the second half, and every second row of a few examples, or of
    `all_rows`. A trial is no proof: a branch on other data goes unnoticed.
    """
    batch = _picked(batch, slice(None)) if all_rows else some_rows(run, state, batch)
    whole, n = _read(run(state, batch, 0)), n_examples(batch)
    try:
        half = _read(run(state, _picked(batch, slice(n // 2)), 0))
    except Exception:  # The model accepts no other number of rows.
        half = Pass(dict.fromkeys(whole.rows))
    if half.rows.keys() != whole.rows.keys():  # A model may return a list of rows.
        return MODEL
    places = np.arange(n)
    for is_other in (places < n // 2, places >= n // 2, places % 2 == 0):
        found = _read(run(state, with_other_rows(batch, is_other), 0))
        for owner, rows in _in_order(whole):
            # Another axis may have the same size by chance.
            others = [x.shape[:1] == (n,) for x in _arrays(half.rows[owner])]
            pairs = zip(_arrays(rows), _arrays(found.rows[owner]), strict=True)
            known: Any = itertools.zip_longest(pairs, others, fillvalue=False)
            for (a, b), is_fixed in known:
                is_rows = a.shape[:1] == (n,) and not is_fixed
                if is_rows and _differ(a[~is_other], b[~is_other], _SAME):
                    return owner
    return ""


def varies(run: Run, state: PyTree, batch: Batch) -> bool:
    """Returns whether the results of a pass depend on the seed."""
    batch = some_rows(run, state, batch)
    one, other = (_arrays(_read(run(state, batch, seed))) for seed in (0, 1))
    return any(_differ(a, b, _SAME) for a, b in zip(one, other, strict=True))


def try_parts(
    run: Run, state: PyTree, batch: Batch, n: int, close: float = CLOSE, *, draws: bool = False
) -> str:
    """Returns the owner of rows that differ if computed in parts of `n` examples, or "".

    It takes the whole batch, as the division does: a bound that a few examples stay below, such as
    a capacity, may be reached there.
    """
    n_all = n_examples(batch)
    n = max(1, min(n, n_all // 2))
    starts = [*range(0, n_all - n, n), n_all - n]
    starts = [*starts[: -1 : -(-len(starts) // _MOST_PARTS)], starts[-1]]
    whole = None
    # Of numbers that are drawn at random, only the first ones are the same for fewer rows.
    for start in starts[: 1 if draws else None]:
        place = slice(start, start + n)
        try:
            whole = whole or _read(run(state, _picked(batch, slice(None)), 0))
            part = _read(run(state, _picked(batch, place), 0))
        except Exception:  # One device may not hold a whole batch, or a model take such a part.
            return ""
        if part.rows.keys() != whole.rows.keys():
            return MODEL
        for owner, rows in _in_order(whole):
            for a, b in zip(_arrays(rows), _arrays(part.rows[owner]), strict=True):
                is_by_row = (a.shape[:1], b.shape[:1]) == ((n_all,), (n,))
                if is_by_row and _differ(a[place], b, close):
                    return owner
    return ""


def try_halves(
    run: Run,
    state: PyTree,
    batch: Batch,
    *,
    part: int = 0,
    together: Run | None = None,
    continued: Callable[[PyTree, PyTree], PyTree] | None = None,
    before: PyTree = (),
    compute: Callable[[str, PyTree], PyTree] = lambda owner, sums: sums,
    close: float = CLOSE,
    averages: str = "",
    is_noisy: bool = False,
    draws: bool = False,
    all_rows: bool = False,
) -> Difference:
    """Compares the pass over a batch with the passes over its halves.

    Rows must agree, sums must add up, and state and penalty must be the means over the halves.
    Random results, which differ between batch sizes, are compared by magnitude, and on average over
    seeds.

    Args:
      run: the pass.
      state: the state.
      batch: the examples, from which a few are taken.
      part: the number of examples in a part, to take parts of the batch if `run` accepts no halves;
        0: the batch is not divided.
      together: a pass over all parts, stacked, that may reduce over the axis of replicas; its
        results are stacked. None: `run` on each part.
      continued: `(state, new model state) -> state`, for parts that continue from the previous one;
        None: all start from `state`.
      before: the model state before the pass: changes of large numbers are compared, not values.
      compute: `(owner, sums) -> value`, since different sums may stand for one value.
      close: the tolerance between programs for different batch sizes.
      averages: a prefix of owners whose arrays without rows are averaged over replicas.
      is_noisy: whether state and penalty may depend on batch statistics.
      draws: whether random numbers are drawn, perhaps from a fixed key: rows after the first part
        may then differ.
      all_rows: whether to take all examples, as it also does if `run` accepts no half of a few.
    """
    given = [] if all_rows else [some_rows(run, state, batch)]
    given.append(_picked(batch, slice(None)))
    ways = [(rows, max(1, n_examples(rows) // 2)) for rows in given]
    if 0 < part < ways[-1][1] and n_examples(batch) % part == 0:
        ways.append((given[-1], part))
    for rows, n in ways:
        n_parts = n_examples(rows) // n
        whole = _picked(rows, slice(n_parts * n))
        parts = [_picked(rows, slice(i * n, (i + 1) * n)) for i in range(n_parts)]
        seeds = range(2 if draws else 1)
        wholes = [_read(run(state, whole, seed)) for seed in seeds]
        if draws and _arrays((wholes[0].state, wholes[0].penalty)):
            seeds = range(_N_SEEDS)
            wholes += [_read(run(state, whole, seed)) for seed in seeds[2:]]
        with contextlib.suppress(Exception):
            by_part = _by_part(run, state, parts, seeds, together, continued)
            break
    else:  # It accepts none of these parts: a divided batch raises its own error.
        return Difference()
    one, firsts = wholes[0], [passes[0] for passes in by_part]
    if any(part.rows.keys() != one.rows.keys() for part in firsts):
        return Difference(rows=MODEL)
    # Results that differ between seeds are random: rows cannot be compared then, only statistics.
    is_random = any(
        _differ(a, b, _SAME)
        for other in wholes
        for a, b in zip(*(_arrays((x.rows, x.sums)) for x in (one, other)), strict=True)
    )
    if not is_random:
        if owner := _owner_of_difference(one, firsts, n, compute, draws, close):
            return Difference(rows=owner)
        if averages and (owner := _not_mean(one, firsts, averages, close)):
            return Difference(shared=owner)
    olds, is_chain = flat(before), continued is not None

    def differs(path: str, pick: Callable[[Pass], PyTree], *, is_state: bool = False) -> bool:
        a, *divided = ([flat(pick(x))[path] for x in passes] for passes in (wholes, *by_part))
        if is_key(a[0]):
            return False
        old, rounding = olds.get(path) if is_state else None, 0.0
        # Compare changes: next to a large old value, a wrong change would pass for rounding.
        if old is not None and old.shape == a[0].shape and old.dtype == a[0].dtype != bool:
            old = np.asarray(old)
            with np.errstate(invalid="ignore"):  # An infinite state stays as it is.
                a, *divided = ([x - old for x in each] for each in (a, *divided))
            if np.issubdtype(old.dtype, np.inexact):
                rounding = 4 * float(np.finfo(old.dtype).eps * np.max(np.abs(old), initial=0))
        joint = divided[0]
        if is_state and is_chain:
            joint = divided[-1]
        elif np.issubdtype(a[0].dtype, np.inexact):
            joint = [np.mean(each, 0) for each in zip(*divided, strict=True)]
        if not is_noisy and not any(_differ(a[0], x, _SAME) for x in a[1:]):
            return _differ(a[0], joint[0], close, rounding)
        is_larger = abs(_size(a) - _size(joint)) > _ALIKE * max(_size(a), _size(joint))
        return is_larger or not is_noisy and _differ_on_average(a, joint)

    paths = [x for x in flat(one.state) if differs(x, lambda p: p.state, is_state=True)]
    changed = "".join(paths[:1])
    penalties = [x for x in flat(one.penalty) if differs(x, lambda p: p.penalty)]
    found = ("", changed) if is_chain else (changed, "")
    return Difference("", *found, " ".join(path or "penalty" for path in penalties))


def _by_part(
    run: Run,
    state: PyTree,
    parts: Sequence[Batch],
    seeds: Sequence[int],
    together: Run | None,
    continued: Callable[[PyTree, PyTree], PyTree] | None,
) -> list[list[Pass]]:
    """Returns the results for each part and seed; see `try_halves`."""
    if together is not None:
        stacked = jax.tree.map(lambda *x: np.stack(x), *parts)
        found = [_read(together(state, stacked, seed)) for seed in seeds]
        n = len(parts)
        return [[jax.tree.map(lambda x, i=i: x[i], each) for each in found] for i in range(n)]
    by_part, after = [], state
    for part in parts:
        by_part.append([_read(run(after, part, seed)) for seed in seeds])
        after = state if continued is None else continued(after, by_part[-1][0].state)
    return by_part


def try_doubled(halves: Callable[..., Difference], batch: Batch, draws: bool) -> Difference:
    """Applies `halves`, the `try_halves` of a pass, to a batch of two equal halves."""
    n_all = n_examples(batch)
    for n in (N_ROWS, n_all // 2 * 2):  # The model may take some numbers of rows only.
        rows = np.arange(n) % max(1, n // 2) % n_all
        with contextlib.suppress(Exception):
            return halves(_picked(batch, rows), part=0, draws=draws, all_rows=True)
    return Difference()


def _owner_of_difference(
    whole: Pass,
    parts: Sequence[Pass],
    n: int,
    compute: Callable[[str, PyTree], PyTree],
    draws: bool,
    close: float,
) -> str:
    """Returns the owner of rows that differ in a part, or of sums that do not add up, or ""."""
    for owner, rows in _in_order(whole):
        for i, part in enumerate(parts[: 1 if draws else None]):
            for a, b in zip(_arrays(rows), _arrays(part.rows[owner]), strict=True):
                is_by_row = (a.shape[:1], b.shape[:1]) == ((len(parts) * n,), (n,))
                if is_by_row and _differ(a[i * n : (i + 1) * n], b, close):
                    return owner
    return "" if draws else _not_added(whole.sums, [x.sums for x in parts], compute, close)


def _not_added(
    whole: Mapping[str, PyTree],
    parts: Sequence[Mapping[str, PyTree]],
    compute: Callable[[str, PyTree], PyTree],
    close: float,
) -> str:
    """Returns the owner of sums of a batch that differ from the added sums of its parts, or ""."""
    for owner, sums in whole.items():
        added = functools.reduce(
            lambda a, b: jax.tree.map(np.add, a, b), [part[owner] for part in parts]
        )
        pairs = zip(*(jax.tree.leaves(compute(owner, x)) for x in (sums, added)), strict=True)
        if any(_differ(np.asarray(a), np.asarray(b), close) for a, b in pairs):
            return owner
    return ""


def _not_mean(whole: Pass, parts: Sequence[Pass], prefix: str, close: float) -> str:
    """Returns the owner of an array without rows that is not the mean over the parts, or ""."""
    for owner in filter(lambda name: name.startswith(prefix), whole.rows):
        arrays = (_arrays(x.rows[owner]) for x in (whole, *parts))
        for a, *divided in zip(*arrays, strict=True):
            is_number = np.issubdtype(a.dtype, np.inexact)  # Others come from the first replica.
            joint = np.mean(divided, 0) if is_number else divided[0]
            if a.shape == divided[0].shape and _differ(a, joint, close):
                return owner
    return ""


def try_weights(
    run: Run,
    state: PyTree,
    batch: Batch,
    compute: Callable[[str, PyTree], PyTree],
    close: float = CLOSE,
    *,
    may_pad: bool,
    is_divided: bool,
) -> str:
    """Returns the owner of sums that count rows of weight 0, or do not add up, or "".

    If batches may be padded, a half of weight 0 must change nothing. If they are divided, the sums
    of halves of unequal weight must add up: with equal weights, a mean looks like a sum.
    """
    batch = some_rows(run, state, batch)
    n = n_examples(batch) // 2

    def sums(rows: slice, n_counted: int) -> Mapping[str, PyTree]:
        part = _picked(batch, rows)
        counts = (np.arange(n_examples(part)) < n_counted).astype(np.float32)
        weights = counts if part.weights is None else product(part.weights, counts)
        return _read(run(state, part._replace(weights=weights), 0)).sums

    try:
        whole, first = slice(2 * n), sums(slice(n), n)
    except Exception:  # The model takes no other number of rows.
        return ""
    none, owner = jax.tree.map(np.zeros_like, first), ""
    if may_pad:
        owner = _not_added(sums(whole, n), [first, none], compute, close)
    if owner or not is_divided:
        return owner
    parts = [first, sums(slice(n, 2 * n), 1)]
    return _not_added(sums(whole, n + 1), parts, compute, close)


def _in_order(found: Pass) -> list[tuple[str, PyTree]]:
    """Returns the rows by owner, the model first: loss and metrics depend on its outputs."""
    return sorted(found.rows.items(), reverse=True)


def some_rows(run: Run, state: PyTree, batch: Batch) -> Batch:
    """Returns a few examples, repeated if necessary; all if the model accepts no other size."""
    few = _picked(batch, np.arange(N_ROWS) % n_examples(batch))
    try:
        run(state, few, 0)
    except Exception:  # If something else is wrong, the trial on the whole batch raises it.
        return _picked(batch, slice(None))
    return few


def with_other_rows(batch: Batch, is_other: np.ndarray) -> Batch:
    """Replaces rows by other rows of the batch, scaled by a factor that differs by array."""

    def replaced(number: int, x: np.ndarray) -> np.ndarray:
        if not x.ndim:
            return x
        other = np.roll(x, max(1, len(x) // 2 - 1), 0)
        # Scaling changes equal rows, too, and differs for outputs and targets, so that equal ones
        # become different. Smaller values stay in most valid ranges.
        if other.dtype == bool:
            other = np.zeros_like(other)
        elif jnp.issubdtype(other.dtype, jnp.inexact):
            other = (0.8 ** (1 + number) * other).astype(x.dtype)
        else:
            other = other // 2
        return np.where(is_other.reshape(-1, *[1] * (x.ndim - 1)), other, x)

    leaves, structure = jax.tree.flatten(batch)
    return structure.unflatten([replaced(i, x) for i, x in enumerate(leaves)])


def _picked(batch: Batch, rows: slice | np.ndarray) -> Batch:
    return jax.tree.map(lambda x: np.asarray(x[rows]) if np.ndim(x) else np.asarray(x), batch)


def _read(found: Pass) -> Pass:
    """Copies results to the host, in at least 32 bits; random keys stay."""
    return jax.tree.map(lambda x: x if is_key(x) else _widened(np.asarray(x)), found)


def _widened(x: np.ndarray) -> np.ndarray:
    if np.issubdtype(x.dtype, np.complexfloating):
        return np.stack([np.real(x), np.imag(x)], -1)
    is_short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(np.float32) if is_short else x


def _arrays(tree: PyTree) -> list[np.ndarray]:
    """Returns the arrays of a tree, without typed random keys."""
    return [x for x in jax.tree.leaves(tree) if not is_key(x)]


def _differ(a: np.ndarray, b: np.ndarray, tolerance: float, rounding: float = 0.0) -> bool:
    """Returns whether arrays differ beyond a tolerance relative to the largest differing element.

    Large equal constants, such as those of masks, thus do not hide differences of small elements.
    """
    if a.shape != b.shape:
        return True
    a, b = (x.astype(np.float64) for x in np.broadcast_arrays(a, b))
    is_other = ~np.isclose(a, b, 0, 0, equal_nan=True)
    typical = np.median(np.abs(a[np.isfinite(a)])) if np.isfinite(a).any() else 0
    a, b = a[is_other], b[is_other]
    if not np.isfinite([a, b]).all():
        return True
    allowed = tolerance * np.abs([a, b]).max(initial=0) + _NOISE * min(1, typical) + rounding
    return bool((np.abs(a - b) > allowed).any())


def _differ_on_average(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    """Returns whether the means of random arrays differ by over six standard errors and 5 %."""
    differences = np.stack(a).astype(np.float64) - np.stack(b)
    mean = np.abs(differences.mean(0))
    error = differences.std(0, ddof=1) / len(a) ** 0.5
    return bool(((mean > 6 * error) & (mean > 0.05 * np.abs(a).max(initial=0))).any())


def _size(arrays: list[np.ndarray]) -> float:
    """Returns the root mean square of the finite elements."""
    values = np.concatenate([np.ravel(x).astype(np.float64) for x in arrays])
    values = values[np.isfinite(values)]
    return float(np.sqrt(np.sum(values**2) / max(1, len(values))))
