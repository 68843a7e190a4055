"""ModelFunctions: a model as two functions; from_function: a model of any function."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
from flax.core.scope import CollectionFilter, in_filter

from flaxfit.modules._handle import attached, with_handle
from flaxfit.tree import Function, Params, PyTree, Rngs, Variables, copied

WRITTEN = "written_params"
"""The collection of parameters that the model's call has written, by path."""

Names = str | type | Iterable[str | type]
"""Collections by name, or types of NNX variables."""


class ModelFunctions(NamedTuple):
    """Holds a model in the Linen convention; unpacks as `(init, apply)`.

    >>> init, apply = ModelFunctions(lambda rngs, x: {"params": 2.0}, lambda v, x: v["params"] * x)
    >>> apply(init(None, 3.0), 3.0)
    6.0

    Args:
      init: `init(rngs, *inputs) -> variables`, a dict with `"params"` and other collections.
      apply: `apply(variables, *inputs, rngs=None, mutable=False) -> outputs`, or `(outputs,
        updates)` where `mutable` is not False.
    """

    init: Function
    apply: Function


def with_losses(
    functions: ModelFunctions, losses: Names, *, are_required: bool = True
) -> ModelFunctions:
    """Moves a model's collections of these names into "losses", so that they add to the loss.

    >>> sow = ModelFunctions(lambda k, x: {}, lambda v, x, mutable: (x, {"kl": 1.0}))
    >>> with_losses(sow, ["kl"]).apply({}, 0.0, mutable=True)
    (0.0, {'losses': {'kl': 1.0}})
    """
    given = (losses,) if isinstance(losses, str | type) else losses
    names = [each if isinstance(each, str) else each.__name__ for each in given]
    if not names:
        return functions

    def init(rngs: Rngs, *inputs: PyTree, **named: PyTree) -> Variables:
        variables = functions.init(rngs, *inputs, **named)
        return {name: tree for name, tree in variables.items() if name not in names}

    def apply(
        variables: Variables, *inputs: PyTree, mutable: CollectionFilter = False, **named: PyTree
    ) -> PyTree:
        if mutable is False:
            return functions.apply(variables, *inputs, **named)
        is_known = isinstance(mutable, list) and mutable == ["losses"]
        wanted = ["losses", *names] if is_known else mutable
        outputs, updates = functions.apply(variables, *inputs, mutable=wanted, **named)
        if are_required and in_filter(mutable, "losses"):
            check_losses(names, updates)
        terms = {name: updates[name] for name in names if name in updates}
        others = {name: tree for name, tree in updates.items() if name not in terms}
        return outputs, {**others, "losses": {**updates.get("losses", {}), **terms}}

    functools.update_wrapper(apply, functions.apply, assigned=(), updated=())
    functools.update_wrapper(init, functions.init, assigned=(), updated=())
    handle = attached(functions.apply)
    if handle is not None:
        with_handle(apply, handle._replace(init=lambda module: init))
    return ModelFunctions(init, apply)


def check_losses(losses: Sequence[str], found: Iterable[str]) -> None:
    """Checks that a model has stored values in all collections that count as losses."""
    if missing := [name for name in losses if name not in found]:
        raise ValueError(
            f"losses contains {', '.join(missing)}, but the model stores values only in "
            f"{', '.join(sorted(found)) or 'no collection'}."
        )


class GivenInit:
    """An `init` that copies existing weights, because training donates its arrays."""

    gives_weights = True
    """Callers must not trace it: under `jit` the weights would be constants."""

    def __init__(self, give: Callable[[], Variables]):
        self._give = give

    def __call__(self, rngs: Rngs, *inputs: PyTree, **named: PyTree) -> Variables:
        variables = self._give()
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(variables)):
            raise TypeError(
                "The module holds shapes instead of arrays, as nnx.eval_shape returns it, so it "
                "has no weights to begin with: pass the function that makes the module, such as "
                "`lambda rngs: Module(rngs)`, or begin with a state."
            )
        return copied(variables)


def from_function(
    function: Function, params: Params, *, rng: str | None = None, stateful: bool = False
) -> ModelFunctions:
    """Makes a model of `function(params, *inputs)`, such as one of haiku or equinox.

    A haiku model `net = hk.without_apply_rng(hk.transform(f))` is
    `from_function(net.apply, net.init)`. An equinox model, which computes one example, is
    `from_function(lambda p, x: jax.vmap(eqx.combine(p, static))(x), params)` after
    `params, static = eqx.partition(model, eqx.is_inexact_array)`.

    `Model` sets an argument named `train`, `is_training`, `deterministic` or a similar flag, as for
    Linen modules.

    >>> init, apply = from_function(lambda w, x: w * x, 2.0)
    >>> float(apply(init(None, 3.0), 3.0))
    6.0

    Args:
      function: `(params, *inputs) -> outputs`.
      params: the initial parameters, or a function `(key, *inputs) -> params`.
      rng: the random stream, such as "dropout", whose key the function takes as its keyword `rng`,
        None if the call has none; by default it takes no `rng`.
      stateful: the function is `(params, state, *inputs) -> (outputs, state)`, and `params` is,
        or returns, the initial `(params, state)`. The state is the collection `"state"`.
    """
    # `callable` is not enough: an equinox module is callable and a pytree of parameters.
    is_init = callable(params) and jax.tree_util.all_leaves([params])

    def collections(initial: PyTree) -> Variables:
        if not stateful:
            return {"params": initial}
        return dict(zip(("params", "state"), initial, strict=True))

    def init(rngs: Rngs, *inputs: PyTree, **named: PyTree) -> Variables:
        key = rngs["params"] if isinstance(rngs, dict) else rngs
        return collections(params(key, *inputs, **named))

    def apply(
        variables: Variables,
        *inputs: PyTree,
        rngs: Rngs = None,
        mutable: CollectionFilter = False,
        **named: PyTree,
    ) -> PyTree:
        if rng is not None:
            named["rng"] = rngs.get(rng) if isinstance(rngs, dict) else rngs
        if not stateful:
            outputs, updates = function(variables["params"], *inputs, **named), {}
        else:
            outputs, state = function(variables["params"], variables["state"], *inputs, **named)
            updates = {"state": state}
        if mutable is False:
            return outputs
        return outputs, {name: new for name, new in updates.items() if in_filter(mutable, name)}

    # Show the user's arguments, such as `train`, in the signatures.
    functools.update_wrapper(apply, function, assigned=(), updated=())
    if not is_init:
        return ModelFunctions(GivenInit(lambda: collections(params)), apply)
    functools.update_wrapper(init, params, assigned=(), updated=())
    return ModelFunctions(init, apply)
