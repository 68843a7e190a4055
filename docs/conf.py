"""Builds the documentation site: `python -m sphinx -W -b html docs docs/_build`.

The pages that a newcomer reads first show what their code prints and draws; with `-t gallery` all
tutorials do, with `-t plain` none.
"""

import inspect
import os
import re
import sys
import textwrap
import tomllib
from importlib import import_module
from pathlib import Path

import nbformat
from docutils import nodes
from myst_nb.core.read import read_myst_markdown_notebook
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import flaxfit as ff

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = "flaxfit"
author = "The flaxfit authors"
copyright = author
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]

# The tests run every Python block of every page, in order; the site runs those of a few pages, in
# a kernel each.
WITH_OUTPUTS = ("getting-started", "tutorials/digits", "tutorials/gan")
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# Without the prompts and the results of examples.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = "flaxfit"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["flaxfit.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "repository_url": PROJECT["urls"]["Repository"],
    "use_repository_button": True,
    "navbar_persistent": [],  # The search is in the sidebar.
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}


AS_NOTEBOOK = """---
file_format: mystnb
kernelspec: {name: python3}
---
"""


def has_notebook(page: str) -> bool:
    """Whether readers run this page from its first line to its last."""
    return page == "getting-started" or page.startswith("tutorials/")


def as_notebook(text: str) -> str:
    """A page as the text of a notebook, whose cells are its Python blocks."""
    return AS_NOTEBOOK + text.replace("```python\n", "```{code-cell}\n")


def run_blocks(app: Sphinx, page: str, source: list[str]) -> None:
    """Makes notebooks of some pages, which myst-nb runs."""
    is_run = has_notebook(page) if app.tags.has("gallery") else page in WITH_OUTPUTS
    if is_run and not app.tags.has("plain"):
        source[0] = as_notebook(source[0])


def offer_notebook(app: Sphinx, page: str, template: str, context: dict, doctree: object) -> None:
    """Writes a page as a notebook beside it, and puts a button for that at its top."""
    if not has_notebook(page):
        return
    text = Path(app.env.doc2path(page)).read_text()
    notebook = Path(app.outdir, page).with_suffix(".ipynb")
    notebook.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(read_myst_markdown_notebook(as_notebook(text)), notebook)
    button = {
        "type": "link",
        "url": notebook.name,
        "icon": "fas fa-download",
        "tooltip": "Download as a notebook",
        "label": "download-notebook",
    }
    context["header_buttons"].insert(0, button)


def public_names(module_name: str) -> list[str]:
    """The names that a module of flaxfit offers: classes first, each kind in alphabetical order."""
    module = import_module(module_name)
    return sorted(
        module.__all__, key=lambda name: (not inspect.isclass(getattr(module, name)), name)
    )


def summary(module_name: str, names: list[str]) -> str:
    """A table of names and the first sentences about them."""
    rows = [
        f"   * - :py:obj:`{n} <{module_name}.{n}>`\n     - {about(module_name, n)}" for n in names
    ]
    head = ".. list-table::\n   :class: summary\n   :widths: auto\n\n"
    return head + "\n".join(rows) + "\n"


def about(module_name: str, name: str) -> str:
    """The first sentence of a docstring."""
    value = getattr(import_module(module_name), name)
    is_value = not (inspect.isclass(value) or inspect.isroutine(value))
    text = is_value and docstring_below(module_name, name) or inspect.getdoc(value) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence = re.match(r"(`[^`]*`|[^`])*?(?<!\.\.)(?<! al)[.](?= |$)|.*", paragraph)
    return as_restructured_text(sentence[0] if sentence else "")


def entry(module_name: str, name: str) -> str:
    """The autodoc directive for a public name."""
    value = getattr(import_module(module_name), name)
    kind = "class" if inspect.isclass(value) else "function"
    if module_name != ff.__name__ and getattr(ff, name, None) is value:
        same = f":py:obj:`{ff.__name__}.{name}`"
        return f".. py:{kind}:: {module_name}.{name}\n\n   The same as {same}.\n"
    if inspect.isclass(value):
        bases = {base.__module__.partition(".")[0] for base in value.__mro__[1:]}
        # Methods of other libraries, such as scikit-learn, are documented there.
        is_own = ff.__name__ in bases and bases <= {ff.__name__, "abc", "builtins", "typing"}
        inherited = "   :inherited-members:\n" if is_own else ""
        return f".. autoclass:: {module_name}.{name}\n   :members:\n{inherited}"
    if inspect.isroutine(value):
        return f".. autofunction:: {module_name}.{name}\n"
    if written := docstring_below(module_name, name):
        return f".. py:data:: {module_name}.{name}\n\n{textwrap.indent(written, '   ')}\n"
    return f".. autodata:: {module_name}.{name}\n   :no-value:\n"


def docstring_below(module_name: str, name: str) -> str:
    """What is written below a value, such as a metric, in the private module that makes it."""
    for private in sorted(sys.modules):
        if private.startswith(f"{module_name}._"):
            lines = ModuleAnalyzer.for_module(private).find_attr_docs().get(("", name))
            if lines:
                return as_restructured_text("\n".join(lines))
    return ""


class PublicNames(SphinxDirective):
    """Documents all public names of a module: none can be forgotten.

    A module, and the names that come first.
    """

    required_arguments = 1
    optional_arguments = 99

    def run(self) -> list[nodes.Node]:
        """The nodes of the summary and of all entries."""
        module_name, *first = self.arguments
        names = list(dict.fromkeys([*first, *public_names(module_name)]))
        entries = [summary(module_name, names), *(entry(module_name, name) for name in names)]
        entries = "\n".join(entries)
        return self.parse_text_to_nodes(f"````{{eval-rst}}\n{entries}\n````\n")


def as_restructured_text(text: str) -> str:
    """A docstring whose `code` in single backticks, as in Markdown, has two."""
    return re.sub(r"(?<![`:])`([^`]+)`(?!`)(?=(\w?))", as_literal, text)


def as_literal(match: re.Match) -> str:
    """Code in two backticks; a letter right behind it needs a mark before it."""
    return f"``{match[1]}``" + ("\\ " if match[2] else "")


def process_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """Changes the lines of a docstring in place, as autodoc wants it."""
    lines[:] = as_restructured_text("\n".join(lines)).split("\n")


def process_signature(app, what, name, obj, options, signature, returns) -> tuple | None:
    """Leaves out the arguments that nobody passes, and defaults that have no name."""
    if getattr(obj, "_is_protocol", False) or signature == "(*values)":
        return "", None
    return signature and re.sub(r"<[\w\s-]+>", "...", signature), returns


def skip_member(app, what, name, obj, skip: bool, options) -> bool | None:
    """Leaves out methods of other libraries and those without an example, which users do not call.

    Also Python's notes on aliases.
    """
    text = inspect.getdoc(obj) or ""
    if inspect.isfunction(obj) or inspect.ismethod(obj):
        module = obj.__module__
        owner = getattr(sys.modules.get(module), obj.__qualname__.partition(".")[0], None)
        is_declared = getattr(owner, "_is_protocol", False)
        is_ours = module.startswith(ff.__name__)
        return None if is_ours and (is_declared or ">>> " in text) else True
    return True if text.startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    """Adds the directive of the API pages, and makes the docstrings fit for it."""
    # Kernels import `bert` as a reader's own file, and flaxfit as this process does.
    models = Path(app.srcdir).parent / "examples" / "models"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(models), *sys.path])
    app.connect("source-read", run_blocks)
    app.connect("html-page-context", offer_notebook, priority=900)
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-skip-member", skip_member)
