"""tqdm bars that are redrawn only on request, on a terminal or in a notebook's cell."""

import io
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tqdm import tqdm

from flaxfit import display

_LONGEST_BAR = 40


class Bar(tqdm):
    """A bar without tqdm's monitor thread: it is redrawn only on request."""

    monitor_interval = 0


class CellBar(Bar):
    """A bar in a notebook cell's output, drawn without widgets, that disappears at the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{**options, "file": io.StringIO(), "ncols": display.WIDTH, "dynamic_ncols": False}
        )

    @staticmethod
    def status_printer(file: object) -> Callable[[str], None]:
        return display.passing()


def new_bar(stream: TextIO, total: int | None) -> Bar:
    """Makes a bar for a terminal or a notebook cell, without drawing it."""
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


def draw(
    bar: Bar,
    stream: TextIO,
    label: str,
    n: int,
    total: int | None,
    *,
    speed: float | None,
    metrics: Mapping[str, float],
) -> None:
    """Draws a bar: a label, the bar and a line of numbers.

    The length of the bar depends only on the terminal, so that it does not jump with the numbers.
    """
    columns = display.columns(stream)
    n_cells = min(columns // 4, _LONGEST_BAR)
    room = columns - len(label) - n_cells - 4
    line = display.progress_line(n, total, speed, metrics, width=room)
    text = display.printable(line, stream)
    text = text.replace("{", "{{").replace("}", "}}")
    bar.bar_format = f"{label}  {{bar:{n_cells}}}  {text}" if total else f"{label}  {text}"
    bar.n, bar.total = n if total is None else min(n, total), total
    bar.refresh()
