"""The rows of all parts as Markdown."""

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def title(environment: Row, is_quick: bool) -> str:
    """Returns the heading, with the machine and the versions."""
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items() if v)
    limit = environment["bytes_limit"]
    memory = f", {limit / 2**30:.0f} GiB" if limit else ""
    devices = f"{environment['n_devices']} x {environment['device']}{memory}"
    lines = [f"# flaxfit on {devices}", "", f"Python {environment['python']}, {versions}."]
    if is_quick:
        lines += ["", "Quick form: tiny models, whose figures tell nothing about speed."]
    return "\n".join(lines) + "\n"


def section(part: str, rows: Iterable[Row]) -> str:
    """Returns the table of a part, with its notes and failures below."""
    rows = [*rows]
    notes = [row[key] for row in rows for key in ("note", "broken") if key in row]
    named = [row for row in rows if "name" in row]
    kind = part.partition(":")[0]
    columns, cells = _KINDS.get(kind, _RATIOS)
    lines = [f"## {part}", ""]
    if named:
        lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        lines += [f"| {' | '.join(cells(row))} |" for row in named]
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def _ratio(row: Row) -> list[str]:
    if "left_out" in row:
        return [row["name"], "", "", "", f"left out: {_one_line(row['left_out'])}"]
    bounds = "" if row["bounds"] is None else "{:.3f} to {:.3f}".format(*row["bounds"])
    beside = f"{row['base']}, {_number(row['base_value'])} {row['unit']}"
    return [row["name"], _number(row["value"]), f"{row['ratio']:.3f}", bounds, beside]


def _check(row: Row) -> list[str]:
    return [row["name"], "passed" if row["passed"] else "FAILED", _one_line(row["found"])]


def _peak(row: Row) -> list[str]:
    return [row["name"], _number(row["value"]), row["unit"]]


def _idle(row: Row) -> list[str]:
    percent = [f"{100 * row[key]:.1f} %" for key in ("idle", "transfers")]
    gap = f"{1e3 * row['longest_gap']:.2f} ms"
    seconds = f"{row['seconds']:.2f} s of {row['device']}"
    return [row["name"], percent[0], gap, percent[1], seconds]


_RATIOS = ("contender", "time", "ratio", "95 % between", "beside"), _ratio
_KINDS = {
    "correctness": (("check", "", "found"), _check),
    "memory": (("contender", "peak", "unit"), _peak),
    "trace": (("contender", "idle", "longest gap", "transfers", "traced"), _idle),
}


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
