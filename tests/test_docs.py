"""The documentation: every Python block of every page runs, in order, without a warning.

The blocks of a page share one namespace. `<!-- not run: reason -->` on the line above a block
leaves it out; `<!-- needs torch, grain -->` leaves it out where one of these is not installed.
"""

import codeop
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from marks import slow, thorough

ROOT = Path(__file__).parents[1]


def name_of(path):
    """The name of a page, such as "docs/faq.md"."""
    return str(path.relative_to(ROOT))


PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
    if "```python" in path.read_text()
]
FENCE = re.compile(
    r"^(?:<!-- (?P<kind>not run|needs)\b:?(?P<words>.*?)-->\n+)?```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A Python block of a page, and the note above it, if any."""

    line: int
    code: str
    kind: str | None
    words: str


def blocks(text: str) -> list[Block]:
    """The Python blocks of a Markdown text."""
    return [
        Block(
            line=text.count("\n", 0, match.start("code")),
            code=match["code"],
            kind=match["kind"],
            words=(match["words"] or "").strip(),
        )
        for match in FENCE.finditer(text)
    ]


def missing(block: Block) -> list[str]:
    """The packages that a block needs and that are not installed."""
    names = re.findall(r"[\w.]+", block.words) if block.kind == "needs" else []
    return [name for name in names if find_spec(name) is None]


def run(text: str, path: Path) -> list[str]:
    """Runs the blocks of a page; returns the packages that kept some of them from running."""
    namespace = {"__name__": "__main__"}
    lacking = []
    for block in blocks(text):
        if block.kind == "not run":
            continue
        if names := missing(block):
            lacking += names
            continue
        # As many empty lines as stand before the block: tracebacks then name the page's lines.
        code = compile("\n" * block.line + block.code, str(path), "exec")
        exec(code, namespace)
    return lacking


def test_blocks_of_a_page_share_names_and_report_its_lines(tmp_path):
    page = "# A page\n\n```python\nx = 1\n```\n\n```sh\nls\n```\n\n```python\nassert x == 2\n```\n"
    with pytest.raises(AssertionError) as caught:
        run(page, tmp_path / "page.md")
    assert caught.traceback[-1].lineno + 1 == page.splitlines().index("assert x == 2") + 1


def test_notes_leave_blocks_out():
    page = (
        "<!-- not run: it would download -->\n```python\n1 / 0\n```\n"
        "<!-- needs no_such_package -->\n```python\nimport no_such_package\n```\n"
    )
    assert run(page, Path("page.md")) == ["no_such_package"]


def test_a_block_that_is_not_run_says_why():
    found = [(name_of(path), block) for path in PAGES for block in blocks(path.read_text())]
    assert not [(name, b.line) for name, b in found if b.kind == "not run" and not b.words]


QUICK = ("README.md", "CONTRIBUTING.md")
ON_FOUR_DEVICES = ("data.md", "scaling.md")
ON_THE_SITE = ("getting-started.md", "digits.md", "gan.md")
"""The pages that `test_site.py` runs, and fails if they warn."""
ON_ONE_DEVICE = [
    name_of(path) for path in PAGES if path.name not in (*QUICK, *ON_FOUR_DEVICES, *ON_THE_SITE)
]
"""Where programs compile in half the time."""


def mark(path):
    """When a page runs on as many devices as other tests have."""
    if path.name in QUICK:
        return path
    return (slow if path.name in ON_FOUR_DEVICES else thorough)(path)


@pytest.mark.parametrize("path", [mark(path) for path in PAGES], ids=name_of)
def test_the_code_of_a_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(ROOT / "examples" / "models")
    lacking = run(path.read_text(), path)
    if lacking:
        pytest.skip(f"some blocks need {', '.join(lacking)}")


@pytest.mark.slow
def test_the_code_of_every_other_page_runs_on_one_device(run_child):
    names = [f"{__file__}::test_the_code_of_a_page_runs[{name}]" for name in ON_ONE_DEVICE]
    done = run_child(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "", *names],
        env={**os.environ, "FLAXFIT_TEST_DEVICES": "1", "FLAXFIT_TEST_PASSED": ""},
        cwd=ROOT,
        seconds=900,
    )
    assert done.returncode == 0, done.stdout
    if "SKIPPED" in done.stdout:
        pytest.skip(done.stdout)


def statements_at_the_prompt(code: str) -> list[str]:
    """The statements that Python's prompt makes of lines that are pasted there."""
    statements, lines = [], []
    for line in [*code.splitlines(), ""]:
        lines.append(line)
        if codeop.compile_command("\n".join(lines), symbol="single") is not None:
            statements.append("\n".join(lines))
            lines = []
    assert not any(lines), lines
    return statements


def test_an_empty_line_ends_a_class_at_the_prompt():
    with pytest.raises(SyntaxError):
        statements_at_the_prompt("class A:\n    x = 1\n\n    y = 2\n")


def test_the_blocks_of_the_readme_can_be_pasted_at_the_prompt():
    for block in blocks((ROOT / "README.md").read_text()):
        assert statements_at_the_prompt(block.code)


def test_a_command_of_the_readme_is_one_line():
    readme = (ROOT / "README.md").read_text()
    found = re.findall(r"^<!-- command: (\w+) -->\n```sh\n.*\n```$", readme, re.MULTILINE)
    assert found == ["example", "tests"]
