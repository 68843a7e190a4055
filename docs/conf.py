"""Builds the documentation site: `python -m sphinx -W -b html docs docs/_build`.

With `-t outputs` the pages that a newcomer reads first show what their code prints and draws.
"""

import inspect
import os
import re
import sys
import textwrap
import tomllib
from importlib import import_module
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import flaxfit as ff

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = "flaxfit"
author = "The flaxfit authors"
copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]
exclude_patterns = ["_build"]

# The tests run every Python block of every page, in order; the site runs those of a few pages,
# in a kernel each, if told to. Sphinx gives this file the tags of the command line.
nb_execution_mode = "force" if globals()["tags"].has("outputs") else "off"
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


def run_blocks(app: Sphinx, page: str, source: list[str]) -> None:
    """Makes a notebook of a page, which myst-nb runs."""
    if app.tags.has("outputs") and re.match("getting-started|tutorials/", page):
        source[0] = AS_NOTEBOOK + source[0].replace("```python\n", "```{code-cell}\n")


def public_names(module_name: str) -> list[str]:
    """The names that a module of flaxfit offers: classes first, each kind in alphabetical order."""
    module = import_module(module_name)
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "").startswith(ff.__name__)
    ]
    return sorted(names, key=lambda name: (not inspect.isclass(getattr(module, name)), name))


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
    """Documents all public names of a module: none can be forgotten."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The nodes of all entries."""
        (module_name,) = self.arguments
        entries = "\n".join(entry(module_name, name) for name in public_names(module_name))
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


def skip_member(app, what, name, obj, skip: bool, options) -> bool | None:
    """Leaves out methods that other libraries add to a class, and Python's notes on aliases."""
    is_theirs = inspect.isfunction(obj) and not obj.__module__.startswith(ff.__name__)
    is_alias = (inspect.getdoc(obj) or "").startswith("Alias for field number")
    return True if is_theirs or is_alias else None


def setup(app: Sphinx) -> None:
    """Adds the directive of the API pages, and makes the docstrings fit for it."""
    if app.tags.has("outputs"):
        # Kernels import `bert` as a reader's own file, and flaxfit as this process does.
        models = Path(app.srcdir).parent / "examples" / "models"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(models), *sys.path])
    app.connect("source-read", run_blocks)
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-skip-member", skip_member)
