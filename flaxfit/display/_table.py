"""Table: aligned columns, one header row above rows that come one at a time."""

from collections.abc import Iterable, Mapping

from flaxfit.display._numbers import count, duration, number

_TIME = _VALUE = 7
"""The minimum widths of the columns: "482 ms", "1m 05s", "-0.1234"."""
_GAP, _STAR = "  ", 2
_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def place(n: int, total: int | None) -> str:
    """Formats the number of an epoch or step, such as " 3/10"."""
    if total is None:
        return f"{count(n):>7}"  # The same width up to a million.
    return f"{count(n):>{len(count(total))}}/{count(total)}"


class Table:
    """Formats a table of checkpoints: epoch or step, time, metrics, and "*" for a new best.

    The header is repeated only when a metric appears or the width changes. "…" in the header means
    that some columns do not fit.

    >>> table = Table("epoch")
    >>> for line in table.rows(" 1/10", 0.482, {"loss": 1.7632, "val_loss": 0.8611}):
    ...     print(line)
    epoch     time     loss  val_loss
     1/10   482 ms   1.7632    0.8611
    """

    def __init__(self, unit: str, expected: Iterable[str] = ()):
        self._unit, self._expected = unit, tuple(expected)
        self._names: list[str] = []
        self._layout: tuple[object, ...] | None = None
        """The number of columns and the width that the header was written for."""
        self._first, self._widths = 0, dict[str, int]()

    def rows(
        self,
        label: str,
        seconds: float,
        metrics: Mapping[str, float],
        *,
        best: str | None = None,
        monitor: str | None = None,
        width: int | None = None,
        colour: bool = False,
    ) -> list[str]:
        """Returns the line of a checkpoint, after a header if one is due.

        The metric `best` is marked; the column of `monitor` is the last one to be left out.
        """
        new = [name for name in metrics if name not in self._names]
        if new or not self._names:
            more = [name for name in self._expected if name not in (*self._names, *new)]
            self._names += [*new, *more]
        lines, layout = [], (len(self._names), width)
        if layout != self._layout or len(label) > self._first:
            self._layout = layout
            lines = [self._header(label, monitor, width, colour)]
        cells = []
        for name, cell_width in self._widths.items():
            text = "" if name not in metrics else number(metrics[name], cell_width)
            code = _GREEN if name == best else _DIM if name.startswith("val_") else ""
            cells.append(_painted(f"{text:>{cell_width}}", code if colour else ""))
        star = "" if best is None else _painted(" *", _GREEN if colour else "")
        row = _GAP.join([f"{label:>{self._first}}", f"{duration(seconds):>{_TIME}}", *cells])
        return [*lines, row.rstrip() + star]

    def _header(self, label: str, monitor: str | None, width: int | None, colour: bool) -> str:
        self._first = max(len(self._unit), len(label))
        widths = {name: max(len(name), _VALUE) for name in self._names}
        room = None if width is None else width - self._first - len(_GAP) - _TIME - _STAR
        self._widths = _fitting(widths, room, monitor)
        names = [f"{name:>{cell}}" for name, cell in self._widths.items()]
        line = _GAP.join([f"{self._unit:>{self._first}}", f"{'time':>{_TIME}}", *names])
        line += " …" if len(names) < len(widths) else ""
        return _painted(line, _DIM if colour else "")


def _fitting(widths: dict[str, int], room: int | None, monitor: str | None) -> dict[str, int]:
    """Returns the columns that fit, in order; prefers the monitor, losses and validation."""
    if room is None:
        return widths

    def rank(name: str) -> int:
        first = (monitor, "loss", "val_loss")
        return first.index(name) if name in first else 4 - name.startswith("val_")

    kept = set[str]()
    for name in sorted(widths, key=rank):
        if widths[name] + len(_GAP) <= room:
            room -= widths[name] + len(_GAP)
            kept.add(name)
    return {name: width for name, width in widths.items() if name in kept}


def _painted(text: str, code: str) -> str:
    return f"{code}{text}{_PLAIN}" if code else text
