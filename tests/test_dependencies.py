"""What the library imports is declared in pyproject.toml."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = {"grain": "grain", "orbax": "orbax-checkpoint", "sklearn": "scikit-learn"}
"""Distributions whose module has another name, or which share one."""
GIVEN = {
    "IPython": "a notebook has it",
    "pandas": "a method of `History` makes its frames",
    "torch": "looked at only where tensors of it were given",
}
"""Modules that are imported only where the user has imported them."""


def imported():
    """The modules of others that the library imports, and where."""
    for path in (ROOT / "flaxfit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    found = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module), level=0):
                    found = [module]
                case _:
                    continue
            for module in {name.partition(".")[0] for name in found}:
                if module not in sys.stdlib_module_names | {"flaxfit"}:
                    yield module, path.name


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"]]
    for name, needed in extras.items():
        requirements += needed if name not in {"dev", "docs", "test", "test-all"} else []
    declared = {re.split(r"[\[><=;~ ]", each)[0].lower() for each in requirements}
    lacking = {
        (module, file)
        for module, file in imported()
        if NAMES.get(module, module).lower() not in declared and module not in GIVEN
    }
    assert lacking == set()
    assert GIVEN.keys() <= {module for module, _ in imported()}
