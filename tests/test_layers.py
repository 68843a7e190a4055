"""The rooms of the package, and what each may import: a module imports only from these."""

import ast
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flaxfit"
MAY_IMPORT = {
    "tree": "",
    "distributed": "",
    "launch": "",
    "losses": "tree display",
    "optim": "tree",
    "display": "tree distributed",
    "metrics": "tree losses display",
    "data": "tree distributed display",
    "state": "tree optim display",
    "strategies": "tree display state",
    "modules": "tree data",
    "task": "tree losses optim display metrics data modules",
    "export": "tree display data modules",
    "step": "tree losses optim display data state modules task",
    "checkpoints": "tree distributed display metrics data state",
    "loop": ("tree distributed optim display metrics data state strategies modules task step"),
    "importers": "tree optim display state checkpoints",
    "callbacks": (
        "tree distributed optim display metrics state strategies modules export checkpoints loop"
    ),
    "model": (
        "tree optim display metrics data state strategies task modules export step checkpoints "
        "loop importers callbacks"
    ),
    "sklearn": "tree losses display strategies model",
}
ROOMS = {room: set(names.split()) for room, names in MAY_IMPORT.items()}
FILE_ROOMS = {"launch", "sklearn"}
PUBLIC = {"callbacks", "checkpoints", "data", "export", "importers", "losses", "metrics"}
PUBLIC |= {"modules", "optim"}
INTERNAL = ROOMS.keys() - PUBLIC - FILE_ROOMS
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


def imported_by(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The modules of flaxfit that the nodes of a source text import, wherever they stand."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=0) if module:
                whole = [f"{module}.{alias.name}" for alias in names]
                found = [name if name in FILES else module for name in whole]
            case _:
                continue
        yield from (name for name in found if name.startswith("flaxfit"))


@pytest.fixture(scope="module")
def nodes():
    """The nodes of each module, by its name."""
    return {name: [*ast.walk(ast.parse(path.read_text()))] for name, path in FILES.items()}


@pytest.fixture(scope="module")
def imports(nodes):
    """The modules of flaxfit that each module imports, by its name."""
    return {name: set(imported_by(own)) for name, own in nodes.items()}


def test_imports_are_read_from_every_form_of_the_statement():
    source = (
        "import numpy, flaxfit.tree._paths\n"
        "from flaxfit import data\n"
        "from flaxfit.state import _checkpoint\n"
        "def late():\n    from flaxfit.data._arrays import ArrayStream\n"
    )
    assert list(imported_by(ast.walk(ast.parse(source)))) == [
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


def test_a_module_imports_only_what_its_room_may(imports):
    refused = {}
    for name, others in imports.items():
        room = room_of(name)
        if found := {room_of(other) for other in others} - {room} - ROOMS[room]:
            refused[name] = found
    assert refused == {}


def test_internal_rooms_are_entered_by_their_doors(nodes):
    """The `__init__` of an internal room exports what other rooms may use."""
    refused = [
        (name, other)
        for name, own in nodes.items()
        for node in own
        for other in imported_by([node])
        if room_of(other) in INTERNAL and room_of(other) != room_of(name)
        if other.count(".") > 1
    ]
    assert refused == []


def test_no_arrow_is_allowed_in_vain(imports):
    used = {room: set() for room in ROOMS}
    for name, others in imports.items():
        used[room_of(name)] |= {room_of(other) for other in others}
    assert {room: names - used[room] for room, names in ROOMS.items() if names - used[room]} == {}


def test_modules_import_one_another_in_no_circle(imports):
    graph = {  # A package is imported before its files are.
        name: {other for other in others if not name.startswith(f"{other}.")}
        for name, others in imports.items()
    }
    TopologicalSorter(graph).prepare()  # Raises CycleError for a circle.


def hides(node: ast.AST) -> bool:
    """Whether imports or annotations are for checkers only, put off, or relative."""
    match node:
        case ast.Name(id="TYPE_CHECKING") | ast.ImportFrom(module="__future__"):
            return True
        case ast.ImportFrom(level=level):
            return level > 0
    return False


def test_a_module_hides_no_import_and_no_annotation(nodes):
    assert [name for name, own in nodes.items() if any(map(hides, own))] == []
    examples = (
        "TYPE_CHECKING",
        "from __future__ import annotations",
        "from . import a",
        "import a",
    )
    assert [any(map(hides, ast.walk(ast.parse(each)))) for each in examples] == [True] * 3 + [False]
