"""Lines written to terminals, notebooks and files."""

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


def test_in_a_notebook_a_passing_notice_is_shown_until_the_next_line(monkeypatch, capsys):
    shown = []

    def show(data, *, raw, display_id):
        shown.append(data["text/plain"])
        return types.SimpleNamespace(update=lambda data, *, raw: shown.append(data["text/plain"]))

    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    cell = types.SimpleNamespace(display=show)
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, display=cell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert display.is_notebook() and display.output() is sys.stdout
    assert display.is_live(sys.stdout) and not display.is_live(io.StringIO())
    display.say("compiling…")
    assert shown == ["flaxfit  compiling…"] and capsys.readouterr().out == ""
    display.say("compiled in 5s")
    assert shown == ["flaxfit  compiling…", ""]
    assert capsys.readouterr().out == "flaxfit  compiled in 5s\n"


def test_a_plain_process_and_a_terminal_of_ipython_are_no_notebooks(monkeypatch):
    assert not display.is_notebook()
    for shell in None, types.SimpleNamespace(config={}):
        module = types.SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", module)
        assert not display.is_notebook()
        assert display.output() is sys.stderr


def test_notices_are_suppressed_while_quiet(capsys):
    with display.quiet():
        with display.quiet(False):
            display.say("compiling")
        assert capsys.readouterr().err == ""
    display.say("compiled")
    assert capsys.readouterr() == ("", "flaxfit  compiled\n")  # Standard output stays clean.
