"""What processes tell each other before they wait; between real ones in test_many_processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.data._batch import Batch
from flaxfit.distributed import _processes
from flaxfit.loop import _consistency
from flaxfit.loop._consistency import Consistency, agreed_shardings

BATCH = Batch((np.zeros((8, 2), np.float32),), (np.zeros(8, np.int32),), np.ones(8, np.float32))


@pytest.fixture
def said(monkeypatch):
    """What a process says to the others; they say the same."""
    texts = []
    monkeypatch.setattr(_consistency, "agree", lambda topic, text, seconds=None: texts.append(text))
    monkeypatch.setattr(
        _consistency, "exchange", lambda topic, value, **_: [value, value or topic[:7] == "whether"]
    )
    return texts


def of_processes(n):
    return Consistency(SimpleNamespace(n_processes=n))


def say_everything(consistency):
    consistency.state(3, {"w": jnp.ones(2)})
    consistency.data({"epoch": 1})
    consistency.program(3, BATCH)
    consistency.stepped("a program")
    consistency.checkpoint(4, lambda: {"w": jnp.ones(2)})
    consistency.end("training", 9, [])


def test_a_process_alone_says_nothing_and_stops_by_itself(said):
    consistency = of_processes(1)
    say_everything(consistency)
    assert said == []
    assert consistency.stop(True) and not consistency.stop(False)


def test_each_kind_of_thing_is_said_with_its_step(said):
    say_everything(of_processes(2))
    state, data, program, checkpoint, end = said
    assert state == "the state of step 3"
    assert data.startswith("data at ")
    assert program == "step 3 as the first with inputs/0 float32[8, 2], targets/0 int32[8]"
    assert checkpoint.startswith("a checkpoint at step 4, by programs of the sum ")
    assert end == "the end of the training data after 9"


def test_weights_of_the_user_belong_to_a_program(said):
    of_processes(2).program(0, BATCH, is_weighted=True)
    assert said[0].endswith("weights float32[8]")


def test_one_process_that_has_ended_ends_all(said):
    assert of_processes(2).stop(False)


def test_the_order_of_programs_counts_since_the_state_was_set(said):
    consistency = of_processes(2)
    for programs in ("ab", "ba", "ab"):
        consistency.state(0, {})
        for program in programs:
            consistency.stepped(program)
        consistency.checkpoint(2, dict)
    assert said[1] == said[5] != said[3]


@pytest.fixture
def errors_of_two(monkeypatch):
    """Runs a function of the index in two threads that speak to each other; their errors."""
    meet, values, own = threading.Barrier(2, timeout=60), {}, threading.local()

    def exchange(topic, value, **_):
        values[own.index] = value
        meet.wait()
        found = [values[0], values[1]]
        meet.wait()
        return found

    def error(function, index):
        own.index = index
        try:
            function(index)
        except ValueError as error:
            return str(error)

    def run(function):
        with ThreadPoolExecutor(2) as executor:
            return list(executor.map(error, [function] * 2, range(2)))

    monkeypatch.setattr(_processes, "exchange", exchange)
    monkeypatch.setattr(_consistency, "exchange", exchange)
    return run


def test_the_lines_of_programs_that_differ_are_named(errors_of_two):
    text = "multiply\nconstant {}\ncallback {}"
    shown = errors_of_two(lambda i: of_processes(2).compiled(3, text.format(i, i)))
    assert shown[0] == shown[1] and "do not agree on the program of a step" in shown[0]
    assert "1 difference, line 1 of the program from step 3 on: constant 1" in shown[0]
    shown = errors_of_two(lambda i: of_processes(2).compiled(3, "multiply\nadd"[: 8 + 4 * i]))
    assert "line 1 of the program from step 3 on: none" in shown[0]
    assert errors_of_two(lambda i: of_processes(2).compiled(3, text.format(0, i))) == [None, None]


def test_the_arrays_of_states_that_differ_are_named(errors_of_two):
    key, rate = jax.random.key(0), jnp.float32(0.1)
    states = [{"w": jnp.ones(2), "key": key, "rate": rate * (1 + i)} for i in range(2)]
    shown = errors_of_two(lambda i: of_processes(2).checkpoint(3, lambda: states[i]))
    assert shown[0] == shown[1] and "do not agree on the state" in shown[0]
    assert "1 difference, rate after step 3: " in shown[0]
    assert errors_of_two(lambda i: of_processes(2).checkpoint(3, lambda: states[0])) == [None, None]
    shown = errors_of_two(lambda i: of_processes(2).state(0, states[i]))
    assert shown[0] == shown[1] and "1 difference, rate: " in shown[0]
    more = {"w": jnp.ones(2)}, {"w": jnp.ones(2), "key": jax.random.key(1)}
    assert "1 difference, key: " in errors_of_two(lambda i: of_processes(2).state(0, more[i]))[0]
    both = {"w": jnp.ones(2)}, {"w": np.ones(2, np.float32)}
    assert errors_of_two(lambda i: of_processes(2).state(0, both[i])) == [None, None]


def test_states_that_are_about_to_be_split_are_compared_by_name(errors_of_two):
    def starting(index):
        strategy = SimpleNamespace(n_processes=2, shardings=lambda state: f"of {state.keys()}")
        state = {"w": np.full(2, index), "key": jax.random.key(0), "b": jnp.ones(2)}
        shardings = agreed_shardings(strategy)
        assert shardings is not None
        assert shardings({"b": state["b"]}) == "of dict_keys(['b'])"
        assert shardings(jax.eval_shape(lambda: state)).startswith("of")
        shardings(state)

    shown = errors_of_two(starting)
    assert shown[0] == shown[1] and "do not agree on the initial state" in shown[0]
    assert "1 difference, w: " in shown[0]
