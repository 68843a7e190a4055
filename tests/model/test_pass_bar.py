"""PassBar: the bar and the line of `evaluate` and `predict`."""

import io
import itertools
import re
import sys

import pytest

from flaxfit.model._pass_bar import PassBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run(monkeypatch):
    """Makes a pass of n batches, of a second each; returns what a terminal showed of it."""

    def run(total, verbose, n=4):
        terminal, seconds = Terminal(), itertools.count()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", terminal)
        with PassBar("Evaluate", total, verbose, clock=lambda: next(seconds)) as bar:
            for i in range(1, n + 1):
                bar(i)
            bar.finish({"loss": 0.25})
        return [part.strip() for part in re.split(r"[\r\n]", terminal.getvalue()) if part.strip()]

    return run


@pytest.mark.parametrize(("total", "place"), [(None, "4 steps"), (4, "4/4")])
def test_the_bar_is_redrawn_whether_the_number_of_batches_is_known_or_not(run, total, place):
    shown = run(total, "auto")
    assert len(shown) == 4
    assert place in shown[-1]


def test_1_and_2_ask_for_a_line_at_the_end(run):
    for verbose in (1, 2):
        assert re.fullmatch("Evaluate  4 steps  .*s  loss 0.2500", run(4, verbose)[-1])
    assert run(4, 0) == []


def test_data_that_ends_early_is_reported(run):
    assert run(4, 2, n=2)[0].endswith("the data ended after 2 of 4 steps")


def test_another_verbosity_is_refused():
    with pytest.raises(ValueError, match="verbose must be 'auto', 0, 1 or 2, got 3"):
        PassBar("Evaluate", None, 3)
