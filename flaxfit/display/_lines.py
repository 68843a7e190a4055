"""The lines that tell how training begins, goes and ends, and where a long one is broken."""

from collections.abc import Mapping

from flaxfit.display._numbers import count, duration, is_scalar, number, plural, rate

WIDTH = 120
"""Longer lines are broken before the validation metrics."""
_INDENT = 9
"""Of what is broken off a line: the name of the library, or "Epoch 1/4", and two blanks."""


def metric_line(metrics: Mapping[str, float]) -> str:
    """Names and values of metrics, of those that are single numbers.

    >>> metric_line({"loss": 0.42901, "accuracy": 0.88968})
    'loss 0.4290  accuracy 0.8897'
    """
    numbers = {name: value for name, value in metrics.items() if is_scalar(value)}
    return "  ".join(f"{name} {number(value)}" for name, value in numbers.items())


def label(unit: str, n: int, total: int | None = None) -> str:
    """How far training is, in lines that stay aligned.

    >>> label("epoch", 3, 10)
    'Epoch  3/10'
    """
    if total is None:
        return f"{unit.capitalize()} {count(n):>6}"
    return f"{unit.capitalize()} {count(n):>{len(count(total))}}/{count(total)}"


def start_line(
    name: str,
    *notes: str,
    n_params: int,
    n_devices: int,
    platform: str,
    batch_size: int | None = None,
    n_train: int | None = None,
    n_validation: int | None = None,
    steps_per_epoch: int | None = None,
) -> str:
    """What is trained, on what and with what; unknown parts are left out.

    >>> start_line("MLP", n_params=9610, n_devices=1, platform="cpu", n_train=1437, batch_size=32)
    'MLP · 9,610 params · 1 cpu device · 1,437 train examples · batch 32'
    """
    parts = [name, f"{count(n_params)} params", plural(n_devices, f"{platform} device")]
    if n_train is not None:
        validation = "" if n_validation is None else f" / {count(n_validation)} val"
        parts.append(f"{count(n_train)} train{validation} examples")
    elif n_validation is not None:
        parts.append(f"{count(n_validation)} val examples")
    if batch_size is not None:
        parts.append(f"batch {count(batch_size)}")
    if steps_per_epoch is not None:
        parts.append(f"{count(steps_per_epoch)} steps/epoch")
    return " · ".join([*parts, *notes])


def checkpoint_line(
    label: str,
    seconds: float,
    metrics: Mapping[str, float],
    *,
    is_best: bool = False,
    width: int = WIDTH,
) -> str:
    """One finished epoch (or another span of steps); "*" marks a new best.

    >>> checkpoint_line("Epoch  1/10", 0.11, {"loss": 1.76321}, is_best=True)
    'Epoch  1/10  0.1s  loss 1.7632 *'
    """
    head, star = f"{label}  {duration(seconds)}", " *" if is_best else ""
    line = "  ".join(filter(None, (head, metric_line(metrics)))) + star
    validation = {name: value for name, value in metrics.items() if name.startswith("val_")}
    if len(line) <= width or len(validation) in (0, len(metrics)):
        return line
    training = {name: value for name, value in metrics.items() if name not in validation}
    indent = " " * (len(label) + 2)
    return f"{head}  {metric_line(training)}\n{indent}{metric_line(validation)}{star}"


def progress_line(
    n: int,
    total: int | None,
    steps_per_second: float | None,
    metrics: Mapping[str, float],
    *,
    width: int = WIDTH,
) -> str:
    """What stands beside a live bar; the last metrics are left out where they do not fit.

    >>> progress_line(28, 44, 4700.0, {"loss": 0.429})
    '28/44 · 4,700 steps/s · ETA 0s · loss 0.4290'
    """
    parts = [plural(n, "step") if total is None else f"{count(n)}/{count(total)}"]
    if steps_per_second:
        parts.append(rate(steps_per_second))
        if total is not None:
            parts.append(f"ETA {duration(max(total - n, 0) / steps_per_second, decimals=0)}")
    line = " · ".join(filter(None, (*parts, metric_line(metrics))))
    if metrics and len(line) > width:
        fewer = dict(list(metrics.items())[:-1])
        return progress_line(n, total, steps_per_second, fewer, width=width)
    return line


def final_line(
    seconds: float,
    metrics: Mapping[str, float],
    *,
    unit: str = "epoch",
    n: int = 0,
    total: int | None = None,
    monitor: str | None = None,
    best: tuple[float, int] | None = None,
    not_finite_since: int | None = None,
) -> str:
    """How training ended.

    Args:
      seconds: how long it took.
      metrics: those of the last checkpoint.
      unit: what `n` and `total` count.
      n: how far training came.
      total: how far it was to go.
      monitor: the metric that was watched.
      best: its best value, and the epoch (or step) that reached it.
      not_finite_since: the epoch (or step) from which on the loss was not finite, up to the last.

    >>> final_line(1.5, {"val_loss": 0.2}, n=9, total=9, monitor="val_loss", best=(0.1, 8))
    'done in 1.5s · best val_loss 0.1000 at epoch 8 (*) · last 0.2000'
    """
    if total is None or n >= total:
        line = f"done in {duration(seconds)}"
    else:
        line = f"stopped after {count(n)} of {plural(total, unit)} in {duration(seconds)}"
    if not_finite_since is not None:
        line += f" · the loss is not finite since {unit} {count(not_finite_since)}"
    if monitor is None or best is None:
        return " · ".join(filter(None, (line, metric_line(metrics))))
    line += f" · best {monitor} {number(best[0])} at {unit} {count(best[1])} (*)"
    return f"{line} · last {number(metrics[monitor])}" if monitor in metrics else line


def folded(line: str, width: int) -> str:
    """A line broken where it has to be, between the things that it lists, not within them.

    >>> print(folded("flaxfit  MLP · 9,610 params · 1 cpu device · batch 32", 40))
    flaxfit  MLP · 9,610 params ·
             1 cpu device · batch 32
    """
    if len(line) <= width:
        return line
    apart = next((each for each in (" · ", "  ") if each in line[_INDENT:].strip()), " ")
    indent = " " * (len(line) - len(line.lstrip()) or _INDENT)  # What is indented stays so.
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
