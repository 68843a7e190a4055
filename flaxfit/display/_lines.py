"""The lines printed when training starts, progresses and ends, and their folding."""

from collections.abc import Mapping

from flaxfit.display._numbers import count, duration, is_scalar, number, plural, rate
from flaxfit.display._table import place

WIDTH = 120
"""The longest line."""
_INDENT = 9  # Of folded lines, as wide as "flaxfit  ".


def first_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return ": ".join(filter(None, (type(error).__name__, lines[0][:200])))


def metric_line(metrics: Mapping[str, float]) -> str:
    """Formats names and values of the metrics that are single numbers."""
    numbers = {name: value for name, value in metrics.items() if is_scalar(value)}
    return "  ".join(f"{name} {number(value)}" for name, value in numbers.items())


def start_lines(
    name: str,
    *,
    n_params: int,
    n_devices: int,
    platform: str,
    batch_size: int | None = None,
    n_train: int | None = None,
    n_validation: int | None = None,
    steps_per_epoch: int | None = None,
) -> list[str]:
    """Describes the model and devices, and the data below; leaves out unknown parts."""
    model = [name, f"{count(n_params)} params", plural(n_devices, f"{platform} device")]
    data = []
    if n_train is not None:
        validation = "" if n_validation is None else f" / {count(n_validation)} val"
        data.append(f"{count(n_train)} train{validation}")
    elif n_validation is not None:
        data.append(f"{count(n_validation)} val")
    if batch_size is not None:
        data.append(f"batch {count(batch_size)}")
    if steps_per_epoch is not None:
        data.append(f"{plural(steps_per_epoch, 'step')}/epoch")
    return [" · ".join(parts) for parts in (model, data) if parts]


def pass_line(label: str, seconds: float, metrics: Mapping[str, float]) -> str:
    """Formats the metrics of a finished pass over data."""
    return "  ".join(filter(None, (label, duration(seconds), metric_line(metrics))))


def progress_line(
    n: int,
    total: int | None,
    steps_per_second: float | None,
    metrics: Mapping[str, float],
    *,
    width: int = WIDTH,
) -> str:
    """Formats the text beside a live bar. Leaves out the last metrics if it does not fit, then the
    speed, then the first metric."""
    where = plural(n, "step") if total is None else place(n, total)
    speed = left = ""
    if steps_per_second:
        speed = rate(steps_per_second)
        if total is not None:
            left = f"ETA {duration(max(total - n, 0) / steps_per_second, decimals=0)}"
    shown = [metric_line(dict(list(metrics.items())[:k])) for k in range(len(metrics), 0, -1)]
    tries = [(where, speed, left, each) for each in shown]
    tries += [(where, left, each) for each in shown[-1:]] + [(where, speed, left), (where, left)]
    lines = [" · ".join(filter(None, parts)) for parts in tries]
    return next((line for line in lines if len(line) <= width), where)


def final_lines(
    seconds: float,
    metrics: Mapping[str, float],
    *reasons: str,
    unit: str = "epoch",
    n: int = 0,
    total: int | None = None,
    monitor: str | None = None,
    best: tuple[float, int] | None = None,
    not_finite_since: int | None = None,
) -> list[str]:
    """Describes how training ended, after `n` of `total` units, and why.

    `best` is the best value of the metric `monitor` and the unit that reached it; without it, the
    lines show the last metrics. Since the unit `not_finite_since`, the loss has not been finite.
    """
    if total is None or n >= total:
        line = f"done in {duration(seconds)}"
    else:
        line = f"stopped after {count(n)} of {plural(total, unit)} in {duration(seconds)}"
    more = list(reasons)
    if not_finite_since is not None:
        more.append(f"the loss has not been finite since {unit} {count(not_finite_since)}")
    if monitor is not None and best is not None:
        more.append(f"best {monitor} {number(best[0])} at {unit} {count(best[1])} (*)")
    elif text := metric_line(metrics):
        more.append(text)
    if len(more) == 1 and n >= (total or 0):
        return [f"{line} · {more[0]}"]
    return [line, *more]


def folded(line: str, width: int) -> str:
    """Folds a line to a width, if possible between its items."""
    if len(line) <= width:
        return line
    apart = next((each for each in (" · ", "  ") if each in line[_INDENT:].strip()), " ")
    indent = " " * (len(line) - len(line.lstrip()) or _INDENT)  # Keeps an indentation.
    first, *parts = line.split(apart)
    lines = [first]
    for part in parts:
        longer = lines[-1] + apart + part
        if len(longer + apart.rstrip()) <= width:
            lines[-1] = longer
        else:
            lines[-1] += apart.rstrip()
            lines.append(indent + part)
    return "\n".join(lines)
