"""The table that `ProgressBar` writes, and what it says at the end."""

import io
import os
from types import SimpleNamespace

import numpy as np
import optax
import pytest

from flaxfit import TrainLoop, TrainTask
from flaxfit.callbacks import EarlyStopping, ProgressBar
from flaxfit.callbacks._history import History
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter


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
    assert loop.on.after_dispatch == []
    assert file.getvalue() == (
        "epoch     time     loss  val_accuracy\n"
        " 1/10   100 ms   1.7632        0.8611 *\n"
        " 2/10   100 ms   0.7666        0.9028 *\n"
        " 3/10   100 ms   0.5000        0.9028\n"
    )


def test_lines_go_to_standard_error(checkpoint_at, capsys, clock):
    bar = ProgressBar(unit="epoch", total=1, clock=clock)
    bar(checkpoint_at(1, loss=0.5))
    bar.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "epoch     time     loss\n  1/1     0 ms   0.5000\ndone in 0 ms · loss 0.5000\n"
    )


def test_the_end_names_the_best_value_once(checkpoint_at, clock):
    file = io.StringIO()
    bar = ProgressBar(unit="epoch", total=3, file=file, clock=clock)
    for n, value in enumerate([0.5, 0.9, 0.8], start=1):
        clock.now += 0.5
        bar(checkpoint_at(n, elapsed_time=0.5, val_accuracy=value))
    bar.close()
    bar.close()
    ends = file.getvalue().splitlines()[4:]
    assert ends == ["done in 1.5s · best val_accuracy 0.9000 at epoch 2 (*)"]


def test_an_end_before_the_last_epoch_says_so(checkpoint_at, clock):
    file = io.StringIO()
    bar = ProgressBar(unit="epoch", total=10, file=file, clock=clock)
    bar(checkpoint_at(44, loss=0.5))
    bar.close()
    assert file.getvalue().splitlines()[2:] == [
        "stopped after 1 of 10 epochs in 0 ms",
        "loss 0.5000",
    ]


def test_the_end_says_why_training_stopped_and_what_was_restored(make_loop, checkpoint_at, clock):
    file, loop = io.StringIO(), make_loop(n_steps_per_checkpoint=1)
    bar = ProgressBar(unit="epoch", total=9, file=file, clock=clock)
    stopping = SimpleNamespace(endings=["loss has not improved for 2 epochs", "restored epoch 1"])
    loop.callbacks = [stopping, bar]
    bar.attach(loop)
    bar(checkpoint_at(1, loss=0.5))
    bar(checkpoint_at(2, loss=0.5, stop=True))
    bar.close()
    assert file.getvalue().splitlines()[3:] == [
        "stopped after 2 of 9 epochs in 0 ms",
        "loss has not improved for 2 epochs",
        "restored epoch 1",
        "loss 0.5000",
    ]
    loop.callbacks = [bar]
    bar(checkpoint_at(3, loss=0.5, stop=True))
    bar.close()
    assert file.getvalue().splitlines()[-2] == "a callback asked to stop"


def test_a_resumed_run_knows_the_best_value_of_its_history(checkpoint_at):
    history = History(initial_epoch=2)
    for step, value in enumerate([0.5, 0.9, 0.6], start=1):
        history.append(checkpoint_at(step, val_accuracy=value))
    bar = ProgressBar(unit="epoch", start=5, file=(file := io.StringIO()))
    bar.recall(History())
    bar.recall(history)
    for step, value in enumerate([0.8, 0.95], start=4):
        bar(checkpoint_at(step, val_accuracy=value))
        bar.close()
    lines = file.getvalue().splitlines()
    assert lines[2].endswith("best val_accuracy 0.9000 at epoch 4 (*)")
    assert lines[3].endswith("0.9500 *")


def test_the_stars_are_of_the_metric_by_which_weights_are_restored(make_loop, checkpoint_at):
    file, loop = io.StringIO(), make_loop()
    bar = ProgressBar(unit="epoch", total=2, file=file)
    stopping = EarlyStopping("val_regret", mode="min", patience=9, restore_best=False)
    loop.callbacks = [stopping, bar]
    bar.attach(loop)
    history = History()
    history.append(checkpoint_at(1, val_regret=0.25, val_accuracy=0.1))
    bar.recall(history)
    bar(checkpoint_at(2, val_regret=0.5, val_accuracy=0.9))
    bar(checkpoint_at(3, val_regret=0.125, val_accuracy=0.5))
    assert [line.endswith("*") for line in file.getvalue().splitlines()] == [False, False, True]


def test_metrics_of_later_epochs_have_their_columns_from_the_first(make_loop, checkpoint_at):
    file, loop = io.StringIO(), make_loop()
    bar = ProgressBar(unit="epoch", total=2, file=file)
    loop.callbacks = [SimpleNamespace(adds={"val_loss": "min"}), bar]
    bar.attach(loop)
    bar(checkpoint_at(1, loss=0.5))
    bar(checkpoint_at(2, loss=0.4, val_loss=0.3))
    assert file.getvalue().splitlines() == [
        "epoch     time     loss  val_loss",
        "  1/2     0 ms   0.5000",
        "  2/2     0 ms   0.4000    0.3000 *",
    ]


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
    stars = [line.endswith("*") for line in file.getvalue().splitlines()[1:]]
    assert stars == [False, True, True, False, False]


def test_steps_are_shown_out_of_those_of_the_loop_even_when_its_end_moves(make_loop, checkpoint_at):
    file = io.StringIO()
    bar, loop = ProgressBar(file=file), make_loop(n_steps=450)
    bar.attach(loop)
    bar(checkpoint_at(90, loss=0.5))
    loop.n_steps = 1450
    bar(checkpoint_at(180, loss=0.5))
    assert file.getvalue().splitlines() == [
        "   step     time     loss",
        " 90/450     0 ms   0.5000",
        "       step     time     loss",
        "  180/1,450     0 ms   0.5000",
    ]


def test_a_resumed_run_counts_on_from_its_start(checkpoint_at):
    file = io.StringIO()
    ProgressBar(unit="epoch", total=10, start=6, file=file)(checkpoint_at(308, loss=0.5))
    assert file.getvalue().splitlines()[1].startswith(" 7/10")


@pytest.mark.slow
def test_a_resumed_run_knows_the_best_value_of_earlier_checkpoints(tmp_path):
    values = [0.5, 0.9, 0.6, 0.8, 0.95]
    x = np.ones((4, 1), np.float32)

    def init(rngs, x):
        return {"params": np.zeros(1, np.float32)}

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
    assert "0.9500 *" in train(5)


def test_what_was_best_of_another_metric_is_not_taken_over():
    bar = ProgressBar(monitor="val_f1")
    bar.set_state({"monitor": "val_accuracy", "best": [0.9, 2]})
    assert bar.get_state()["best"] is None
    bar.set_state({"monitor": "val_f1", "best": [0.9, 2]})
    assert bar.get_state() == {"monitor": "val_f1", "best": (0.9, 2)}


def test_a_table_has_the_columns_that_fit_the_terminal_now(checkpoint_at, terminal, monkeypatch):
    width = 100
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((width, 24)))
    monkeypatch.setattr(terminal, "fileno", lambda: 0)
    bar = ProgressBar(file=terminal)
    metrics = {"loss": 0.5, "precision": 0.25, "recall": 0.75}
    bar(checkpoint_at(1, **metrics))
    width = 30
    bar(checkpoint_at(2, **metrics))
    assert [line for line in terminal.getvalue().split("\n") if line] == [
        "   step     time     loss  precision   recall",
        "      1     0 ms   0.5000     0.2500   0.7500",
        "   step     time     loss …",
        "      2     0 ms   0.5000",
    ]


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_the_best_is_green_where_there_are_colours(checkpoint_at, terminal, monkeypatch, no_colour):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_colour)
    bar = ProgressBar(file=terminal)
    bar(checkpoint_at(1, loss=0.5, val_loss=0.5))
    assert ("\x1b[32m  0.5000\x1b[0m" in terminal.getvalue()) == (not no_colour)
    assert ("\x1b" in terminal.getvalue()) == (not no_colour)
