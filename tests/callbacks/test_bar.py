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

import jax
import numpy as np
import optax
import pytest
from tqdm import tqdm

from flaxfit import TrainLoop, TrainTask
from flaxfit.callbacks import ProgressBar


def frames(text):
    """What a terminal showed on its last line, one after the other."""
    return [part.strip() for part in re.split(r"[\r\n]", text) if part.strip()]


def test_metrics_are_read_and_drawn_at_most_every_half_second(make_loop, terminal, clock):
    bar = ProgressBar(unit="epoch", total=1, file=terminal, clock=clock)
    loop = make_loop(n_steps_per_checkpoint=1000)
    bar.attach(loop)
    for _ in range(1000):
        clock.now += 0.01
        loop.dispatch()
    assert 18 <= loop.n_reads <= 20
    bar.close()


def test_the_live_bar_shows_position_speed_time_left_and_metrics(make_loop, terminal, clock):
    bar = ProgressBar(unit="epoch", total=10, file=terminal, clock=clock)
    loop = make_loop(n_steps_per_checkpoint=40)
    loop.metrics = {"loss": 0.429, "{odd}": 0.8897}
    bar.attach(loop)
    for _ in range(31):
        clock.now += 0.1
        loop.dispatch()
    last = frames(terminal.getvalue())[-1]
    assert last.startswith("Epoch  1/10  ━")
    assert "─" in last
    assert last.endswith("30/40 · 10 steps/s · ETA 1s · loss 0.4290  {odd} 0.8897")
    bar.close()


def test_neither_compilation_nor_evaluation_counts_in_speed_and_time_left(
    make_loop, checkpoint_at, terminal, clock
):
    bar = ProgressBar(unit="step", file=terminal, clock=clock)
    loop = make_loop(n_steps=60, n_steps_per_checkpoint=10)
    bar.attach(loop)
    clock.now += 300  # compilation, before the first step
    for _ in range(20):
        loop.dispatch()
        clock.now += 0.125
        if loop.step % 10 == 0:
            clock.now += 60  # evaluation
            bar(checkpoint_at(loop.step, loss=0.5))
    clock.now += 1
    loop.dispatch()
    speeds = re.findall(r"(\S+) steps/s · ETA (\S+) ", terminal.getvalue())
    assert {speed for speed, _ in speeds} == {"8"}
    assert speeds[-1] == ("8", "5s")
    bar.close()


def show_two_epochs(bar, loop, checkpoint_at, clock):
    bar.attach(loop)
    for _ in range(2):
        for _ in range(4):
            clock.now += 1
            loop.dispatch()
        bar(checkpoint_at(loop.step, loss=0.5, elapsed_time=4.0))
    bar.close()


def test_a_line_takes_the_bar_away_until_the_next_is_due(make_loop, checkpoint_at, terminal, clock):
    bar = ProgressBar(unit="epoch", total=99, file=terminal, clock=clock)
    loop = make_loop(n_steps_per_checkpoint=4)
    bar.attach(loop)
    clock.now += 1
    loop.dispatch()
    bar(checkpoint_at(loop.step, loss=0.5))
    before = len(terminal.getvalue())
    assert terminal.getvalue().endswith("0.5000\n")
    clock.now += 0.25
    loop.dispatch()
    assert len(terminal.getvalue()) == before
    clock.now += 0.25
    loop.dispatch()
    assert frames(terminal.getvalue())[-1].startswith("Epoch  2/99")
    bar.close()


def test_a_bar_is_as_long_whatever_stands_beside_it(make_loop, terminal, clock):
    bar = ProgressBar(unit="epoch", total=10, file=terminal, clock=clock)
    loop = make_loop(n_steps_per_checkpoint=2000)
    bar.attach(loop)
    for seconds in (0.6, 0.7, 100, 0.001, 0.5):
        clock.now += seconds
        loop.dispatch()
    lengths = {len(re.sub("[^─╸━]", "", frame)) for frame in frames(terminal.getvalue())}
    assert lengths - {0} == {30}
    bar.close()


def test_finished_lines_stay_above_the_bar_and_close_takes_it_away(
    make_loop, checkpoint_at, terminal, clock
):
    bar = ProgressBar(unit="epoch", total=2, file=terminal, clock=clock)
    loop = make_loop(n_steps_per_checkpoint=4)
    show_two_epochs(bar, loop, checkpoint_at, clock)
    lines = terminal.getvalue().split("\n")
    shown = [line.rsplit("\r", 1)[-1].strip() for line in lines]
    assert shown == [
        "epoch     time     loss",
        "1/2     4.0s   0.5000",
        "2/2     4.0s   0.5000",
        "done in 8.0s · loss 0.5000",
        "",
    ]


def test_lines_stay_above_other_bars_too(make_loop, checkpoint_at, terminal, clock):
    bar = ProgressBar(total=1000, file=terminal, clock=clock)
    loop = make_loop(n_steps=1000, n_steps_per_checkpoint=2)
    bar.attach(loop)
    for _ in range(2):
        clock.now += 1
        loop.dispatch()
    bar(checkpoint_at(2, loss=0.5))
    before = len(terminal.getvalue())
    with tqdm(total=3, desc="inner", file=terminal, leave=False) as inner:
        bar(checkpoint_at(4, loss=0.25))
        shown = terminal.getvalue()[before:]
        inner.update()
    assert shown.index("0.2500\n") < shown.rindex("inner")
    bar.close()


def drawn(bar, loop, checkpoint_at, clock):
    """Has a bar be drawn, and be the same since."""
    bar.attach(loop)
    for _ in range(2):
        clock.now += 1
        loop.dispatch()
    bar(checkpoint_at(2, loss=0.5))


def test_lines_go_where_standard_error_is_and_the_bar_stays_where_it_was_drawn(
    make_loop, checkpoint_at, terminal, clock, monkeypatch
):
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = ProgressBar(total=1000, clock=clock)
    drawn(bar, make_loop(n_steps=1000, n_steps_per_checkpoint=2), checkpoint_at, clock)
    other = io.StringIO()
    monkeypatch.setattr(sys, "stderr", other)
    bar(checkpoint_at(4, loss=0.25))
    assert other.getvalue() == "    4/1,000     0 ms   0.2500\n"
    bar.close()


def test_an_epoch_of_unknown_length_has_no_bar_until_one_has_passed(
    make_loop, checkpoint_at, terminal, clock
):
    bar = ProgressBar(unit="epoch", total=2, file=terminal, clock=clock)
    loop = make_loop(n_steps_per_checkpoint=2**31 - 1)
    bar.attach(loop)
    for _ in range(2):
        clock.now += 1
        loop.dispatch()
    assert frames(terminal.getvalue())[-1].startswith("Epoch 1/2  2 steps · ")
    bar(checkpoint_at(1, loss=0.5, n_completed_steps=8))
    clock.now += 1
    loop.dispatch()
    assert "  2/8 · 1 steps/s · " in frames(terminal.getvalue())[-1]
    bar.close()


def test_live_can_be_switched_off_on_a_terminal_and_a_dumb_one_has_no_bar(
    make_loop, terminal, monkeypatch
):
    loop = make_loop()
    ProgressBar(file=terminal, live=False).attach(loop)
    monkeypatch.setenv("TERM", "dumb")
    ProgressBar(file=terminal).attach(loop)
    assert loop.on.after_dispatch == []


def test_a_stream_of_few_characters_is_written_to_without_failure(make_loop, checkpoint_at, clock):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    bar, loop = ProgressBar(file=file, live=True, clock=clock), make_loop(n_steps=4)
    bar.attach(loop)
    for _ in range(3):
        clock.now += 1
        loop.dispatch()
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
    make_loop, checkpoint_at, clock, cell, capsys
):
    bar = ProgressBar(unit="epoch", total=2, clock=clock)
    loop = make_loop(n_steps_per_checkpoint=4)
    show_two_epochs(bar, loop, checkpoint_at, clock)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == (
        "epoch     time     loss\n  1/2     4.0s   0.5000\n  2/2     4.0s   0.5000\n"
        "done in 8.0s · loss 0.5000\n"
    )
    bars = [data["text/plain"] for data in cell if "text/html" not in data]
    assert bars[0].startswith("Epoch 1/2  ━") and bars[-1].endswith(
        "4/4 · 1 steps/s · ETA 0s · loss 0.5000"
    )
    assert cell[-1] == {"text/plain": "", "text/html": ""}


def test_no_thread_is_started(make_loop, terminal, clock):
    before = threading.enumerate()
    bar, loop = ProgressBar(file=terminal, clock=clock), make_loop(n_steps=4)
    bar.attach(loop)
    clock.now += 1
    loop.dispatch()
    assert threading.enumerate() == before
    bar.close()


def everything_from(parent):
    """What was written to a terminal whose other end is closed."""
    parts = []
    with contextlib.suppress(OSError):  # Linux's word for the end.
        while part := os.read(parent, 4096):
            parts.append(part)
    os.close(parent)
    return b"".join(parts).decode()


def test_a_real_loop_on_a_real_terminal_shows_a_bar_and_leaves_lines(clock):
    x = np.ones((4, 1), np.float32)

    def data():
        for _ in range(6):
            clock.now += 1
            yield x, x

    def init(rngs, x):
        return {"params": {"w": np.zeros((1, 1), np.float32)}}

    def apply(variables, x, **_):
        return x @ variables["params"]["w"], {}

    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 100))
    with os.fdopen(child, "w", encoding="utf-8") as terminal:
        loop = TrainLoop(
            init,
            TrainTask(apply, optax.sgd(0.1), "mse", data()),
            0,
            n_steps=6,
            n_steps_per_checkpoint=3,
            first_checkpoint=3,
            callbacks=[ProgressBar(unit="epoch", total=2, file=terminal, clock=clock)],
            devices=jax.devices()[:1],
            grad_norm=False,
            stdout=False,
        )
        losses = [checkpoint.loss for checkpoint in loop]
    text = everything_from(parent)
    assert "2/3 · 1 steps/s · ETA 1s · loss" in text
    assert "Epoch 2/2  ━" in text
    assert "━" in text
    shown = [line.rsplit("\r", 1)[-1].strip() for line in text.split("\r\n")]
    rows = [re.sub("\x1b\\[[0-9]*m", "", line).split("  ")[-1].strip() for line in shown[1:3]]
    assert rows == [f"{loss:.4f}" for loss in losses]
    assert shown[3].startswith("done in ")
    assert shown[4:] == [""]
