"""The cost of a training step by XLA's analysis: operations, and memory per device."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun

from flaxfit.step._jaxpr import equations, parts_of
from flaxfit.tree import Function, PyTree


class StepCost(NamedTuple):
    """The operations of a training step, counted without compiling or running it."""

    flops: float
    """The floating-point operations on all devices; see `TrainLoop.step_flops`."""
    recomputes: bool
    """Whether some operations recompute activations (`jax.checkpoint`)."""


def cost_of(function: Function, *shapes: PyTree) -> StepCost:
    """Counts the floating-point operations of a function, without compiling or running it.

    It counts the program as traced, before optimization. XLA counts the body of a loop once; here
    the body of a `scan` counts `length` times. Opaque kernels count nothing.

    >>> import jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    >>> cost_of(lambda x: x @ x, x)
    StepCost(flops=8192.0, recomputes=False)
    """
    program = jax.make_jaxpr(function)(*shapes)
    # `jax.checkpoint` marks the forward pass that its backward pass repeats.
    recomputes = any(each.params.get("differentiated") for each in equations(program))
    return StepCost(_flops(program), recomputes)


def _flops(program: Any) -> float:
    # flops = once(program) + sum over outermost scans of length * flops(body) - once(body)
    return _counted_once(program) + sum(
        scan.params["length"] * _flops(scan.params["jaxpr"]) - _counted_once(scan.params["jaxpr"])
        for scan in _scans(program)
    )


def _counted_once(program: Any) -> float:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.in_avals]
    analysis = jax.jit(jaxpr_as_fun(program)).lower(*shapes).cost_analysis()
    return float((analysis or {}).get("flops", math.nan))


def _scans(program: Any) -> Iterator[Any]:
    """Yields the outermost scans of a program."""
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            yield equation
            continue
        for part in parts_of(equation):
            yield from _scans(part)


def memory_of(compiled: Any) -> int:
    """Returns the bytes per device of a compiled program: arguments, results, temporaries.

    Raises:
      ValueError: the backend does not report it.
    """
    analysis = compiled.memory_analysis() if hasattr(compiled, "memory_analysis") else None
    if analysis is None:
        raise ValueError(
            "The memory of a step is unknown: the backend does not report it, several processes "
            "share the step, or it runs eagerly."
        )
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.generated_code_size_in_bytes
    )
