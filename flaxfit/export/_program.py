"""Programs: methods traced into StableHLO of a version that older readers know."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.export
from jax.extend.mlir.dialects import stablehlo

from flaxfit.export._spec import shape_structs

PORTABLE = "1.13.0"
"""The version of StableHLO that is written: TensorFlow 2.20 and JAX 0.9 read it."""
PLATFORMS = ("cpu", "cuda", "tpu")


class _Module(Protocol):
    """What is asked of a `JaxModule`, whose file imports this one."""

    @property
    def method_specs(self) -> Mapping[str, Any]: ...

    @property
    def named_params(self) -> dict[str, jax.Array]: ...


def export_method(module: _Module, name: str, platforms: Sequence[str]) -> jax.export.Exported:
    """Traces a method for some platforms, as a function `(parameters by name, inputs)`.

    Raises:
      ValueError: the model's code depends on the size of a symbolic dimension.
    """
    method = module.method_specs[name]
    params = {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for key, leaf in module.named_params.items()
    }
    exporting = jax.export.export(jax.jit(method.function), platforms=tuple(platforms))
    try:
        exported = exporting(params, shape_structs(method.input_spec))
        return dataclasses.replace(exported, _get_vjp=lambda _: _gradient(exported, name))
    except Exception as error:
        # By its name, since JAX has moved this class; `len(x)` and the like raise a TypeError.
        is_inconclusive = type(error).__name__ == "InconclusiveDimensionOperation"
        if not is_inconclusive and "_DimExpr" not in str(error):
            raise
        dims = [d for spec in jax.tree.leaves(method.input_spec) for d in spec.shape]
        names = sorted({d for d in dims if isinstance(d, str)})
        raise ValueError(
            f"Cannot export {name!r} with symbolic dimensions {names}: the model's code depends "
            f"on their size ({_first_line(error)}). Write x.shape[0] for len(x), give them fixed "
            "sizes in input_spec, or add constraints."
        ) from error


def in_version(exported: jax.export.Exported, version: str | None) -> jax.export.Exported:
    """The same program, and its gradient, in an older version of StableHLO; None: in JAX's own.

    Raises:
      ValueError: that version cannot express the program.
    """
    if version is None:
        return exported
    try:
        text = str(exported.mlir_module()).encode()
        program = stablehlo.serialize_portable_artifact_str(text, version)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"StableHLO {version} cannot express this program ({_first_line(error)}): pass a "
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
            f"({_first_line(error)}). Pass gradients=False to export it without."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
