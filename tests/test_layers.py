"""The layers of the package: a module imports only from lower layers and its own package."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flaxfit"
LAYERS = (
    {"_alone", "_debugging", "_free_memory", "_idle_gpu", "_is_function"}
    | {"_jaxpr", "_keys", "_local_path", "_narrow", "_order", "_put"}
    | {"_processes", "_pyplot", "_unrolled", "_weights", "_whole_number", "_zstd_codes", "launch"},
    {"_compilation_cache", "_initialize", "_zstd"}
    | {"_rules", "_batch", "_row_coupling", "_callback_states", "_chart", "_cost", "_display"}
    | {"_interrupt", "_later"}
    | {"_precision", "_totals"},
    {"_arrays", "_axes", "_by_row", "_explain", "_ocdbt", "_html", "_replicas", "_state_dict"},
    {"_inference_state", "_optimizer_axes", "losses", "optim"},
    {"_held", "_state", "metrics", "strategies", "data", "modules"},
    {"_labels", "_regression_targets"},
    {"_by_output", "_monitor", "_snapshot"},
    {"_task", "_checkpoint", "_feed", "_own_step", "_start", "_whole_loss"},
    {"_forward"},
    {"_callback_list", "_gradient", "_own_rows", "_agreement", "_borrowed"},
    {"_source", "_step", "_history", "checkpoints", "export"},
    {"_update", "_inspect", "_programs"},
    {"_intake", "_tally", "_wide_products"},
    {"_stepper", "_multi_task"},
    {"_trial"},
    {"_loop", "_evaluate", "_predict", "callbacks", "importers"},
    {"_find_batch_size", "_find_lr", "_fit", "_run_folder", "_warm_start"},
    {"_current"},
    {"_model"},
    {"sklearn"},
)
LAYER_OF = {part: number for number, parts in enumerate(LAYERS, start=1) for part in parts}
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE) != Path("__init__.py")
)


def part_of(path: Path) -> str:
    """The part of the package, a top module or a sub-package, that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(source: str) -> Iterator[str]:
    """The parts of flaxfit that a source text imports, wherever in the text it does."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module="flaxfit", names=names):
                modules = [f"flaxfit.{alias.name}" for alias in names]
            case ast.ImportFrom(module=module, level=0) if module:
                modules = [module]
            case _:
                continue
        yield from (name.split(".")[1] for name in modules if name.startswith("flaxfit."))


def test_imports_are_read_from_every_form_of_the_statement():
    source = (
        "import numpy, flaxfit._rules\n"
        "from flaxfit import _state\n"
        "def late():\n    from flaxfit.data._arrays import ArrayStream\n"
    )
    assert set(imported_parts(source)) == {"_rules", "_state", "data"}


def test_every_part_of_the_package_has_a_layer():
    assert {part_of(path) for path in MODULES} <= LAYER_OF.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_lower_layers(path):
    part = part_of(path)
    others = set(imported_parts(path.read_text())) - {part}
    assert not [other for other in others if LAYER_OF.get(other, 0) >= LAYER_OF.get(part, 0)]


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
