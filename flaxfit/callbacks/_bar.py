"""Bars of tqdm that only we redraw, on a terminal or in the output of a notebook's cell."""

import io
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tqdm import tqdm

from flaxfit import display

# Metrics are left out where they would make the bar shorter than this.
_LEAST_BAR = 4


class Bar(tqdm):
    """A bar that is redrawn on request only: no thread of tqdm does."""

    monitor_interval = 0
    _text = ""

    def arrange(self, bar_format: str, n: int, total: int | None) -> None:
        """Changes the contents without drawing them."""
        self.bar_format, self.n, self.total = bar_format, n, total
        self._text = ""

    def __str__(self) -> str:
        # tqdm redraws it below each line; formatting it takes longer than drawing it.
        if not self._text:
            self._text = super().__str__()
        return self._text


class CellBar(Bar):
    """A bar in the output of a notebook's cell, redrawn without widgets, that leaves no trace."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{**options, "file": io.StringIO(), "ncols": display.WIDTH, "dynamic_ncols": False}
        )

    @staticmethod
    def status_printer(file: object) -> Callable[[str], None]:
        from IPython import display as ipython  # A notebook has it.

        # Empty text is an empty line, or an empty box; empty HTML is nothing.
        nothing = {"text/plain": "", "text/html": ""}
        cell: Any = ipython.display(nothing, raw=True, display_id=True)
        return lambda text: cell.update({"text/plain": text} if text.strip() else nothing, raw=True)


def new_bar(stream: TextIO, total: int | None) -> Bar:
    """Makes a bar for a terminal or for the cell of a notebook, which is not drawn yet."""
    blocks = "─╸━"
    kind = CellBar if display.is_cell(stream) else Bar
    return kind(
        total=total,
        bar_format=" ",
        leave=False,
        dynamic_ncols=True,
        ascii=blocks if display.printable(blocks, stream) == blocks else True,
        file=stream,
    )


def arrange(
    bar: Bar,
    stream: TextIO,
    label: str,
    n: int,
    total: int | None,
    *,
    speed: float | None,
    metrics: Mapping[str, float],
) -> None:
    """Changes the contents of a bar without drawing it: a label, the bar and a line of numbers."""
    room = display.columns(stream) - len(label) - _LEAST_BAR - 4
    line = display.progress_line(n, total, speed, metrics, width=room)
    text = display.printable(line, stream)
    text = text.replace("{", "{{").replace("}", "}}")
    bar_format = f"{label}  {{bar}}  {text}" if total else f"{label}  {text}"
    bar.arrange(bar_format, n if total is None else min(n, total), total)
