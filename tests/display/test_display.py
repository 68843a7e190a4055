import io
import os
import pty
import sys
import termios
import types

import pytest
from tqdm import tqdm

from flaxfit import display


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def notebook(monkeypatch):
    """Makes the process look like a Jupyter kernel."""
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.5, "0.5000"),
        (-1.23456, "-1.2346"),
        (0.0001, "0.0001"),
        (0.000032, "3.20e-05"),
        (-0.000032, "-3.20e-05"),
        (999999.0, "999999.0000"),
        (1.5e6, "1.50e+06"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_four_decimals_or_an_exponent(value, text):
    assert display.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (9.94, "9.9s"),
        (42.4, "42s"),
        (59.9, "1m 00s"),
        (187, "3m 07s"),
        (3600, "1h 00m"),
        (90061, "1d 01h"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert display.duration(seconds) == text


def test_counts_speeds_and_labels():
    assert display.count(1437.4) == "1,437"
    assert display.plural(1, "epoch") == "1 epoch"
    assert display.plural(2000, "step") == "2,000 steps"
    assert display.rate(4712.3) == "4,712 steps/s"
    assert display.rate(0.0416) == "0.042 steps/s"
    assert display.label("epoch", 3, 10) == "Epoch  3/10"
    assert display.label("epoch", 3) == "Epoch      3"


def test_the_start_line_tells_what_runs_where_on_what():
    line = display.start_line(
        "MLP",
        "validation split at random",
        n_params=9610,
        n_devices=1,
        platform="cpu",
        batch_size=32,
        n_train=1437,
        n_validation=360,
        steps_per_epoch=44,
    )
    assert line == (
        "MLP · 9,610 params · 1 cpu device · 1,437 train / 360 val examples · batch 32 · "
        "44 steps/epoch · validation split at random"
    )


def test_the_start_line_leaves_out_what_is_not_known():
    line = display.start_line("MLP", n_params=10, n_devices=4, platform="gpu")
    assert line == "MLP · 10 params · 4 gpu devices"


def test_a_checkpoint_line_shows_training_then_validation_and_a_star():
    line = display.checkpoint_line(
        "Epoch  1/10", 0.1, {"loss": 1.7632, "val_loss": 1.1262}, is_best=True
    )
    assert line == "Epoch  1/10  0.1s  loss 1.7632  val_loss 1.1262 *"


def test_a_long_checkpoint_line_is_broken_before_the_validation_metrics():
    names = ["loss", "accuracy", "precision", "recall", "f1_macro"]
    metrics = {name: 0.5 for name in names} | {f"val_{name}": 0.5 for name in names}
    first, second = display.checkpoint_line("Epoch  1/10", 0.1, metrics, is_best=True).split("\n")
    assert first.startswith("Epoch  1/10  0.1s  loss 0.5000") and "val_" not in first
    assert second.startswith(" " * 13 + "val_loss 0.5000") and second.endswith("0.5000 *")
    assert max(len(first), len(second)) <= display.WIDTH
    training = {name * 10: 0.5 for name in names}
    assert "\n" not in display.checkpoint_line("Epoch  1/10", 0.1, training)


def test_the_progress_line_leaves_out_what_is_not_known():
    full = display.progress_line(28, 44, 4.0, {"loss": 0.429})
    assert full == "28/44 · 4 steps/s · ETA 4s · loss 0.4290"
    assert display.progress_line(28, 44, None, {}) == "28/44"
    assert display.progress_line(1028, None, 4.0, {}) == "1,028 steps · 4 steps/s"
    assert "ETA 0s" in display.progress_line(50, 44, 4.0, {})


def test_metrics_that_do_not_fit_beside_the_bar_are_left_out_from_the_last_and_never_cut():
    metrics = {"loss": 0.429, "accuracy": 0.8897}
    line = display.progress_line(28, 44, 4.0, metrics, width=45)
    assert line == "28/44 · 4 steps/s · ETA 4s · loss 0.4290"
    assert display.progress_line(28, 44, 4.0, metrics, width=10) == "28/44 · 4 steps/s · ETA 4s"


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


@pytest.fixture
def narrow():
    """A terminal of 60 columns, and what was written to it."""
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 60))
    with os.fdopen(child, "w", encoding="utf-8") as terminal:

        def written(end):
            """All that was written, up to the line that ends so."""
            found = b""
            while not found.endswith(f"{end}\r\n".encode()):
                found += os.read(parent, 4096)
            return found.decode().replace("\r\n", "\n")

        yield terminal, written
    os.close(parent)


def test_lines_are_folded_to_the_width_of_a_terminal_and_of_nothing_else(narrow):
    terminal, written = narrow
    line = "Epoch 1/4  " + "  ".join(f"metric_{i} 0.5000" for i in range(8))
    display.write(line, terminal)
    lines = written("metric_7 0.5000").splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 60
    assert display.columns(terminal) == 60
    file = io.StringIO()
    display.write(line, file)
    assert file.getvalue() == line + "\n"
    assert display.columns(file) == display.WIDTH


def test_a_passing_notice_is_written_over_by_the_next_and_left_out_of_files(narrow, monkeypatch):
    terminal, written = narrow
    monkeypatch.setenv("TERM", "xterm")
    display.say("compiling…", terminal)
    display.say("compiled in 5s", terminal)
    assert written("in 5s") == "flaxfit  compiling…\rflaxfit  compiled in 5s\n"
    file = io.StringIO()
    display.say("compiling…", file)
    assert file.getvalue() == ""


def test_the_final_line_tells_time_best_and_last():
    line = display.final_line(
        1.5,
        {"loss": 0.1, "val_accuracy": 0.9694},
        n=10,
        total=10,
        monitor="val_accuracy",
        best=(0.9722, 8),
    )
    assert line == "done in 1.5s · best val_accuracy 0.9722 at epoch 8 (*) · last 0.9694"
    assert display.final_line(1.5, {"loss": 0.1}, unit="step", n=5) == "done in 1.5s · loss 0.1000"
    stopped = display.final_line(1.5, {}, unit="step", n=500, total=2000)
    assert stopped == "stopped after 500 of 2,000 steps in 1.5s"


def test_notices_start_with_the_name_of_the_library_and_go_to_standard_error(capsys):
    display.say("no checkpoint found")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "flaxfit  no checkpoint found\n"


def test_lines_are_written_above_a_bar_that_is_on_the_screen():
    terminal = Terminal()
    with tqdm(total=2, file=terminal, ascii=True, desc="trials") as bar:
        display.write("a line", terminal)
        written = terminal.getvalue()
        bar.update(2)
    before, after = written.split("a line\n")
    assert before.endswith("\r")
    assert "trials" in after


def test_characters_that_a_stream_cannot_hold_are_replaced():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    display.write("loss ▁▂ · 1", file)
    file.seek(0)
    assert file.read() == "loss ?? ? 1\n"


def test_only_a_terminal_that_can_redraw_is_live(monkeypatch):
    assert display.is_live(Terminal())
    assert not display.is_live(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not display.is_live(Terminal())


def test_a_notebook_is_live_and_shows_lines_as_output_not_as_errors(notebook):
    assert display.is_notebook()
    assert display.output() is sys.stdout
    assert display.is_live(sys.stdout)
    assert not display.is_live(io.StringIO())


def test_a_plain_process_and_a_terminal_of_ipython_are_no_notebooks(monkeypatch):
    assert not display.is_notebook()
    for shell in None, types.SimpleNamespace(config={}):
        module = types.SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", module)
        assert not display.is_notebook()
        assert display.output() is sys.stderr
