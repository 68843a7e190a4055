"""Writes lines to terminals, notebooks and files."""

import contextlib
import contextvars
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from tqdm import tqdm

from flaxfit.display._lines import WIDTH, folded
from flaxfit.distributed import is_main

# Empty text would show an empty line or box; empty HTML shows nothing.
_NOTHING = {"text/plain": "", "text/html": ""}


def passing(text: str = "") -> Callable[[str], None]:
    """Shows text in a cell's output; returns a function that changes it, or removes it by ""."""
    from IPython import display as ipython  # A notebook has it.

    def data(text: str) -> dict[str, str]:
        return {"text/plain": text} if text.strip() else _NOTHING

    cell: Any = ipython.display(data(text), raw=True, display_id=True)
    return lambda text: cell.update(data(text), raw=True)


def is_notebook() -> bool:
    """Returns whether this is a Jupyter kernel (a terminal's IPython is not)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


def output() -> TextIO:
    """Returns the stream to print to: standard error, so that a piped standard output stays clean.

    In a notebook it is standard output: notebooks paint standard error as an error.
    """
    return sys.stdout if is_notebook() else sys.stderr


def is_cell(file: TextIO) -> bool:
    """Returns whether the stream is the output of a notebook cell."""
    return file in (sys.stdout, sys.stderr) and is_notebook()


def is_live(file: TextIO) -> bool:
    """Returns whether the stream can be redrawn: a terminal or a notebook."""
    return is_cell(file) or (file.isatty() and os.environ.get("TERM") != "dumb")


def has_colour(file: TextIO) -> bool:
    """Returns whether the stream is a terminal that shows colors, and `NO_COLOR` is not set."""
    is_terminal = file.isatty() and os.environ.get("TERM") != "dumb"
    return is_terminal and not os.environ.get("NO_COLOR")


def width_of(file: TextIO) -> int | None:
    """Returns the width of a terminal; None if unknown or not a terminal."""
    try:
        return os.get_terminal_size(file.fileno()).columns or None if file.isatty() else None
    except (AttributeError, OSError, ValueError):
        return None


def columns(file: TextIO) -> int:
    """Returns the length of lines: the width of the terminal, at most `WIDTH`."""
    return min(width_of(file) or WIDTH, WIDTH)


def printable(text: str, file: TextIO) -> str:
    """Replaces characters that the stream cannot encode by "?"."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


_notices: list[Callable[[str], None]] = []
"""Functions that change the temporary notices in cells."""


def write(text: str, file: TextIO | None = None, end: str = "\n", *, fold: bool = True) -> None:
    """Writes lines above any progress bar on the screen, in the main process only.

    They are folded to the width of a terminal.
    """
    if not is_main():
        return
    file = output() if file is None else file
    while _notices:
        _notices.pop()("")
    if fold and file.isatty():
        width = columns(file)
        text = "\n".join(folded(line, width) for line in text.split("\n"))
    tqdm.write(printable(text, file), file=file, end=end)
    file.flush()


_is_quiet = contextvars.ContextVar("is_quiet", default=False)


@contextlib.contextmanager
def quiet(is_quiet: bool = True) -> Iterator[None]:
    """Suppresses the notices of the library in this thread."""
    token = _is_quiet.set(is_quiet or _is_quiet.get())
    try:
        yield
    finally:
        _is_quiet.reset(token)


def say(text: str, file: TextIO | None = None) -> None:
    """Writes a notice after the name of the library.

    A notice that ends with "…" is temporary: the next overwrites it, or, where that is impossible,
    it is not shown.
    """
    if _is_quiet.get():
        return
    file = output() if file is None else file
    if not text.endswith("…"):
        write(f"flaxfit  {text}", file)
    elif is_cell(file):
        if is_main():
            _notices.append(passing(f"flaxfit  {text}"))
    elif is_live(file):
        write(f"flaxfit  {text}", file, end="\r")
