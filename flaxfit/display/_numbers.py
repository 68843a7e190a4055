"""Formats measured values, counts, times, speeds and sizes."""

import math

import numpy as np

from flaxfit.tree import ArrayLike


def is_scalar(value: ArrayLike) -> bool:
    """Returns whether a value is a single number, also as an array of no dimensions."""
    # NumPy takes some microseconds, for each metric of each line.
    return type(value) is float or np.ndim(value) == 0


def number(value: float, width: int | None = None) -> str:
    """Returns a measured value: 4 decimals, or an exponent where these show too few digits.

    It has fewer decimals where it would be longer than `width`.
    """
    is_plain = not value or not math.isfinite(value) or 1e-4 <= abs(value) < 1e6
    kind, decimals = ("f", 4) if is_plain else ("e", 2)
    text = f"{value:.{decimals}{kind}}"
    while width is not None and len(text) > width and decimals:
        decimals -= 1
        text = f"{value:.{decimals}{kind}}"
    return text


def count(n: float) -> str:
    """Returns an integer with thousands separators."""
    return f"{round(n):,}"


def plural(n: float, noun: str) -> str:
    """Returns a count of things."""
    return f"{count(n)} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float, decimals: int = 1) -> str:
    """Returns a time span in its two largest units."""
    if decimals and seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
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
    """Returns a number of steps per second."""
    if steps_per_second >= 10:
        return f"{count(steps_per_second)} steps/s"
    return f"{steps_per_second:.2g} steps/s"


def size(n_bytes: float) -> str:
    """Returns an amount of memory."""
    for unit, amount in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= amount:
            return f"{n_bytes / amount:.1f} {unit}"
    return f"{n_bytes:.0f} B"
