"""Small charts of series of numbers: a line of block characters, an SVG picture."""

import html
import math
from collections.abc import Mapping, Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
# Each has a contrast of at least 3:1 on white pages and on black pages.
COLOURS = ("#2f86c8", "#d2691e", "#2e8b3d", "#d14545")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 320, 160, 52, 22, 18


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draws a series as one line of blocks of 8 heights; a value that is not finite is blank.

    A longer series is sampled at `width` evenly spaced values, including both ends.
    """
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = _bounds(values)
    scale = (len(_BLOCKS) - 1) / ((high - low) or 1.0)
    return "".join(
        _BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


def svg_chart(
    title: str, series: Mapping[str, Sequence[float]], x: Sequence[float], unit: str = ""
) -> str:
    """Draws several series over the same x as an SVG picture for light and dark pages.

    `unit` is the unit of x.
    """
    low, high = _bounds([value for values in series.values() for value in values])
    x_low, x_high = min(x, default=0), max(x, default=0)
    right, bottom = _WIDTH - 8, _HEIGHT - _BOTTOM

    def point(a: float, b: float) -> str:
        across = (a - x_low) / ((x_high - x_low) or 1)
        up = (b - low) / ((high - low) or 1)
        return f"{_LEFT + across * (right - _LEFT):.1f},{bottom - up * (bottom - _TOP):.1f}"

    parts = [
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'role="img" font-family="sans-serif" font-size="10" fill="currentColor">',
        f'<path d="M{_LEFT},{_TOP}V{bottom}H{right}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.5"/>',
        _text(_LEFT, 12, "start", title, 'font-weight="bold"'),
        _text(_LEFT - 4, _TOP + 8, "end", f"{high:.3g}"),
        _text(_LEFT - 4, bottom, "end", f"{low:.3g}"),
        _text(_LEFT, _HEIGHT - 5, "start", f"{x_low:g}"),
        _text((_LEFT + right) / 2, _HEIGHT - 5, "middle", unit),
        _text(right, _HEIGHT - 5, "end", f"{x_high:g}"),
    ]
    names = []
    for i, (name, values) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        names.append(f'<tspan dx="8" fill="{colour}">{html.escape(name)}</tspan>')
        for points in _unbroken([(a, b) for a, b in zip(x, values, strict=True)]):
            path = " ".join(point(a, b) for a, b in points)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
                'stroke-linecap="round" stroke-linejoin="round"/>'
            )
    parts.append(f'<text x="{right}" y="12" text-anchor="end">{"".join(names)}</text>')
    return "".join(parts) + "</svg>"


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    return min(finite, default=0.0), max(finite, default=0.0)


def _unbroken(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Splits points at missing values; a single point becomes a dot."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run * 2 if len(run) == 1 else run for run in runs if run]


def _text(x: float, y: float, anchor: str, text: str, style: str = "") -> str:
    text = html.escape(text)
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {style}>{text}</text>'
