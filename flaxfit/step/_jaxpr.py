"""What a jaxpr holds: the programs inside of its equations, and whether an operation is in any."""

from collections.abc import Iterator
from typing import Any

import jax


def parts_of(equation: Any) -> list[Any]:
    """The programs that an equation of a jaxpr holds, such as the body of a loop."""
    parameters = jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_program)
    return [each for each in parameters if _is_program(each)]


def holds(program: Any, name: str) -> bool:
    """Whether a jaxpr, or any program in it, holds an operation of this name; looks at each once.

    >>> import jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda x: jax.lax.map(jnp.sin, x))(jnp.ones(3))
    >>> holds(program, "sin"), holds(program, "cos")
    (True, False)
    """
    return any(equation.primitive.name == name for equation in equations(program))


def names_axis(program: Any) -> bool:
    """Whether an operation in a jaxpr names a mapped axis, as `lax.psum` and `lax.all_gather` do.

    >>> import jax.numpy as jnp
    >>> total = lambda x: jax.lax.psum(x, "rows")
    >>> program = jax.make_jaxpr(total, axis_env=[("rows", 2)])(jnp.ones(3))
    >>> names_axis(program), names_axis(jax.make_jaxpr(jnp.sum)(jnp.ones(3)))
    (True, False)
    """
    for equation in equations(program):
        named = (equation.params.get(name, ()) for name in ("axes", "axis_name"))
        if any(isinstance(axis, str) for axis in jax.tree.leaves(tuple(named))):
            return True
    return False


def equations(program: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all programs in it, those of each program once."""
    seen: set[int] = set()
    left = [program]
    while left:
        one = left.pop()
        if (number := id(getattr(one, "jaxpr", one))) in seen:
            continue
        seen.add(number)
        for equation in one.eqns:
            yield equation
            left += parts_of(equation)


def _is_program(part: Any) -> bool:
    return hasattr(part, "eqns")  # A class or two, by the version of JAX.
