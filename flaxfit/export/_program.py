"""Traces methods of a module to programs in a version of StableHLO that older readers know."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.export
from jax.extend.mlir.dialects import stablehlo

from flaxfit.display import first_line
from flaxfit.export._spec import Specs, shape_structs
from flaxfit.tree import PyTree

PORTABLE = "1.13.0"
"""The version of StableHLO to write: TensorFlow 2.20 and JAX 0.9 read it."""
PLATFORMS = ("cpu", "cuda", "tpu")


@dataclasses.dataclass(frozen=True)
class Method:
    """One function of a module, and its inputs."""

    name: str
    function: Callable[[Mapping[str, PyTree], PyTree], PyTree]
    """`(parameters by name, inputs) -> outputs`; inputs are a tuple, or a dict of keywords."""
    input_spec: Specs
    jit_compile: bool


def export_method(
    method: Method, params: Mapping[str, jax.Array], platforms: Sequence[str]
) -> jax.export.Exported:
    """Traces a method for some platforms, as a function `(parameters by name, inputs)`."""
    structs = {
        name: jax.ShapeDtypeStruct(param.shape, param.dtype) for name, param in params.items()
    }
    exporting = jax.export.export(jax.jit(method.function), platforms=tuple(platforms))
    try:
        exported = exporting(structs, shape_structs(method.input_spec))
        return dataclasses.replace(exported, _get_vjp=lambda _: _gradient(exported, method.name))
    except Exception as error:
        # By name, since JAX has moved this class; `len(x)` raises a TypeError instead.
        is_inconclusive = type(error).__name__ == "InconclusiveDimensionOperation"
        if not is_inconclusive and "_DimExpr" not in str(error):
            raise
        dims = [d for spec in jax.tree.leaves(method.input_spec) for d in spec.shape]
        names = sorted({d for d in dims if isinstance(d, str)})
        raise ValueError(
            f"Cannot export {method.name!r} with symbolic dimensions {names}: the model's code "
            f"depends on their size ({first_line(error)}). Write x.shape[0] for len(x), give them "
            "fixed sizes in input_spec, or add constraints."
        ) from error


def in_version(exported: jax.export.Exported, version: str | None) -> jax.export.Exported:
    """Converts a program and its gradient to a StableHLO version; None: keeps JAX's own."""
    if version is None:
        return exported
    try:
        text = str(exported.mlir_module()).encode()
        program = stablehlo.serialize_portable_artifact_str(text, version)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"StableHLO {version} cannot express this program ({first_line(error)}): pass a "
            "later stablehlo_version, or None for JAX's own."
        ) from error
    gradient = (lambda _: in_version(exported.vjp(), version)) if exported.has_vjp() else None
    return dataclasses.replace(exported, mlir_module_serialized=program, _get_vjp=gradient)


def _gradient(exported: jax.export.Exported, name: str) -> jax.export.Exported:
    try:
        return exported.vjp()
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"Cannot export the gradient of {name!r}, which JAX cannot differentiate "
            f"({first_line(error)}). Pass gradients=False to export it without."
        ) from error
