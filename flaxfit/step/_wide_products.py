"""Products of a model that a precision of 16 bits does not reach, as the module sets its dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from flaxfit.data._batch import Batch
from flaxfit.step._jaxpr import equations
from flaxfit.step._model_call import apply_model
from flaxfit.step._random import rngs_of
from flaxfit.task._task import TrainTask
from flaxfit.tree._functions import runs_eagerly
from flaxfit.tree._shapes import shapes_of
from flaxfit.tree._types import Function, PyTree

_PRODUCTS = ("conv_general_dilated", "dot_general")


def why_wide(task: TrainTask, state: PyTree, batch: Batch, bind: Function) -> str:
    """Explains which products of a model the precision of its task does not reach; "" if none."""
    if task.precision not in ("bfloat16", "float16") or task.objective is not None:
        return ""  # An objective calls the model with inputs of its own.

    def outputs(state: PyTree, batch: Batch) -> PyTree:
        rngs = rngs_of(task.rngs, state.key)
        return apply_model(task, state.params, state.model_state, batch, rngs)[0]

    bound = bind(outputs)
    if runs_eagerly(bound):
        return ""
    dtypes = _product_dtypes(jax.make_jaxpr(bound)(shapes_of(state), shapes_of(batch)))
    wide = [dtype for dtype in dtypes if dtype.itemsize > 2]
    if not wide:
        return ""
    return (
        f"precision={task.precision!r} has no effect on {len(wide)} of {len(dtypes)} products: the "
        f"module computes them in {wide[0]}. Where it sets dtype={wide[0]}, set dtype=None or "
        f"jnp.{task.precision}"
    )


def _product_dtypes(program: Jaxpr) -> list[np.dtype]:
    """The floating dtypes in which a jaxpr multiplies matrices and convolves."""
    # A product of two dtypes reads one of its factors in 16 bits at least.
    narrowest = (
        min(map(_dtype, equation.invars[:2]), key=lambda dtype: dtype.itemsize)
        for equation in equations(program)
        if equation.primitive.name in _PRODUCTS
    )
    return [dtype for dtype in narrowest if jnp.issubdtype(dtype, jnp.floating)]


def _dtype(variable: Any) -> np.dtype:
    return variable.aval.dtype
