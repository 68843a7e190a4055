"""What processes tell each other, where there is only one; the rest is in test_many_processes."""

import pytest

from flaxfit.distributed import _processes


def test_a_process_alone_is_the_main_one_of_one():
    assert (_processes.process_index(), _processes.process_count()) == (0, 1)
    assert _processes.is_main()


def test_a_process_alone_hears_itself_and_agrees_with_itself():
    assert _processes.exchange("topic", [1, "two"]) == [[1, "two"]]
    _processes.agree("topic", {"a": 1})


def test_what_fails_on_the_only_process_fails_as_it_is():
    def fails():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        _processes.from_main("topic", fails)


def test_a_process_alone_has_no_failure_to_hear_of():
    assert _processes.reported_failure() is None
