"""Numbers: which values are one, and measured values, counts, times, speeds and sizes as text."""

import math
from typing import Any

import numpy as np


def is_scalar(value: Any) -> bool:
    """Whether it is a single number, and no array of more dimensions.

    >>> is_scalar(0.5), is_scalar(np.ones(())), is_scalar(np.ones(2))
    (True, True, False)
    """
    # NumPy takes some microseconds, for each metric of each line.
    return type(value) is float or np.ndim(value) == 0


def number(value: float) -> str:
    """A measured value: 4 decimals, scientific where these say little.

    >>> number(0.97223), number(3.2e-5), number(1234567.0)
    ('0.9722', '3.20e-05', '1.23e+06')
    """
    if value and math.isfinite(value) and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:.4f}"


def count(n: float) -> str:
    """A whole number with its thousands apart.

    >>> count(1437)
    '1,437'
    """
    return f"{round(n):,}"


def plural(n: float, noun: str) -> str:
    """A count of things.

    >>> plural(1, "epoch"), plural(1437, "step")
    ('1 epoch', '1,437 steps')
    """
    return f"{count(n)} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float, decimals: int = 1) -> str:
    """A time span in its two largest units.

    >>> duration(0.123), duration(42.1), duration(187), duration(7384)
    ('0.1s', '42s', '3m 07s', '2h 03m')
    """
    if seconds < 10:
        return f"{seconds:.{decimals}f}s"
    seconds = round(seconds)
    for name, size, below, unit in (
        ("d", 86400, 3600, "h"),
        ("h", 3600, 60, "m"),
        ("m", 60, 1, "s"),
    ):
        if seconds >= size:
            return f"{seconds // size}{name} {seconds % size // below:02d}{unit}"
    return f"{seconds}s"


def rate(steps_per_second: float) -> str:
    """A speed of training.

    >>> rate(4712.3), rate(0.416)
    ('4,712 steps/s', '0.42 steps/s')
    """
    if steps_per_second >= 10:
        return f"{count(steps_per_second)} steps/s"
    return f"{steps_per_second:.2g} steps/s"


def size(n_bytes: float) -> str:
    """An amount of memory.

    >>> size(512), size(38_440), size(2.5e9)
    ('512 B', '38.4 kB', '2.5 GB')
    """
    for unit, amount in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= amount:
            return f"{n_bytes / amount:.1f} {unit}"
    return f"{n_bytes:.0f} B"
