import itertools
import json

import numpy as np
import pytest

from flaxfit.data import as_stream, one_pass

BATCHES = [(np.full((2, 3), i), np.full(2, i)) for i in range(5)]


def numbers(batches):
    return [int(x[0, 0]) for x, _ in batches]


def generate():
    yield from BATCHES


def test_batches_are_passed_over_once_unless_epochs_are_given_and_passes_are_counted():
    assert numbers(as_stream(BATCHES)) == [0, 1, 2, 3, 4]
    stream = as_stream(BATCHES, epochs=2)
    epochs = [(stream.epoch, int(x[0, 0])) for x, _ in stream]
    assert epochs == [(epoch, i) for epoch in range(2) for i in range(5)]
    assert stream.epoch == 2
    assert next(stream, None) is None


def test_a_callable_is_called_for_each_pass():
    calls = []

    def data():
        calls.append(len(calls))
        return generate()

    assert numbers(as_stream(data, epochs=3)) == [0, 1, 2, 3, 4] * 3
    assert calls == [0, 1, 2]


def test_a_callable_may_return_a_data_set():
    def data():
        return np.arange(10.0), np.arange(10)

    assert [len(x) for x, _ in as_stream(data, batch_size=4, epochs=2)] == [4, 4, 2, 4, 4, 2]


@pytest.mark.parametrize(
    "make", [lambda: BATCHES, generate, lambda: generate], ids=["list", "generator", "function"]
)
@pytest.mark.parametrize("n_delivered", [0, 1, 3, 5])
def test_a_position_is_reached_by_skipping_and_says_so(make, n_delivered, capsys):
    first, second = as_stream(make()), as_stream(make())
    list(itertools.islice(first, n_delivered))
    state = json.loads(json.dumps(first.get_state()))
    assert state["delivered"] == n_delivered
    second.set_state(state)
    assert numbers(second) == numbers(first)
    notice = capsys.readouterr().err
    assert notice.count("skipping") == (n_delivered > 0)
    if n_delivered > 1:
        assert f"skipping {n_delivered} batches of a" in notice


def test_a_position_in_a_later_pass_is_reached():
    first, second = as_stream(BATCHES, epochs=3), as_stream(BATCHES, epochs=3)
    list(itertools.islice(first, 7))
    second.set_state(first.get_state())
    assert second.epoch == 1
    assert numbers(second) == [2, 3, 4, 0, 1, 2, 3, 4]


def test_a_list_can_go_back_but_a_generator_cannot():
    stream = as_stream(BATCHES)
    list(itertools.islice(stream, 3))
    stream.set_state({"delivered": 1})
    assert numbers(stream) == [1, 2, 3, 4]
    stream = as_stream(generate())
    list(itertools.islice(stream, 3))
    with pytest.raises(ValueError, match="Cannot go back from batch 3 to 1 of a generator"):
        stream.set_state({"delivered": 1})


def test_a_generator_that_went_on_skips_only_what_is_missing():
    stream = as_stream(generate())
    next(stream)
    stream.set_state({"delivered": 3})
    assert numbers(stream) == [3, 4]


class Shuffled:
    """Batches in an order of a generator of its own, which moves with each pass."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.n_opened = 0

    def __len__(self):
        return len(BATCHES)

    def __iter__(self):
        self.n_opened += 1
        return iter([BATCHES[i] for i in self.rng.permutation(len(BATCHES))])


@pytest.mark.parametrize("n_delivered", [1, 3, 7])
def test_data_that_was_looked_at_is_not_opened_again_to_reach_a_position(n_delivered):
    first, second = (as_stream(Shuffled(), epochs=3) for _ in range(2))
    list(itertools.islice(first, n_delivered))
    next(second)
    second.set_state(first.get_state())
    assert numbers(second) == numbers(first)


def test_a_position_past_the_end_is_refused():
    with pytest.raises(ValueError, match="after batch 9 of a list that ends after 5"):
        as_stream(BATCHES).set_state({"delivered": 9})


@pytest.mark.parametrize("state", [{"epoch": 0, "batch": 3}, {"delivered": 1, "iterator": {}}])
def test_a_position_of_other_data_is_refused(state):
    state = {"epoch": 0, **state}
    with pytest.raises(ValueError, match="Cannot resume in a list"):
        as_stream(BATCHES).set_state(state)


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()], ids=repr)
def test_a_generator_that_raised_is_not_finished_but_broken(error):
    def broken():
        yield BATCHES[0]
        raise error

    stream = as_stream(broken())
    next(stream)
    with pytest.raises(type(error)):
        next(stream)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"after it raised {type(error).__name__}") as then:
            next(stream)
        assert then.value.__cause__ is error and str(error) in str(then.value)


def test_an_iterator_that_recovers_goes_on():
    results = iter([BATCHES[0], TimeoutError("try again"), BATCHES[2]])

    class Flaky:
        def __iter__(self):
            return self

        def __next__(self):
            result = next(results)
            if isinstance(result, Exception):
                raise result
            return result

    stream = as_stream(Flaky())
    next(stream)
    with pytest.raises(TimeoutError):
        next(stream)
    assert numbers(stream) == [2]
    assert stream.get_state()["delivered"] == 2


def test_one_pass_starts_anew_over_what_can_be_passed_over_again():
    for data in (BATCHES, generate, as_stream(BATCHES)):
        assert numbers(one_pass(data)) == numbers(one_pass(data)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrap", [lambda data: data, as_stream])
def test_a_second_pass_over_a_generator_is_an_error(wrap):
    data = wrap(generate())
    assert numbers(one_pass(data)) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="gave no batches: it is empty, or an iterator that was"):
        list(one_pass(data))


def test_one_pass_takes_what_is_left_of_a_generator():
    data = generate()
    next(data)
    assert numbers(one_pass(data)) == [1, 2, 3, 4]


def test_several_epochs_of_a_generator_are_an_error():
    stream = as_stream(generate(), epochs=2)
    with pytest.raises(ValueError, match="pass a list, a loader or a callable"):
        list(stream)


def test_the_length_is_known_where_the_data_knows_it():
    assert len(as_stream(BATCHES)) == 5
    with pytest.raises(TypeError, match="A stream of generator does not know its length"):
        len(as_stream(generate()))


def state_after(data, n):
    stream = as_stream(data, epochs=None)
    list(itertools.islice(stream, n))
    return json.loads(json.dumps(stream.get_state()))


def test_a_position_describes_the_data_it_belongs_to():
    assert state_after(BATCHES, 2)["data"] == {
        "type": "list",
        "n_batches": 5,
        "first_batch": ["int64[2, :]", "int64[2]"],
    }
    assert "first_batch" not in state_after(BATCHES, 0)["data"]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: BATCHES[:4], "'n_batches': 4"),
        (lambda: [(x[:1], y[:1]) for x, y in BATCHES], r"'int64\[1, :\]', 'int64\[1\]'"),
        (lambda: [(x, y.astype(np.int32)) for x, y in BATCHES], r"'int32\[2\]'"),
        (lambda: [x for x, _ in BATCHES], r"\['int64\[2, :\]'\]"),
        (generate, "'type': 'generator'"),
        (lambda: generate, "'type': 'function'"),
    ],
    ids=["length", "batch size", "dtype", "parts", "generator", "callable"],
)
def test_a_position_in_changed_data_is_refused_with_both_descriptions(other, told):
    with pytest.raises(ValueError, match=rf"saved: .*'n_batches': 5.*\n  here: .*{told}"):
        as_stream(other()).set_state(state_after(BATCHES, 3))


def test_the_length_of_rows_may_differ_from_order_to_order():
    longer = [(np.full((2, 7), i), y) for i, (_, y) in enumerate(BATCHES)]
    stream = as_stream(longer)
    stream.set_state(state_after(BATCHES, 3))
    assert numbers(stream) == [3, 4]


def test_a_position_saved_without_a_description_is_taken():
    stream = as_stream(BATCHES)
    stream.set_state({"delivered": 3})
    assert numbers(stream) == [3, 4]
    assert stream.get_state()["data"]["first_batch"]
