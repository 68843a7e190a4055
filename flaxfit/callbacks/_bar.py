"""Bars of tqdm that only we redraw, on a terminal or in the output of a notebook's cell."""

import io
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.utils import disp_len

from flaxfit import display


class Bar(tqdm):
    """A bar that only we redraw: no thread wakes up to do it."""

    monitor_interval = 0
    _text, _width = "", 0

    def arrange(self, bar_format: str, n: int, total: int | None) -> None:
        """Changes what is to be shown, without drawing it."""
        self.bar_format, self.n, self.total = bar_format, n, total
        self._text = ""

    def __str__(self) -> str:
        # It is drawn again below each line; to format it takes longer than to draw it.
        if not self._text:
            self._text = super().__str__()
            self._width = disp_len(self._text)
        return self._text

    @property
    def drawn(self) -> tuple[str, int] | None:
        """What stands on the screen, and how wide that is; None if that is for tqdm to know."""
        return (self._text, self._width) if self._text and not self.pos else None


class CellBar(Bar):
    """A bar in the output of a notebook's cell, which is redrawn without widgets.

    When it is closed nothing of it is left in the notebook.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{**options, "file": io.StringIO(), "ncols": display.WIDTH, "dynamic_ncols": False}
        )

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        from IPython import display as ipython  # A notebook has it.

        # Empty text is an empty line, or an empty box; empty HTML is nothing.
        nothing = {"text/plain": "", "text/html": ""}
        cell: Any = ipython.display(nothing, raw=True, display_id=True)
        return lambda text: cell.update({"text/plain": text} if text.strip() else nothing, raw=True)


def to_rewrite(bar: Bar | None, file: TextIO) -> tuple[str, str] | None:
    """What takes the only bar there is away from a stream, and what draws it again, as it is.

    None where that is for tqdm to do: there are other bars, it is elsewhere (as in a notebook), or
    the bar was rearranged.
    """
    shown: Any = tqdm  # Whose types do not tell of the set of all bars.
    if len(shown._instances) > (bar is not None):
        return None
    if bar is None:
        return "", ""
    if bar.drawn is None or bar.fp != file:
        return None
    text, width = bar.drawn
    return f"\r{' ' * width}\r", text
