"""SharedStream: batches that all processes are given; here two of them, one after the other."""

import gc
import json

import numpy as np
import pytest

from flaxfit.data import ArrayStream, as_stream, prefetch
from flaxfit.data import _shared as shared

X = np.arange(20, dtype=np.float32).reshape(10, 2)


def batches():
    """Four, four and two examples, with targets."""
    return [(X[i : i + 4], X[i : i + 4, 0]) for i in range(0, 10, 4)]


@pytest.fixture
def as_process(monkeypatch):
    """Makes this process one of several, and tells what it says to the others."""

    def become(index, n=2, others=None):
        said = []

        def agree(topic, value, *, seconds):
            said.append((topic, value))
            if others is not None and value not in others:
                raise ValueError(f"The processes do not agree on {topic}.")

        for module in (shared, "flaxfit.data._arrays"):
            monkeypatch.setattr(*_path(module, "process_count"), lambda: n)
        monkeypatch.setattr(shared, "process_index", lambda: index)
        monkeypatch.setattr(shared, "agree", agree)
        return said

    return become


def _path(module, name):
    return (f"{module}.{name}",) if isinstance(module, str) else (module, name)


def inputs(items):
    return [x.tolist() for x, _ in items]


def test_each_process_takes_its_slice_of_each_batch_as_of_arrays(as_process):
    arrays = ArrayStream(X[:8], X[:8, 0], batch_size=4, epochs=1)
    parts = []
    for index in (0, 1):
        as_process(index)
        parts.append(inputs(as_stream(batches()[:2], shared=True)))
        assert parts[-1] == inputs(arrays.one_epoch())
    joined = [first + second for first, second in zip(*parts, strict=True)]
    assert joined == inputs(batches()[:2])


def test_a_loop_picks_rows_of_any_batch_that_it_still_holds(as_process):
    as_process(1)
    stream = as_stream(batches(), shared=True)
    first, second, last = (stream.next_rows() for _ in range(3))
    assert [len(rows) for rows in (first, second, last)] == [4, 4, 2]
    x, y = stream.pick(second[2:])
    np.testing.assert_array_equal(x, X[6:8])
    np.testing.assert_array_equal(y, X[6:8, 0])
    # Padded, as a loop does it: the first row is repeated.
    np.testing.assert_array_equal(stream.pick(last[[0, 1, 0, 0]])[0], X[[8, 9, 8, 8]])
    np.testing.assert_array_equal(stream.pick(first)[0], X[:4])


def test_a_batch_is_kept_no_longer_than_its_rows():
    stream = as_stream(batches(), shared=True)
    first, second = stream.next_rows(), stream.next_rows()
    assert len(stream._kept) == 2
    del first
    gc.collect()
    assert len(stream._kept) == 1
    np.testing.assert_array_equal(stream.pick(second)[0], X[4:8])


def test_the_position_is_the_same_in_any_number_of_processes(as_process):
    as_process(0)
    two = as_stream(batches(), shared=True)
    two.next_rows()
    state = json.loads(json.dumps(two.get_state()))
    as_process(1)
    other = as_stream(batches(), shared=True)
    next(other)
    assert other.get_state() == state

    as_process(0, n=1)
    one = as_stream(batches(), shared=True)
    one.set_state(state)
    assert inputs([next(one)]) == inputs(batches()[1:2])

    as_process(1)
    other.set_state(one.get_state())
    np.testing.assert_array_equal(other.pick(other.next_rows())[0], X[8:])


def test_a_batch_that_cannot_be_parted_is_skipped_but_not_given(as_process):
    as_process(0, n=4)
    stream = as_stream(batches() * 2, shared=True)
    stream.set_state({"delivered": 3})
    assert inputs([next(stream)]) == [X[:1].tolist()]
    stream.set_state({"delivered": 2})
    with pytest.raises(ValueError, match="Cannot part a batch of 2 examples .* 4 processes"):
        next(stream)


def test_a_prefetched_stream_gives_its_own_part_too(as_process):
    as_process(1)
    assert inputs(prefetch(as_stream(batches(), shared=True))) == [
        X[2:4].tolist(),
        X[6:8].tolist(),
        X[9:].tolist(),
    ]


def test_the_first_batch_is_compared_once_in_each_pass_that_is_opened_anew(as_process):
    said = as_process(0)
    stream = as_stream(batches(), shared=True)
    list(stream)
    (topic, text), *more = said
    assert topic == "what comes next" and not more
    assert "float32[4, 2], float32[4] and the checksum" in text
    list(stream.one_epoch())
    assert said == [(topic, text)] * 2
    alone = as_process(0, n=1)
    list(as_stream(batches(), shared=True))
    assert not alone


def test_processes_that_were_given_other_batches_are_told_what_to_say(as_process):
    as_process(0, others=["another checksum"])
    with pytest.raises(ValueError, match=r"do not agree .*\n.*as_stream\(data, shared=False\)"):
        as_stream(batches(), shared=True).next_rows()


def test_other_batches_are_shared_only_if_that_is_said(as_process):
    as_process(1)
    assert inputs(as_stream(batches())) == inputs(batches())
    assert not hasattr(as_stream(batches()), "next_rows")
