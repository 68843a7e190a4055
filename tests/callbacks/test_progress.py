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
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter


class Clock:
    """A clock that a test turns on."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def frames(text):
    """What a terminal showed on its last line, one after the other."""
    return [part.strip() for part in re.split(r"[\r\n]", text) if part.strip()]


@pytest.fixture
def clock():
    return Clock()


def test_off_a_terminal_there_is_one_line_per_checkpoint_and_no_carriage_return(
    make_loop, checkpoint_at, clock
):
    file = io.StringIO()
    bar = ProgressBar(unit="epoch", total=10, file=file, clock=clock)
    loop = make_loop(n_steps_per_checkpoint=44)
    bar.attach(loop)
    losses = [(1.7632, 0.8611), (0.7666, 0.9028), (0.5, 0.9028)]
    for n, (loss, accuracy) in enumerate(losses, start=1):
        clock.now += 0.1
        bar(checkpoint_at(44 * n, elapsed_time=0.1, loss=loss, val_accuracy=accuracy))
    assert loop.dispatch_watchers == []
    assert file.getvalue() == (
        "Epoch  1/10  0.1s  loss 1.7632  val_accuracy 0.8611 *\n"
        "Epoch  2/10  0.1s  loss 0.7666  val_accuracy 0.9028 *\n"
        "Epoch  3/10  0.1s  loss 0.5000  val_accuracy 0.9028\n"
    )


def test_lines_go_to_standard_error(checkpoint_at, capsys):
    bar = ProgressBar(unit="epoch", total=1)
    bar(checkpoint_at(1, loss=0.5))
    bar.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Epoch 1/1  0.0s  loss 0.5000\ndone in 0.0s · loss 0.5000\n"


def test_the_end_names_the_best_and_the_last_value_once(checkpoint_at, clock):
    file = io.StringIO()
    bar = ProgressBar(unit="epoch", total=3, file=file, clock=clock)
    for n, value in enumerate([0.5, 0.9, 0.8], start=1):
        clock.now += 0.5
        bar(checkpoint_at(n, elapsed_time=0.5, val_accuracy=value))
    bar.close()
    bar.close()
    ends = file.getvalue().splitlines()[3:]
    assert ends == ["done in 1.5s · best val_accuracy 0.9000 at epoch 2 (*) · last 0.8000"]


def test_an_end_before_the_last_epoch_says_so(checkpoint_at, clock):
    file = io.StringIO()
    bar = ProgressBar(unit="epoch", total=10, file=file, clock=clock)
    bar(checkpoint_at(44, loss=0.5))
    bar.close()
    assert file.getvalue().splitlines()[-1] == "stopped after 1 of 10 epochs in 0.0s · loss 0.5000"


def test_close_before_any_checkpoint_is_silent(make_loop):
    file = io.StringIO()
    bar = ProgressBar(file=file)
    bar.attach(make_loop())
    bar.close()
    assert file.getvalue() == ""


def test_the_monitored_metric_can_be_chosen_and_nan_is_never_best(checkpoint_at):
    file = io.StringIO()
    bar = ProgressBar(monitor="loss", file=file)
    for step, loss in enumerate([float("nan"), 0.5, 0.4, float("nan"), 0.4], start=1):
        bar(checkpoint_at(step, loss=loss, val_accuracy=0.5))
    stars = [line.endswith("*") for line in file.getvalue().splitlines()]
    assert stars == [False, True, True, False, False]


def test_steps_are_shown_out_of_those_of_the_loop_even_when_its_end_moves(make_loop, checkpoint_at):
    file = io.StringIO()
    bar, loop = ProgressBar(file=file), make_loop(n_steps=450)
    bar.attach(loop)
    bar(checkpoint_at(90, loss=0.5))
    loop.n_steps = 1450
    bar(checkpoint_at(180, loss=0.5))
    assert [line.split("  loss")[0] for line in file.getvalue().splitlines()] == [
        "Step  90/450  0.0s",
        "Step   180/1,450  0.0s",
    ]


def test_a_resumed_run_counts_on_from_its_start(checkpoint_at):
    file = io.StringIO()
    ProgressBar(unit="epoch", total=10, start=6, file=file)(checkpoint_at(308, loss=0.5))
    assert file.getvalue().startswith("Epoch  7/10")


def test_a_resumed_run_knows_the_best_value_of_earlier_checkpoints(tmp_path):
    values = [0.5, 0.9, 0.6, 0.8, 0.95]
    x = np.ones((4, 1), np.float32)
    init = lambda rngs, x: {"params": np.zeros(1, np.float32)}  # noqa: E731

    def measure(checkpoint):
        return checkpoint.with_metrics({"val_accuracy": values[checkpoint.step - 1]})

    def train(n_steps):
        file = io.StringIO()
        data = [(x, x)] * 9
        task = TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse", data)
        saved = CheckpointFileReader(tmp_path, init)
        callbacks = [measure, ProgressBar(file=file), CheckpointFileWriter(tmp_path)]
        list(TrainLoop(saved, task, 0, n_steps=n_steps, callbacks=callbacks, stdout=False))
        return file.getvalue()

    assert train(2).count("*") == 3  # Both steps, and at the end.
    resumed = train(4)
    assert resumed.count("*") == 1
    assert "best val_accuracy 0.9000 at step 2 (*)" in resumed
    assert "val_accuracy 0.9500 *" in train(5)


def test_what_was_best_of_another_metric_is_not_taken_over():
    bar = ProgressBar(monitor="val_f1")
    bar.set_state({"monitor": "val_accuracy", "best": [0.9, 2]})
    assert bar.get_state()["best"] is None
    bar.set_state({"monitor": "val_f1", "best": [0.9, 2]})
    assert bar.get_state() == {"monitor": "val_f1", "best": (0.9, 2)}


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


def test_a_bar_is_not_formatted_anew_for_lines_that_come_fast(
    make_loop, checkpoint_at, terminal, clock, monkeypatch
):
    bar = ProgressBar(unit="epoch", total=99, file=terminal, clock=clock)
    loop = make_loop(n_steps_per_checkpoint=4)
    bar.attach(loop)
    for _ in range(2):
        clock.now += 1
        loop.dispatch()
    bar(checkpoint_at(loop.step, loss=0.5))
    formatted, format_meter = [], tqdm.format_meter

    def count(**options):
        formatted.append(format_meter(**options))
        return formatted[-1]

    monkeypatch.setattr(tqdm, "format_meter", staticmethod(count))
    for seconds, n_formatted in ((0.1, 0), (0.3, 0), (0.3, 1), (0.4, 0), (0.4, 1), (1.0, 1)):
        formatted.clear()
        clock.now += seconds
        bar(checkpoint_at(loop.step, loss=0.5))
        assert len(formatted) == n_formatted
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
        "Epoch 1/2  4.0s  loss 0.5000",
        "Epoch 2/2  4.0s  loss 0.5000",
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
    assert shown.index("loss 0.2500\n") < shown.rindex("Step") < shown.rindex("inner")
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
    assert other.getvalue() == "Step     4/1,000  0.0s  loss 0.2500\n"
    bar.close()


def test_lines_fold_to_the_width_that_a_terminal_has_now(checkpoint_at, terminal, monkeypatch):
    width = 100
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((width, 24)))
    monkeypatch.setattr(terminal, "fileno", lambda: 0)
    bar = ProgressBar(file=terminal)
    metrics = {"loss": 0.5, "precision": 0.25, "recall": 0.75}
    bar(checkpoint_at(1, **metrics))
    width = 40
    bar(checkpoint_at(2, **metrics))
    shown = [line for line in terminal.getvalue().split("\n") if line]
    assert [len(line) <= 40 for line in shown] == [False, True, True]


def test_an_epoch_of_unknown_length_has_no_bar_until_one_has_passed(
    make_loop, checkpoint_at, terminal, clock
):
    bar = ProgressBar(unit="epoch", total=2, file=terminal, clock=clock)
    loop = make_loop(n_steps_per_checkpoint=2**31 - 1)
    bar.attach(loop)
    clock.now += 1
    loop.dispatch()
    assert frames(terminal.getvalue())[-1] == "Epoch 1/2  1 step · loss 0.5000"
    bar(checkpoint_at(1, loss=0.5, n_completed_steps=8))
    clock.now += 1
    loop.dispatch()
    assert frames(terminal.getvalue())[-1].endswith("1/8 · loss 0.5000")
    bar.close()


def test_live_can_be_switched_off_on_a_terminal_and_a_dumb_one_has_no_bar(
    make_loop, terminal, monkeypatch
):
    loop = make_loop()
    ProgressBar(file=terminal, live=False).attach(loop)
    monkeypatch.setenv("TERM", "dumb")
    ProgressBar(file=terminal).attach(loop)
    assert loop.dispatch_watchers == []


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
    assert "stopped after 3 of 4 steps in 0.0s ? loss 0.5000" in file.read()


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
        "Epoch 1/2  4.0s  loss 0.5000\nEpoch 2/2  4.0s  loss 0.5000\ndone in 8.0s · loss 0.5000\n"
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
    assert "Epoch 2/2  ─" in text
    assert "━" in text
    shown = [line.rsplit("\r", 1)[-1].strip() for line in text.split("\r\n")]
    assert [line.split("  ")[-1] for line in shown[:2]] == [f"loss {loss:.4f}" for loss in losses]
    assert shown[2].startswith("done in ")
    assert shown[3:] == [""]
