"""What a jaxpr holds: the programs inside of its equations, and whether an operation is in any."""

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
    seen: set[int] = set()
    left = [program]
    while left:
        one = left.pop()
        if (number := id(getattr(one, "jaxpr", one))) in seen:
            continue
        seen.add(number)
        for equation in one.eqns:
            if equation.primitive.name == name:
                return True
            left += parts_of(equation)
    return False


def _is_program(part: Any) -> bool:
    return hasattr(part, "eqns")  # A class or two, by the version of JAX.
