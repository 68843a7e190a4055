"""The live bar of `ProgressBar` on a terminal and in a notebook."""

import contextlib
import io
import os
import pty
import re
import sys
import termios
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from loops import make_weight_loop
from tqdm import tqdm

from flaxfit.callbacks import ProgressBar


def frames(text):
    """What a terminal showed on its last line, one after the other."""
    return [part.strip() for part in re.split(r"[\r\n]", text) if part.strip()]


@pytest.fixture
def attached(make_loop, terminal, clock):
    """Makes a bar on the terminal, and its loop, in which steps take a time by the clock."""
    bars = []

    def make(n_steps_per_checkpoint=4, n_steps=None, **options):
        bars.append(ProgressBar(**{"file": terminal, "clock": clock, **options}))
        loop = make_loop(n_steps=n_steps, n_steps_per_checkpoint=n_steps_per_checkpoint)
        bars[-1].attach(loop)

        def take(n, seconds=1):
            for _ in range(n):
                clock.now += seconds
                loop.dispatch()

        return bars[-1], loop, take

    yield make
    for bar in bars:
        bar.close()


def test_metrics_are_read_and_drawn_at_most_every_half_second_without_a_thread(attached):
    threads = threading.enumerate()
    _, loop, take = attached(1000, unit="epoch", total=1)
    take(1000, 0.01)
    assert 18 <= loop.n_reads <= 20
    assert threading.enumerate() == threads


def test_the_live_bar_shows_position_speed_time_left_and_metrics(attached, terminal):
    _, loop, take = attached(40, unit="epoch", total=10)
    loop.metrics = {"loss": 0.429, "{odd}": 0.8897}
    take(31, 0.1)
    last = frames(terminal.getvalue())[-1]
    assert last.startswith("Epoch  1/10  ━")
    assert "─" in last
    assert last.endswith("30/40 · 10 steps/s · ETA 1s · loss 0.4290  {odd} 0.8897")


def test_neither_compilation_nor_evaluation_counts_in_speed_and_time_left(
    attached, checkpoint_at, terminal, clock
):
    bar, loop, take = attached(10, n_steps=60, unit="step")
    clock.now += 300  # compilation, before the first step
    for _ in range(2):
        take(1, 0)
        take(9, 0.125)
        clock.now += 60.125  # evaluation
        bar(checkpoint_at(loop.step, loss=0.5))
    take(1)
    speeds = re.findall(r"(\S+) steps/s · ETA (\S+) ", terminal.getvalue())
    assert {speed for speed, _ in speeds} == {"8"}
    assert speeds[-1] == ("8", "5s")


def test_a_line_takes_the_bar_away_until_the_next_is_due(attached, checkpoint_at, terminal):
    bar, loop, take = attached(unit="epoch", total=99)
    take(1)
    bar(checkpoint_at(loop.step, loss=0.5))
    before = len(terminal.getvalue())
    assert terminal.getvalue().endswith("0.5000\n")
    take(1, 0.25)
    assert len(terminal.getvalue()) == before
    take(1, 0.25)
    assert frames(terminal.getvalue())[-1].startswith("Epoch  2/99")


def test_a_bar_is_as_long_whatever_stands_beside_it(attached, terminal):
    _, _, take = attached(2000, unit="epoch", total=10)
    for seconds in (0.6, 0.7, 100, 0.001, 0.5):
        take(1, seconds)
    lengths = {len(re.sub("[^─╸━]", "", frame)) for frame in frames(terminal.getvalue())}
    assert lengths - {0} == {30}


def test_lines_stay_above_other_bars_too(attached, checkpoint_at, terminal):
    bar, _, take = attached(2, n_steps=1000, total=1000)
    take(2)
    bar(checkpoint_at(2, loss=0.5))
    before = len(terminal.getvalue())
    with tqdm(total=3, desc="inner", file=terminal, leave=False) as inner:
        bar(checkpoint_at(4, loss=0.25))
        shown = terminal.getvalue()[before:]
        inner.update()
    assert shown.index("0.2500\n") < shown.rindex("inner")


def test_lines_go_where_standard_error_is_and_the_bar_stays_where_it_was_drawn(
    attached, checkpoint_at, terminal, monkeypatch
):
    monkeypatch.setattr(sys, "stderr", terminal)
    bar, _, take = attached(2, n_steps=1000, total=1000, file=None)
    take(2)
    bar(checkpoint_at(2, loss=0.5))
    other = io.StringIO()
    monkeypatch.setattr(sys, "stderr", other)
    bar(checkpoint_at(4, loss=0.25))
    assert other.getvalue() == "    4/1,000     0 ms   0.2500\n"


def test_an_epoch_of_unknown_length_has_no_bar_until_one_has_passed(
    attached, checkpoint_at, terminal
):
    bar, _, take = attached(2**31 - 1, unit="epoch", total=2)
    take(2)
    assert frames(terminal.getvalue())[-1].startswith("Epoch 1/2  2 steps · ")
    bar(checkpoint_at(1, loss=0.5, n_completed_steps=8))
    take(1)
    assert "  2/8 · 1 steps/s · " in frames(terminal.getvalue())[-1]


def test_live_can_be_switched_off_on_a_terminal_and_a_dumb_one_has_no_bar(attached, monkeypatch):
    _, loop, _ = attached(live=False)
    assert loop.on.after_dispatch == []
    monkeypatch.setenv("TERM", "dumb")
    _, loop, _ = attached()
    assert loop.on.after_dispatch == []


def test_a_stream_of_few_characters_is_written_to_without_failure(attached, checkpoint_at):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    bar, _, take = attached(n_steps=4, file=file, live=True)
    take(3)
    bar(checkpoint_at(3, loss=0.5))
    bar.close()
    file.seek(0)
    assert "0.5000\nstopped after 3 of 4 steps in 0 ms\nloss 0.5000\n" in file.read()


@pytest.fixture
def cell(monkeypatch):
    """What the output of a notebook's cell showed, one after the other."""
    shown = []

    def display(data, *, raw, display_id):
        assert raw and display_id
        shown.append(data)
        return SimpleNamespace(update=lambda data, *, raw: shown.append(data))

    shell = SimpleNamespace(config={"IPKernelApp": {}})
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return shown


def test_in_a_notebook_the_bar_is_redrawn_in_place_and_leaves_nothing(
    attached, checkpoint_at, cell, capsys
):
    bar, _, take = attached(unit="epoch", total=2, file=None)
    for step in (4, 8):
        take(4)
        bar(checkpoint_at(step, loss=0.5, elapsed_time=4.0))
    bar.close()
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == (
        "epoch     time     loss\n  1/2     4.0s   0.5000\n  2/2     4.0s   0.5000\n"
        "done in 8.0s · loss 0.5000\n"
    )
    bars = [data["text/plain"] for data in cell if "text/html" not in data]
    assert bars[0].startswith("Epoch 1/2  ━")
    assert bars[-1].endswith("4/4 · 1 steps/s · ETA 0s · loss 0.5000")
    assert cell[-1] == {"text/plain": "", "text/html": ""}


def everything_from(parent):
    """What was written to a terminal whose other end is closed."""
    parts = []
    with contextlib.suppress(OSError):  # Linux's word for the end.
        while part := os.read(parent, 4096):
            parts.append(part)
    os.close(parent)
    return b"".join(parts).decode()


def test_a_real_loop_on_a_real_terminal_shows_a_bar_and_leaves_lines(clock):
    def data():
        x = np.ones((4, 1), np.float32)
        for _ in range(6):
            clock.now += 1
            yield x, x

    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 100))
    options = {"n_steps": 6, "n_steps_per_checkpoint": 3, "first_checkpoint": 3, "grad_norm": False}
    with os.fdopen(child, "w", encoding="utf-8") as terminal:
        bar = ProgressBar(unit="epoch", total=2, file=terminal, clock=clock)
        losses = [checkpoint.loss for checkpoint in make_weight_loop(bar, data(), **options)]
    text = everything_from(parent)
    assert "2/3 · 1 steps/s · ETA 1s · loss" in text
    assert "Epoch 2/2  ━" in text
    lines = [line.rsplit("\r", 1)[-1] for line in text.split("\r\n")]
    header, *rows, end, rest = [re.sub("\x1b\\[[0-9]*m", "", line).strip() for line in lines]
    assert header == "epoch     time     loss"
    assert [row.split("  ")[-1].strip() for row in rows] == [f"{loss:.4f}" for loss in losses]
    assert end.startswith("done in ") and not rest
