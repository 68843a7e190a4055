"""Several steps in one program: a loop, or one step behind the other where a loop would be slow.

XLA has fast kernels for convolutions on a CPU, but not inside of a loop: there the gradients of
usual ones take ten times as long and more, and are rounded otherwise. Written out one behind the
other, steps take about as long as by themselves, and give the same bits, as long as the compiler
keeps them apart: that of JAX 0.10 fuses what stands at their borders. What it costs is compiling,
whose time and memory grow with the number of the steps.
"""

from collections.abc import Callable
from typing import Any

import jax

MOST_UNROLLED = 4
"""How many steps are written out at most: with more, steps take no less time, compiling does."""


def scan(body: Callable[..., Any], init: Any, xs: Any, *, unroll: bool) -> tuple[Any, Any]:
    """`jax.lax.scan`, without a loop if so wished: then all turns stand in the program."""
    if not unroll:
        return jax.lax.scan(body, init, xs)

    def apart(carry: Any, x: Any) -> tuple[Any, Any]:
        # Asks that nothing be computed across two turns, which would change what is rounded.
        held, x = jax.lax.optimization_barrier((carry, x))
        new, y = body(held, x)
        # What a turn leaves as it is goes on itself: so it is seen that the whole leaves it.
        return jax.tree.map(lambda c, h, n: c if n is h else n, carry, held, new), y

    return jax.lax.scan(apart, init, xs, unroll=True)
