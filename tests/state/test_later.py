"""A value that is made only if it is asked for."""

import signal
import threading

import jax
import pytest

from flaxfit.state._later import Later


def test_each_part_is_done_once_and_the_second_only_when_asked_for():
    done = []
    later = Later(lambda: done.append("begun") or (lambda: done.append("ended") or len(done)))
    assert done == []
    later.secure()
    later.secure()
    assert done == ["begun"]
    assert later.value == later.value == 2
    later.secure()
    assert done == ["begun", "ended"]


def test_a_part_that_fails_is_tried_again():
    tries = []

    def begin():
        tries.append(0)
        return {2: lambda: "made"}[len(tries)]

    later = Later(begin)
    with pytest.raises(KeyError):
        later.secure()
    assert later.value == "made"


def test_what_one_thread_takes_another_waits_for():
    asked, go_on, seen = threading.Event(), threading.Event(), []

    def begin():
        asked.set()
        assert go_on.wait(30)
        seen.append("taken")
        return lambda: "made"

    later = Later(begin)
    thread = threading.Thread(target=lambda: seen.append(later.value))
    thread.start()
    assert asked.wait(30)
    threading.Timer(0.0, go_on.set).start()
    later.secure()  # It returns when all is taken, and not before.
    assert seen[0] == "taken"
    thread.join()
    assert seen == ["taken", "made"]


def test_what_is_taken_in_a_mesh_can_be_asked_for_by_the_handler_of_a_signal():
    main, seen = threading.main_thread().ident, []

    def begin():
        signal.pthread_kill(main, signal.SIGUSR1)
        return lambda: "made"

    later = Later(begin)
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(later.value))
    try:
        with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])):
            later.secure()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == ["made"]
