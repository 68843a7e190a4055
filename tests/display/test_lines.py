"""The lines of a training, and how long ones are folded."""

import pytest

from flaxfit import display


def test_the_start_tells_what_runs_where_on_what_in_lines_of_60_columns():
    lines = display.start_lines(
        "MLP",
        n_params=9610,
        n_devices=1,
        platform="cpu",
        batch_size=32,
        n_train=1437,
        n_validation=360,
        steps_per_epoch=44,
    )
    assert lines == [
        "MLP · 9,610 params · 1 cpu device",
        "1,437 train / 360 val · batch 32 · 44 steps/epoch",
    ]
    lines = display.start_lines("MLP", n_params=10, n_devices=4, platform="gpu")
    assert lines == ["MLP · 10 params · 4 gpu devices"]  # The rest is not known.


def test_the_progress_line_leaves_out_what_is_not_known():
    full = display.progress_line(28, 44, 4.0, {"loss": 0.429})
    assert display.progress_line(8, 44, None, {}) == " 8/44"
    assert full == "28/44 · 4 steps/s · ETA 4s · loss 0.4290"
    assert display.progress_line(28, 44, None, {}) == "28/44"
    assert display.progress_line(1028, None, 4.0, {}) == "1,028 steps · 4 steps/s"
    assert "ETA 0s" in display.progress_line(50, 44, 4.0, {})


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (45, "28/44 · 4 steps/s · ETA 4s · loss 0.4290"),
        (39, "28/44 · ETA 4s · loss 0.4290"),
        (27, "28/44 · 4 steps/s · ETA 4s"),
        (20, "28/44 · ETA 4s"),
        (10, "28/44"),
    ],
)
def test_a_narrow_progress_line_leaves_out_the_last_metric_the_speed_and_the_first(width, line):
    metrics = {"loss": 0.429, "accuracy": 0.8897}
    assert display.progress_line(28, 44, 4.0, metrics, width=width) == line


@pytest.mark.parametrize("width", [20, 30, 45, 60, 80])
def test_a_folded_line_fits_and_loses_nothing(width):
    line = "flaxfit  MLP · 9,610 params · 1 cpu device · 1,437 train / 360 val examples · batch 32"
    lines = display.folded(line, width).split("\n")
    longest = max(len(part) for part in line.split(" · "))
    assert max(map(len, lines)) <= max(width, 9 + longest + 2)
    assert all(part.startswith(" " * 9) for part in lines[1:])
    assert " ".join(part.strip() for part in lines) == line


def test_a_folded_line_is_broken_between_metrics_or_else_between_words():
    assert display.folded("Epoch 1/4  2.8s  loss 1.5959  f1 0.6816", 30).split("\n") == [
        "Epoch 1/4  2.8s  loss 1.5959",
        "         f1 0.6816",
    ]
    assert display.folded("flaxfit  compiled it in 5s", 21).split("\n") == [
        "flaxfit  compiled it",
        "         in 5s",
    ]


def test_an_indented_line_goes_on_as_far_in():
    line = " " * 11 + "val_loss 2.3064  val_f1 0.1016  val_top_5 0.5109 *"
    assert display.folded(line, 45).split("\n") == [
        " " * 11 + "val_loss 2.3064  val_f1 0.1016",
        " " * 11 + "val_top_5 0.5109 *",
    ]


def test_the_end_tells_time_and_best():
    lines = display.final_lines(
        1.5,
        {"loss": 0.1, "val_accuracy": 0.9694},
        n=10,
        total=10,
        monitor="val_accuracy",
        best=(0.9722, 8),
    )
    assert lines == ["done in 1.5s · best val_accuracy 0.9722 at epoch 8 (*)"]
    lines = display.final_lines(1.5, {"loss": 0.1}, unit="step", n=5)
    assert lines == ["done in 1.5s · loss 0.1000"]
    stopped = display.final_lines(1.5, {}, "the budget is used up", unit="step", n=500, total=2000)
    assert stopped == ["stopped after 500 of 2,000 steps in 1.5s", "the budget is used up"]
