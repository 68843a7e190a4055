"""Draws the pictures of README.md: `python docs/pictures.py [folder]`.

They show what its block "Fit" prints and plots when it runs in a terminal.
"""

import fcntl
import html
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
COLUMNS = 62
"""Of the terminal: few enough to read the picture on a phone."""

CELL, LINE, MARGIN, BAR = 9, 20, 18, 34
"""Pixels: the width of a character, the height of a line, and what is around them."""

SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>{title}</title>
<style>
text {{
  font: 15px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre;
}}
</style>
<rect width="{width}" height="{height}" rx="9" fill="#1d2126"/>
<circle cx="20" cy="18" r="5.5" fill="#ff5f57"/>
<circle cx="38" cy="18" r="5.5" fill="#febc2e"/>
<circle cx="56" cy="18" r="5.5" fill="#28c840"/>
<text x="{middle}" y="23" fill="#9aa4ad" text-anchor="middle">{title}</text>
{lines}
</svg>
"""
THEME = TerminalTheme(
    (29, 33, 38),
    (214, 219, 224),
    [(90, 98, 107), (255, 123, 114), (95, 208, 125), (227, 179, 65)]
    + [(121, 184, 255), (210, 168, 255), (86, 212, 221), (214, 219, 224)],
)


def python_blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def in_a_terminal(code: str) -> str:
    """What Python prints that runs some code in a terminal, with its control characters."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    hidden = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "XLA_FLAGS", "CI")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"TERM": "xterm-256color", "JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    printed = b"".join(iter(lambda: read(ours), b""))
    os.close(ours)
    if process.wait() != 0:
        raise RuntimeError(f"The code failed, and printed:\n{printed.decode()}")
    return printed.decode().replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    """The next bytes from a terminal, none at its end, which Linux reports as an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def draw_terminal(printed: str, title: str) -> str:
    """The SVG of a terminal with what is left there of printed text."""
    lines = list(AnsiDecoder().decode(printed.rstrip()))
    width = 2 * MARGIN + COLUMNS * CELL
    return SVG.format(
        title=title,
        width=width,
        height=BAR + MARGIN + len(lines) * LINE,
        middle=width // 2,
        lines="\n".join(draw_line(text, n) for n, text in enumerate(lines) if text.plain.strip()),
    )


def draw_line(line: Text, n: int) -> str:
    """The SVG of a line of a terminal, in which each character has the same width."""
    spans = "".join(
        f"<tspan{attributes(style)}>{html.escape(text)}</tspan>"
        for text, style, _ in line.render(Console())
        if text
    )
    place = f'x="{MARGIN}" y="{BAR + (n + 1) * LINE - 4}"'
    length = f'textLength="{len(line.plain) * CELL}" lengthAdjust="spacingAndGlyphs"'
    return f"<text {place} {length}>{spans}</text>"


def attributes(style: Style | None) -> str:
    """How SVG writes a style."""
    style = style or Style.null()
    color = style.color or Color.default()
    written = f' fill="{color.get_truecolor(THEME).hex}"'
    if style.bold:
        written += ' font-weight="bold"'
    return written + (' fill-opacity="0.65"' if style.dim else "")


CURVES = """
import matplotlib.pyplot as plt
plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 13}
for name, style in (("curves", {}), ("curves-dark", "dark_background")):
    with plt.style.context(style):
        figure = history.plot()[0].figure
        path = rf"{folder}/{name}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
"""


def main(folder: Path) -> None:
    """Draws the terminal, and the curves for light and for dark pages, into a folder."""
    block, *_ = python_blocks("README.md")
    printed = in_a_terminal(f"{block}\nfolder = {str(folder)!r}\n{CURVES}")
    (folder / "run.svg").write_text(draw_terminal(printed, "python digits.py"))


if __name__ == "__main__":
    main(Path(*sys.argv[1:]) if sys.argv[1:] else ROOT / "docs" / "_static")
