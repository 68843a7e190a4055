import itertools
import json

import numpy as np
import pytest
from sklearn.datasets import load_digits

from flaxfit.data import ArrayStream, _arrays, one_pass, prefetch

X, Y = load_digits(return_X_y=True)


def rows(batches):
    return np.concatenate([x for x, *_ in batches])


@pytest.mark.parametrize(
    ("n", "drop_remainder"), [(n, False) for n in range(1, 14)] + [(n, True) for n in range(4, 14)]
)
def test_a_pass_holds_every_row_once_in_order(n, drop_remainder):
    x = np.arange(n, dtype=np.float32)
    stream = ArrayStream(x, batch_size=4, epochs=1, drop_remainder=drop_remainder)
    batches = list(stream)
    kept = n // 4 * 4 if drop_remainder else n
    np.testing.assert_array_equal(rows(batches), x[:kept])
    assert len(batches) == len(stream)
    assert all(len(x) == 4 for x, _ in batches[:-1])


def test_shuffled_orders_are_those_of_the_seed_and_the_epoch():
    n = 21
    stream = ArrayStream(np.arange(n), batch_size=4, shuffle=True, seed=7, epochs=3)
    expected = [np.random.default_rng((7, epoch)).permutation(n) for epoch in range(3)]
    np.testing.assert_array_equal(rows(stream), np.concatenate(expected))


def test_all_parts_of_a_shuffled_batch_belong_together():
    weights = np.arange(len(Y)) / 10
    for x, y, w in ArrayStream(X, Y, weights, batch_size=100, shuffle=True, epochs=1):
        at = np.rint(w * 10).astype(int)
        np.testing.assert_array_equal(x, X[at])
        np.testing.assert_array_equal(y, Y[at])


@pytest.fixture
def as_process(monkeypatch):
    """Makes this process one of several."""

    def become(index, n=2):
        monkeypatch.setattr(_arrays, "process_count", lambda: n)
        monkeypatch.setattr(_arrays, "process_index", lambda: index)

    return become


@pytest.mark.parametrize("wrap", [lambda stream: stream, prefetch], ids=["plain", "prefetched"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_process_takes_its_slice_of_every_batch(as_process, wrap, shuffle):
    stream = ArrayStream(np.arange(12), batch_size=4, shuffle=shuffle, epochs=2)
    whole = [x.tolist() for x, _ in stream]
    parts = []
    for index in (0, 1):
        as_process(index)
        stream.set_state({**stream.get_state(), "epoch": 0, "batch": 0})
        parts.append([x.tolist() for x, _ in wrap(stream)])
        assert not wrap(stream).shared
    assert [first + second for first, second in zip(*parts, strict=True)] == whole


def test_a_batch_that_does_not_divide_among_processes_is_refused(as_process):
    as_process(0, n=4)
    stream = ArrayStream(np.arange(6), batch_size=4)
    assert next(stream)[0].tolist() == [0]
    with pytest.raises(ValueError, match="Cannot divide a batch of 2 examples .* 4 processes"):
        next(stream)


def test_small_data_is_resident_unless_it_is_said():
    arrays = [ArrayStream(X, batch_size=2, resident=given) for given in ("auto", True, False)]
    assert [stream.resident for stream in arrays] == [True, True, False]
    with pytest.raises(ValueError, match="True, False or 'auto', got 'host'"):
        ArrayStream(X, resident="host")


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("resident", [False, True])
def test_rows_and_examples_may_be_taken_in_turn_and_rows_cannot_spoil_later_ones(shuffle, resident):
    stream = ArrayStream(np.arange(8), batch_size=2, shuffle=shuffle, resident=resident)
    other = ArrayStream(np.arange(8), batch_size=2, shuffle=shuffle)
    for _ in range(6):
        rows = stream.next_rows()
        np.testing.assert_array_equal(stream.pick(rows)[0], next(other)[0])
        if rows.flags.writeable:
            rows[:] = 0
        np.testing.assert_array_equal(next(stream)[0], next(other)[0])


@pytest.mark.parametrize("shuffle", [False, True])
def test_several_batches_are_those_taken_one_by_one_to_the_end_of_the_epoch(shuffle):
    several, single = (
        ArrayStream(np.arange(9), batch_size=2, shuffle=shuffle, epochs=2) for _ in range(2)
    )
    for n, n_left in [(1, 1), (3, 3), (4, 1), (9, 5)]:
        found = several.next_rows_of(n)
        assert len(found) == n_left
        for rows, position in found:
            np.testing.assert_array_equal(rows, single.next_rows())
            assert position == single.get_state()
        assert several.get_state() == single.get_state()
    with pytest.raises(StopIteration):
        several.next_rows_of(2)


def test_an_epoch_that_was_ordered_ahead_is_the_same():
    ahead, plain = (
        ArrayStream(np.arange(9), batch_size=3, shuffle=True, epochs=2) for _ in range(2)
    )
    start = ahead.get_state()
    for _ in range(6):
        ahead.order_ahead()
        assert ahead.get_state() == plain.get_state()
        np.testing.assert_array_equal(ahead.next_rows(), plain.next_rows())
    ahead.order_ahead()  # There is no further epoch.
    with pytest.raises(StopIteration):
        ahead.next_rows()
    for stream in ahead, plain:
        stream.set_state(start)
    np.testing.assert_array_equal(ahead.next_rows(), plain.next_rows())


def test_nested_inputs_and_targets_keep_their_structure():
    x = {"image": X, "size": (Y, Y + 1)}
    batch_x, batch_y = next(ArrayStream(x, (Y, Y + 2), batch_size=5))
    np.testing.assert_array_equal(batch_x["size"][1], Y[:5] + 1)
    np.testing.assert_array_equal(batch_y[1], Y[:5] + 2)
    assert batch_x["image"].shape == (5, 64)


def test_the_stream_repeats_for_ever_and_counts_its_passes():
    stream = ArrayStream(X, Y, batch_size=600)
    epochs = [stream.epoch for _ in itertools.islice(stream, 7)]
    assert epochs == [0, 0, 1, 1, 1, 2, 2]
    stream = ArrayStream(X, epochs=2, batch_size=1000)
    assert [len(list(stream)) for _ in range(2)] == [4, 0]


def test_one_pass_is_a_fresh_epoch_in_stored_order_over_the_same_arrays():
    stream = ArrayStream(X, Y, batch_size=100, shuffle=True)
    next(stream)
    position = stream.get_state()
    for one in stream.one_epoch(), one_pass(stream), one_pass(X, batch_size=100):
        np.testing.assert_array_equal(rows(one), X.astype(np.float32))
        assert one.epoch == 1
    assert stream.get_state() == position


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("n_delivered", [0, 1, 3, 4, 10])
def test_a_position_survives_json_and_leads_to_the_same_batches(shuffle, n_delivered):
    def stream():
        return ArrayStream(X[:30], Y[:30], batch_size=8, shuffle=shuffle, seed=3, epochs=4)

    first, second = stream(), stream()
    list(itertools.islice(first, n_delivered))
    list(itertools.islice(second, 6))
    second.set_state(json.loads(json.dumps(first.get_state())))
    rest, again = list(first), list(second)
    assert len(rest) == len(again) == 16 - n_delivered
    np.testing.assert_array_equal(rows(rest or [(X,)]), rows(again or [(X,)]))


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 5}, {"seed": 1}, {"shuffle": True}, {"drop_remainder": True}, {"n": 20}],
    ids=lambda change: next(iter(change)),
)
def test_a_position_in_changed_data_is_refused_with_both_descriptions(change):
    def stream(n=21, **options):
        return ArrayStream(np.arange(n), **{"batch_size": 4, **options})

    with pytest.raises(ValueError, match="(?s)saved: .*'length': 21.*here: .*'length'") as error:
        stream(**change).set_state(stream().get_state())
    (name, value) = next(iter(change.items()))
    assert f"{'length' if name == 'n' else name!s}': {value}" in str(error.value)


def test_wide_arrays_become_narrow_and_narrow_ones_are_not_copied():
    wide, narrow = np.arange(6.0), np.arange(6, dtype=np.float16)
    x, y = next(ArrayStream((wide, narrow), np.arange(6)))
    assert (x[0].dtype, x[1].dtype, y.dtype) == (np.float32, np.float16, np.int32)
    assert np.shares_memory(x[1], narrow)


def test_batches_of_arrays_that_are_not_contiguous_are_right():
    x = np.asfortranarray(X[:, ::2].astype(np.float32))
    stream = ArrayStream(x, batch_size=50, shuffle=True, epochs=1)
    np.testing.assert_array_equal(
        rows(stream), x[np.random.default_rng((0, 0)).permutation(len(x))]
    )


def test_big_endian_arrays_are_brought_into_native_order():
    x, _ = next(ArrayStream(np.arange(4, dtype=">f4"), shuffle=True))
    assert x.dtype == np.dtype("<f4")
    assert sorted(x) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X[:1437], Y[:360]), {}, ValueError, "x has 1,437 rows but y has 360."),
        (({"a": X, "b": X[:3]},), {}, ValueError, "has 1,797 rows but x['b'] has 3."),
        ((X, Y, Y[:9]), {}, ValueError, "x has 1,797 rows but w has 9."),
        ((X[:0],), {}, ValueError, "no examples"),
        (((),), {}, ValueError, "x is empty"),
        ((np.float32(3),), {}, TypeError, "x must be an array, got float32"),
        ((np.array(3.0),), {}, TypeError, "got the scalar array(3.)"),
        ((np.array(["a", "b"]),), {}, TypeError, "dtype <U1: encode it as numbers"),
        ((np.array([2**40, 0]),), {}, ValueError, "0 to 1099511627776, which do not fit int32"),
        ((X,), {"batch_size": 0}, ValueError, "batch_size must be 1 or more, got 0."),
        ((X,), {"batch_size": 2.5}, TypeError, "batch_size must be an integer, got 2.5."),
        ((X,), {"batch_size": True}, TypeError, "batch_size must be an integer, got True."),
        ((X,), {"epochs": -1}, ValueError, "epochs must be 1 or more, got -1."),
        ((X,), {"seed": -1}, ValueError, "seed must be 0 or more, got -1."),
        (
            (X[:9],),
            {"batch_size": 10, "drop_remainder": True},
            ValueError,
            "9 rows do not fill a batch of 10, and drop_remainder=True drops them",
        ),
    ],
)
def test_wrong_data_is_refused_at_construction(arguments, options, error, message):
    with pytest.raises(error) as raised:
        ArrayStream(*arguments, **options)
    assert message in str(raised.value)


def test_the_rows_of_stored_order_take_no_memory(memory_within):
    n = 200_000_000  # Their numbers would take 800 MB.
    stream = ArrayStream(np.broadcast_to(np.zeros((), np.int8), n), batch_size=3, resident=False)
    with memory_within(100_000_000):
        assert stream.next_rows().tolist() == [0, 1, 2]
        assert stream.next_rows().tolist() == [3, 4, 5]
