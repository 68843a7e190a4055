"""What processes tell each other, where there is only one; the rest is in test_many_processes."""

import pytest

from flaxfit.distributed import _processes


def test_a_process_alone_hears_itself_and_agrees_with_itself():
    assert _processes.exchange("topic", [1, "two"]) == [[1, "two"]]
    _processes.agree("topic", {"a": 1})
    assert _processes.reported_failure() is None


def test_what_fails_on_the_only_process_fails_as_it_is():
    def fails():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        _processes.from_main("topic", fails)
