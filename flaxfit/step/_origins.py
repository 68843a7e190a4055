"""The origins of the values of a jaxpr: its inputs, a softmax, a sigmoid; and its look-ups."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from flaxfit.step._jaxpr import parts_of

_KEEP = frozenset(
    (
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "expand_dims",
        "reshape",
        "squeeze",
        "stop_gradient",
        "transpose",
    )
)
SOFTMAX, SIGMOID = "softmax", "sigmoid"
_EXP, _SUM_OF_EXP = "exp", "sum of exp"

Origin = Hashable
"""The number of an input, the name of an operation, or None."""


class LookUp(NamedTuple):
    """Rows of a table, chosen by an input of the program."""

    input: int
    """The number of the input."""
    n_rows: int
    """The number of rows of the table."""


class Origins(NamedTuple):
    """The known facts about a program."""

    outputs: list[Origin]
    """Of each output."""
    look_ups: set[LookUp]


def origins_of(program: Jaxpr) -> Origins:
    """Follows the inputs of a closed jaxpr through what changes their shape or dtype alone."""
    found: set[LookUp] = set()
    known: dict[Hashable, list[Origin]] = {}

    def outputs_of(program: Any, given: Sequence[Origin]) -> list[Origin]:
        inner = getattr(program, "jaxpr", program)
        key = id(inner), tuple(given)
        if key not in known:
            origins: dict[Any, Origin] = dict(zip(inner.invars, given, strict=True))
            for equation in inner.eqns:
                inputs = [
                    None if isinstance(each, Literal) else origins.get(each)
                    for each in equation.invars
                ]
                origins.update(zip(equation.outvars, of_equation(equation, inputs), strict=True))
            known[key] = [
                None if isinstance(each, Literal) else origins.get(each) for each in inner.outvars
            ]
        return known[key]

    def of_equation(equation: JaxprEqn, inputs: list[Origin]) -> list[Origin]:
        parts = parts_of(equation)
        if len(parts) == 1 and equation.primitive.name not in ("scan", "while"):
            inner = getattr(parts[0], "jaxpr", parts[0])
            if len(inner.invars) == len(inputs) and len(inner.outvars) == len(equation.outvars):
                return outputs_of(parts[0], inputs)
        if equation.primitive.name == "gather" and isinstance(inputs[1], int):
            found.update(_look_up(equation, inputs[1]))
        unknown: list[Origin] = [None] * len(equation.outvars)
        if parts or len(unknown) != 1 or not inputs:
            return unknown
        return [_result(equation.primitive.name, inputs)]

    outputs = outputs_of(program, range(len(program.jaxpr.invars)))
    return Origins(outputs, found)


def _result(name: str, inputs: list[Origin]) -> Origin:
    if name in _KEEP:
        return inputs[0]
    if name == "select_n":  # Of an index, and the index from the end.
        return inputs[1]
    if name == "exp":
        return _EXP
    if name == "reduce_sum" and inputs[0] == _EXP:
        return _SUM_OF_EXP
    if name == "div" and inputs == [_EXP, _SUM_OF_EXP]:
        return SOFTMAX
    return SIGMOID if name == "logistic" else None


def _look_up(equation: JaxprEqn, number: int) -> list[LookUp]:
    axes = equation.params["dimension_numbers"].start_index_map
    if len(axes) != 1 or equation.params["slice_sizes"][axes[0]] != 1:
        return []
    table: Any = equation.invars[0].aval
    return [LookUp(number, table.shape[axes[0]])]
