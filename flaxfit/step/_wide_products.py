"""Products of a model that a precision of 16 bits does not reach, as the module sets its dtype."""

from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch
from flaxfit.step._forward import apply_model
from flaxfit.step._jaxpr import equations
from flaxfit.step._validate import shapes_of
from flaxfit.tree._functions import runs_eagerly
from flaxfit.tree._types import Function, PyTree

_PRODUCTS = ("conv_general_dilated", "dot_general")


def why_wide(task: Any, state: PyTree, batch: Batch, bind: Function) -> str:
    """What to say where the precision of a task does not reach all products of its model; or "".

    Args:
      task: a `TrainTask`.
      state: the training state.
      batch: the first batch.
      bind: of the strategy, to trace as it does.
    """
    if task.precision not in ("bfloat16", "float16"):
        return ""

    def outputs(state: PyTree, batch: Batch) -> Any:
        return apply_model(task, state.params, state.model_state, batch, state.key)[0]

    bound = bind(outputs)
    if runs_eagerly(bound):
        return ""
    dtypes = product_dtypes(jax.make_jaxpr(bound)(shapes_of(state), shapes_of(batch)))
    wide = [dtype for dtype in dtypes if dtype.itemsize > 2]
    if not wide:
        return ""
    return (
        f"precision={task.precision!r} has no effect on {len(wide)} of {len(dtypes)} products: the "
        f"module computes them in {wide[0]}. Where it sets dtype={wide[0]}, set dtype=None or "
        f"jnp.{task.precision}"
    )


def product_dtypes(program: Any) -> list[Any]:
    """The dtypes that a jaxpr multiplies matrices and convolves in, where these are floating.

    >>> x = jnp.ones((2, 2), "bfloat16")
    >>> [str(dtype) for dtype in product_dtypes(jax.make_jaxpr(jnp.matmul)(x, x))]
    ['bfloat16']
    """
    factors = (
        [variable.aval.dtype for variable in equation.invars[:2]]
        for equation in equations(program)
        if equation.primitive.name in _PRODUCTS
    )
    # A product of two dtypes reads one of its factors in 16 bits at least.
    narrowest = (min(pair, key=lambda dtype: dtype.itemsize) for pair in factors)
    return [dtype for dtype in narrowest if jnp.issubdtype(dtype, jnp.floating)]
