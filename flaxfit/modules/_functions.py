"""ModelFunctions: a model as two functions; `from_function` makes them of any function."""

from collections.abc import Callable
from typing import Any, NamedTuple


class ModelFunctions(NamedTuple):
    """A model in the linen convention; unpacks as `(init, apply)`.

    >>> init, apply = ModelFunctions(lambda rngs, x: {"params": 2.0}, lambda v, x: v["params"] * x)
    >>> apply(init(None, 3.0), 3.0)
    6.0
    """

    init: Callable[..., Any]
    """`init(rngs, *inputs) -> variables`, a dict with `"params"` and other collections."""
    apply: Callable[..., Any]
    """`apply(variables, *inputs, rngs=None, mutable=False) -> outputs`, or `(outputs, updates)`
    where `mutable` is not False."""


def from_function(
    function: Callable[..., Any], params: Any, *, rng: str | None = None
) -> ModelFunctions:
    """Makes a model of `function(params, *inputs)`, such as a haiku or an equinox one.

    A haiku model `net = hk.without_apply_rng(hk.transform(f))` is
    `from_function(net.apply, net.init)`. An equinox model, which computes one example, is
    `from_function(lambda p, x: jax.vmap(eqx.combine(p, static))(x), params)` after
    `params, static = eqx.partition(model, eqx.is_inexact_array)`.

    >>> init, apply = from_function(lambda w, x: w * x, 2.0)
    >>> apply(init(None, 3.0), 3.0)
    6.0

    Args:
      function: `(params, *inputs) -> outputs`.
      params: the initial parameters, or a function `(key, *inputs) -> params`.
      rng: the random stream that the function takes as its keyword `rng`; None: it takes none.
    """

    def init(rngs: Any, *inputs: Any, **named: Any) -> dict[str, Any]:
        if not callable(params):
            return {"params": params}
        key = rngs["params"] if isinstance(rngs, dict) else rngs
        return {"params": params(key, *inputs, **named)}

    def apply(
        variables: Any, *inputs: Any, rngs: Any = None, mutable: Any = False, **named: Any
    ) -> Any:
        if rng is not None:
            named["rng"] = (rngs or {}).get(rng)
        outputs = function(variables["params"], *inputs, **named)
        return outputs if mutable is False else (outputs, {})

    return ModelFunctions(init, apply)
