"""Rows on the host: which are kept, how many may be, and what they take."""

import tracemalloc

import numpy as np
import pytest

import flaxfit as ff
from flaxfit.data._batch import Batch
from flaxfit.loop._collected_rows import CollectedRows, check_bounds
from flaxfit.metrics import as_metrics, collected


def keep(*arguments):
    return np.asarray(arguments[0])


def batch_of(values, weights=None):
    weights = np.ones(len(values), np.float32) if weights is None else weights
    return {"keep": {"arguments": (values,), "weights": weights}}


def kept(*batches, **options):
    rows = CollectedRows({"keep": collected(keep, **options)})
    for batch in batches:
        rows.add(batch)
    return rows.values({})["keep"]


def test_rows_are_kept_in_order_but_those_of_weight_0():
    values = np.arange(10)
    weights = (values % 3 != 0).astype(np.float32)
    none = batch_of(values[:3], np.zeros(3))
    found = kept(batch_of(values[:7], weights[:7]), none, batch_of(values[7:], weights[7:]))
    np.testing.assert_array_equal(found, [1, 2, 4, 5, 7, 8])
    assert found.dtype == values.dtype


def test_a_row_counts_if_one_of_its_weights_does():
    weights = np.array([[0, 0], [0, 1], [1, 1]], np.float32)
    values = np.arange(6).reshape(3, 2)
    with pytest.warns(UserWarning, match="takes none"):
        np.testing.assert_array_equal(kept(batch_of(values, weights)), values[1:])


def test_more_rows_than_the_bound_are_refused_with_how_to_raise_it():
    batches = [batch_of(np.arange(4.0))] * 3
    assert len(kept(*batches, max_rows=12)) == 12
    with pytest.raises(
        ValueError, match=r"'keep' .* 12 rows, 144 B, .* bound of 11.*max_rows="
    ) as e:
        kept(*batches, max_rows=11)
    assert "metrics.on(" in str(e.value) and "n_steps=" in str(e.value)


def test_the_bound_is_compared_with_all_data_before_anything_is_measured():
    metrics = {"keep": collected(keep, max_rows=2)}
    data = Batch((np.ones(4),), (), np.array([1, 0, 0, 1]))
    check_bounds(metrics, data)
    with pytest.raises(ValueError, match="3 rows and more are over its bound of 2"):
        check_bounds(metrics, data._replace(weights=np.array([1, 1, 0, 1])))
    with pytest.raises(ValueError, match="4 rows"):
        check_bounds(metrics, data._replace(weights=None))
    by_output = {"": np.ones(4), "a": np.array([0, 0, 0, 1])}
    with pytest.raises(ValueError, match="4 rows"):
        check_bounds(metrics, data._replace(weights=by_output))


def test_rows_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3,\) with .* of \(2,\): pad sequences"):
        kept(batch_of(np.ones((4, 2))), batch_of(np.ones((4, 3))))


def test_values_come_by_name_and_do_not_replace_others():
    both = collected(lambda x: {"a": x.sum(), "b": x.max()}, name="both")
    batch = {"both": batch_of(np.arange(3.0))["keep"]}
    rows = CollectedRows({"mse": as_metrics(["mse"])["mse"], "both": both})
    rows.add(batch)
    assert rows.values({"mse": 1.0}) == {"a": 3.0, "b": 2.0}
    with pytest.raises(ValueError, match="'both' returned the key 'a'"):
        rows.values({"a": 1.0})


@pytest.mark.slow
def test_a_million_rows_of_two_floats_take_at_most_100_mb():
    n = 1_000_000
    data = {"x": np.ones(n, np.float32), "y": np.zeros(n, np.float32)}
    metric = collected(lambda outputs, targets: len(outputs), name="n")
    task = ff.EvalTask(lambda variables, x: x, [metric])
    evaluate, state = ff.EvalLoop(task), ff.InferenceState(np.int32(0), {}, {})
    tracemalloc.start()
    try:
        found = evaluate.measure(state, ff.ArrayStream(data["x"], data["y"], batch_size=8192))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == {"n": n}
    assert peak < 100e6
