"""What is counted between checkpoints."""

import numpy as np
import pytest
from loops import assert_identical

from flaxfit import Checkpoint
from flaxfit.loop._tally import Tally

SUMS = {"loss": (np.float32(0), np.float32(0)), "n": (np.int32(0),)}
# Two of them: a sum, and what rounding has cut off of it.
TOTALS = {
    "float32": np.array([[6, 4], [0.5, 0]], np.float32),
    "int32": np.array([[3], [0]], np.int32),
}
METRICS = {"loss": 1.625, "n": 3.0}


def tally_of(sums, **options):
    tally = Tally(options.get("share", lambda tree: tree))
    tally.expect(sums)
    return tally


def test_steps_and_examples_are_counted_until_a_new_count_begins():
    tally = tally_of(SUMS)
    assert tally.metrics({}) == {}
    tally.add(TOTALS, 1, 3)
    tally.add(TOTALS, 2, 6)
    assert (tally.n_steps, tally.n_examples, tally.metrics({})) == (3, 9, METRICS)
    tally.begin()
    assert (tally.n_steps, tally.n_examples, tally.metrics({})) == (0, 0, {})
    assert tally.totals.keys() == TOTALS.keys()
    assert all(not np.any(x) for x in tally.totals.values())


def test_zeros_are_placed_once_for_sums_of_the_same_shapes():
    placed = []
    tally = tally_of(SUMS, share=lambda tree: placed.append(tree) or tree)
    n = len(placed)
    tally.expect({"loss": (np.float32(7), np.float32(7)), "n": (np.int32(7),)})
    assert len(placed) == n
    tally.expect({"n": (np.int32(0),)})
    assert len(placed) == n + 1


def test_other_sums_in_the_middle_of_a_count_are_reported():
    tally = tally_of(SUMS)
    tally.add(TOTALS, 1, 3)
    assert not tally.expect(SUMS)
    assert tally.expect({"n": (np.int32(0),)})
    tally.begin()
    assert not tally.expect({"n": (np.int32(0),)})
    assert list(tally.totals) == ["int32"]


def test_zeros_that_cannot_be_placed_are_tried_again():
    def share(tree):
        if tree and fails.pop():
            raise MemoryError("no room")
        return tree

    fails = [False, True]
    tally = Tally(share)
    with pytest.raises(MemoryError):
        tally.expect(SUMS)
    tally.expect(SUMS)
    tally.add(TOTALS, 1, 3)
    assert tally.metrics({}) == METRICS


def test_metrics_are_known_before_any_batch_has_shown_the_sums():
    tally, other = tally_of(SUMS), Tally(lambda tree: tree)
    tally.add(TOTALS, 2, 6)
    other.resume(
        Checkpoint(
            step=2,
            state=None,
            metrics=tally.metrics({}),
            n_completed_steps=tally.n_steps,
            n_examples=tally.n_examples,
            sums=tally.totals,
        )
    )
    assert (other.n_steps, other.n_examples, other.metrics({})) == (2, 6, METRICS)
    assert not other.expect(SUMS)
    assert other.metrics({}) == METRICS
    assert_identical(other.totals, tally.totals)
