"""The rooms of the package, and what each may import: a module imports only from these."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flaxfit"
MAY_IMPORT = {
    "tree": "",
    "distributed": "",
    "launch": "",
    "losses": "tree",
    "optim": "tree",
    "display": "tree distributed",
    "metrics": "tree losses display",
    "data": "tree distributed display",
    "state": "tree optim display",
    "strategies": "tree state",
    "modules": "tree data",
    "task": "tree losses optim display metrics data modules",
    "export": "tree display data modules",
    "step": "tree losses optim display data state modules task",
    "checkpoints": "tree distributed display metrics data state",
    "loop": ("tree distributed optim display metrics data state strategies modules task step"),
    "importers": "tree optim display state checkpoints",
    "callbacks": (
        "tree distributed optim display metrics state strategies modules checkpoints export"
    ),
    "model": (
        "tree optim display metrics data state strategies task modules export step checkpoints "
        "loop importers callbacks"
    ),
    "sklearn": "tree losses display strategies model",
}
ROOMS = {room: set(names.split()) for room, names in MAY_IMPORT.items()}
FILE_ROOMS = {"launch", "sklearn"}
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE) != Path("__init__.py")
)


def name_of(path: Path) -> str:
    """The dotted name of a module: "flaxfit.tree._paths"."""
    name = ".".join(("flaxfit", *path.relative_to(PACKAGE).with_suffix("").parts))
    return name.removesuffix(".__init__")


FILES = {name_of(path): path for path in MODULES}


def room_of(name: str) -> str:
    """The room of a module: "tree" of "flaxfit.tree._paths"."""
    return name.split(".")[1]


def imported_by(source: str) -> Iterator[str]:
    """The modules of flaxfit that a source text imports, wherever in the text it does."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=0) if module:
                whole = [f"{module}.{alias.name}" for alias in names]
                found = [name if name in FILES else module for name in whole]
            case _:
                continue
        yield from (name for name in found if name.startswith("flaxfit"))


def test_imports_are_read_from_every_form_of_the_statement():
    source = (
        "import numpy, flaxfit.tree._paths\n"
        "from flaxfit import data\n"
        "from flaxfit.state import _checkpoint\n"
        "def late():\n    from flaxfit.data._arrays import ArrayStream\n"
    )
    assert list(imported_by(source)) == [
        "flaxfit.tree._paths",
        "flaxfit.data",
        "flaxfit.state._checkpoint",
        "flaxfit.data._arrays",
    ]


def test_the_top_level_holds_rooms_and_public_modules_only():
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert names == {
        "__init__.py",
        "py.typed",
        *(name if name not in FILE_ROOMS else f"{name}.py" for name in ROOMS),
    }


def test_a_room_says_what_it_is_for_and_imports_no_higher_one():
    for room in ROOMS.keys() - FILE_ROOMS:
        assert ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())), room
    list(TopologicalSorter(ROOMS).static_order())  # Raises CycleError for a circle.


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_room_may(path):
    room = room_of(name_of(path))
    imported = {room_of(name) for name in imported_by(path.read_text())} - {room}
    assert imported <= ROOMS[room]


def test_no_arrow_is_allowed_in_vain():
    used = {room: set() for room in ROOMS}
    for name, path in FILES.items():
        used[room_of(name)] |= {room_of(other) for other in imported_by(path.read_text())}
    assert {room: names - used[room] for room, names in ROOMS.items() if names - used[room]} == {}


def test_modules_import_one_another_in_no_circle():
    graph = {name: set(imported_by(path.read_text())) for name, path in FILES.items()}
    for name, others in graph.items():  # A package is imported before its files are.
        graph[name] = {other for other in others if not name.startswith(f"{other}.")}
    TopologicalSorter(graph).prepare()  # Raises CycleError for a circle.


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_hides_no_import_and_no_annotation(path):
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    futures = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    assert "TYPE_CHECKING" not in names
    assert not futures
    assert not relative
