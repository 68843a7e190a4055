"""Draws the charts of the site: `python docs/charts.py`.

They are parts of HTML pages, in whose colors they are drawn. Their numbers are those of tables of
the pages, and of `growth.json`, which `benchmarks.growth` writes. A test compares them.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
        "The time of a training step, as a multiple of that of the best hand-written loop of "
        "single steps. Shorter is faster.",
        [
            bars(model, {name: float(table[name][model]) for name in SHOWN}, most=4.8)
            for model in models
        ],
    )


def accelerator() -> str:
    """The time of a step on a GPU, a panel for each model."""
    table = read_table("performance", "on an H100")
    models = next(iter(table.values()))
    times = {
        model: {name: float(of[model]) for name, of in table.items() if of.get(model)}
        for model in models
    }
    return figure(
        "chart",
        "The time of a training step on an H100, as a multiple of that of the best hand-written "
        "loop. Shorter is faster.",
        [bars(model, times[model], most=9) for model in models],
    )


def bars(title: str, values: Mapping[str, float], *, most: float) -> str:
    """A panel of horizontal bars with their values, on a scale up to `most`."""
    scale = 150 / most
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


def growth() -> str:
    """What costs or memory become as the work grows, a panel for each kind of work."""
    content = json.loads((DOCS / "growth.json").read_text())
    rows = {each["section"]: each["rows"] for each in content["growth"]}
    saves = [{**row, "waits": row["ms until training"] / 1e3} for row in rows[SAVES]]
    drawings = [
        curves("Time of a step (us), parameter arrays", rows[ARRAYS], "us/step", "by hand"),
        curves("Time of a step (us), examples of an epoch", rows[EPOCHS], "us/step"),
        curves("Saving (s), MiB", saves, "s in all", "waits"),
        curves("Restoring 128 MiB (s), devices", rows[RESTORES], "s"),
        curves("Memory of a process (MiB), steps", rows[STEPS], "MiB"),
        curves("Memory of a process (MiB), calls of fit", rows[FITS], "MiB"),
    ]
    caption = (
        "Costs (upwards) as the work grows (to the right), on logarithmic scales. Grey: the faster "
        "of two hand-written loops; for saving, how long training waits."
    )
    return figure("chart", caption, drawings)


ARRAYS, EPOCHS = "Steps by the number of arrays", "Epochs by the number of examples"
SAVES, RESTORES = "Checkpoints by their size", "Restores by the number of devices"
STEPS, FITS = "Memory over the steps of a run", "Calls of fit of one model"


def curves(title: str, rows: Sequence[Mapping[str, float]], ours: str, peer: str = "") -> str:
    """A panel of one or two curves over the first value of the rows, with their ends in numbers."""
    work = next(iter(rows[0]))
    series = {name: kind for name, kind in ((peer, "peer"), (ours, "ours")) if name}
    sizes, values = [row[work] for row in rows], [row[name] for row in rows for name in series]
    across, up = Scale(sizes, 52, 300), Scale(values, 150, 42)
    parts = [text(0, 14, title, "title")]
    for value, x in across.ticks.items():
        parts.append(f'<path class="grid" d="M{x:.1f} 42V150"/>')
        parts.append(text(x, 182, short(value), "tick"))
    for value, y in up.ticks.items():
        parts.append(f'<path class="grid" d="M52 {y:.1f}H300"/>')
        parts.append(text(44, y + 4, short(value), "tick left"))
    for name, kind in series.items():
        points = [(across(row[work]), up(row[name])) for row in rows]
        path = " ".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="curve" d="M{path}"/>')
        parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points]
        for i, beside in ((0, 16), (-1, -6)):
            x, y = points[i]
            y += 18 if kind == "peer" else -9
            parts.append(text(x + beside, y, short(rows[i][name]), "value middle"))
    return svg(330, 190, title, parts)


class Scale:
    """The places of values between powers of ten, which are its ticks."""

    def __init__(self, values: Iterable[float], start: float, end: float):
        logs = [math.log10(value) for value in values]
        self.low, self.high = math.floor(min(logs)), math.ceil(max(logs))
        self.start, self.end = start, end
        self.ticks = {10.0**i: self(10.0**i) for i in range(self.low, self.high + 1)}

    def __call__(self, value: float) -> float:
        """The place of a value."""
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def short(value: float) -> str:
    """A number with at most three digits, and M or k for millions and thousands."""
    for unit, letter in ((1e6, "M"), (1e4, "k")):
        if value >= unit:
            return f"{value / (1e3 if letter == 'k' else unit):.3g}{letter}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


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


CHARTS = {"steps": steps, "accelerator": accelerator, "memory": memory, "growth": growth}

if __name__ == "__main__":
    for name, draw in CHARTS.items():
        (DOCS / "_static" / f"{name}.html").write_text(draw())
