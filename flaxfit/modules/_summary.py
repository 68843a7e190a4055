"""A table of a model's layers, by flax's own tabulate."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxfit.data._batch import call
from flaxfit.modules._flags import call_flags, parameters, switches
from flaxfit.modules._nnx import make
from flaxfit.modules._switch import switched
from flaxfit.tree._single_replica import single_replica_of_any_axis
from flaxfit.tree._types import PyTree, Rngs

_WIDTH = 100


def summarize(module: Any, inputs: PyTree) -> str:
    """Makes a table of the layers of a module, the shapes of their outputs and their parameters.

    >>> "Dense" in summarize(nn.Dense(3), (jax.ShapeDtypeStruct((1, 2), "float32"),))
    True

    Args:
      module: a linen or nnx module.
      inputs: the model's inputs, a tuple or a dict; only shapes and dtypes matter.

    Raises:
      TypeError: the model is a pair of functions, which has no layers to show.
    """
    inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    if isinstance(module, nn.Module):
        module, arguments = switched(module, train=False)
        rngs = dict.fromkeys(("params", "dropout"), jax.random.key(0))
        options = {"console_kwargs": {"width": _WIDTH, "force_terminal": False}}
        tables: list[str] = []

        def tabulate(rngs: Rngs, *inputs: PyTree, **named: PyTree) -> None:
            tables.append(module.tabulate(rngs, *inputs, **named, **options, **arguments))

        call(single_replica_of_any_axis(tabulate), rngs, inputs)
        return tables[0].strip("\n")
    if isinstance(module, tuple):
        raise TypeError("summary() shows the layers of a linen or nnx module, not of functions.")
    from flax import nnx

    from flaxfit.modules._nnx_modes import viewed

    if not isinstance(module, nnx.Module):
        module = make(module, nnx.Rngs(0))
    options: dict[str, Any] = {
        "console_kwargs": {"width": _WIDTH, "force_terminal": False, "no_color": True}
    }
    args, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    arguments: dict[str, Any] = call_flags(module.__call__, train=False)
    if "rngs" in parameters(module.__call__):
        arguments["rngs"] = None
    view = viewed(module, switches(train=False))
    # `nnx.tabulate` leaves its changes of the module's class behind if the call fails.
    nnx.eval_shape(lambda view: view(*args, **named, **arguments), view)
    return nnx.tabulate(view, *args, **named, **arguments, **options).strip("\n")
