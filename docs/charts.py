"""Draws the charts of the site from the tables of its pages: `python docs/charts.py`.

They are parts of HTML pages, in whose colours they are drawn. A test compares them with the tables.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

DOCS = Path(__file__).parent
OURS = ("TrainLoop", "Model.fit")
SHOWN = ("hand-written", *OURS, "Model.fit, 32 steps per call", "Keras", "torch")
Table = Mapping[str, Mapping[str, str]]


def read_table(page: str, head: str) -> Table:
    """Reads the table of a page whose first column has this head: row -> column -> cell."""
    lines = (DOCS / f"{page}.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("| ").split(" | ")])
    (_, *columns), _, *rows = rows
    return {row: dict(zip(columns, cells, strict=False)) for row, *cells in rows}


def steps() -> str:
    """The time of a step beside that of a hand-written loop, a panel for each model."""
    table = read_table("performance-figures", "contender")
    models = next(iter(table.values()))
    return figure(
        "chart",
        "The time of a training step, as a multiple of that of a hand-written loop. Shorter is "
        "faster.",
        [bars(model, {name: float(table[name][model]) for name in SHOWN}) for model in models],
    )


def bars(title: str, values: Mapping[str, float]) -> str:
    """A panel of horizontal bars with their values."""
    scale = 150 / 3.4
    parts = [text(0, 14, title, "title")]
    for i, (name, value) in enumerate(values.items()):
        y = 30 + 24 * i
        kind = "ours" if name.startswith(OURS) else "peer"
        label = name.replace(", 32 steps per call", ", 32 a call")
        parts.append(text(132, y + 13, label, "label"))
        parts.append(
            f'<rect class="{kind}" x="138" y="{y}" width="{value * scale:.1f}" height="16"/>'
        )
        parts.append(text(142 + max(value, 1) * scale, y + 13, f"{value:.2f}", "value"))
    x = 138 + scale
    parts.append(f'<path class="unit" d="M{x:.1f} 26V{30 + 24 * len(values)}"/>')
    return svg(330, 36 + 24 * len(values), title, parts)


def memory() -> str:
    """The memory of a device by the number of parameters, on a logarithmic scale."""
    table = read_table("scaling", "parameters")
    sizes = {
        row: {column: gigabytes(cell) for column, cell in cells.items() if cell}
        for row, cells in table.items()
    }
    parts = [text(0, 14, "GB of memory on each device", "title")]
    for gb in (0.1, 1, 10, 100):
        parts.append(f'<path class="grid" d="M{at(gb):.1f} 28V{40 + 58 * len(sizes)}"/>')
        parts.append(text(at(gb), 56 + 58 * len(sizes), f"{gb:g}", "tick"))
    for i, (size, cells) in enumerate(sizes.items()):
        y = 52 + 58 * i
        parts.append(text(62, y + 5, size, "label"))
        ends = [at(value) for value in cells.values()]
        parts.append(f'<path class="line" d="M{min(ends):.1f} {y}H{max(ends):.1f}"/>')
        for j, (column, value) in enumerate(cells.items()):
            parts.append(
                f'<circle class="{"ours" if j else "peer"}" cx="{at(value):.1f}" cy="{y}" r="6"/>'
            )
            words = "1" if not j else re.search(r"\d+", column)[0]
            parts.append(text(at(value), y - 11, f"{value:g}", "value middle"))
            parts.append(text(at(value), y + 22, words, "tick"))
    parts.append(text(62, 77, "devices", "tick left"))
    caption = (
        "The memory that a model and Adam take on each device, without activations: on one device, "
        "or with <code>DataParallel</code> (grey), and with FSDP on 8 and 64 devices."
    )
    return figure("chart", caption, [svg(330, 66 + 58 * len(sizes), "Memory per device", parts)])


def gigabytes(cell: str) -> float:
    """The number of a cell such as "1.6 GB"."""
    number, unit = cell.split()
    return float(number) * {"GB": 1, "MB": 1e-3}[unit]


def at(gb: float) -> float:
    """The place of a number of gigabytes on the axis."""
    return 80 + 235 * math.log10(gb / 0.1) / math.log10(300 / 0.1)


def text(x: float, y: float, words: str, kind: str) -> str:
    """A text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A drawing."""
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
    return "\n".join([head, *parts, "</svg>"])


def figure(kind: str, caption: str, drawings: Iterable[str]) -> str:
    """Drawings side by side where there is room, with a caption."""
    inside = "\n".join(drawings)
    return f'<figure class="{kind}">\n{inside}\n<figcaption>{caption}</figcaption>\n</figure>\n'


CHARTS = {"steps": steps, "memory": memory}

if __name__ == "__main__":
    for name, draw in CHARTS.items():
        (DOCS / "_static" / f"{name}.html").write_text(draw())
