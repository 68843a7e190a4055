"""from_nnx: an nnx module as `(init, apply)`, its variables as plain dicts of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.scope import in_filter

from flaxfit.modules._functions import ModelFunctions


def from_nnx(
    model: Any,
    *,
    train: bool | None = None,
    call: Callable[..., Any] | None = None,
    **modes: Any,
) -> ModelFunctions:
    """Makes a model of an nnx module, or of a factory `(rngs) -> module`.

    Its variables become `{"params": ..., "batch_stats": ..., ...}`, one collection per type of
    variable, a variable that is shared held once. Random states stay out of them: every call is
    given its keys by `rngs`, a different one for each stream of each layer.

    >>> from flax import nnx
    >>> init, apply = from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs))
    >>> variables = init(jax.random.key(0), jnp.ones((1, 2)))
    >>> apply(variables, jnp.ones((1, 2))).shape
    (1, 3)

    Args:
      model: an instance, whose weights are the initial ones, or a factory.
      train: True or False sets the layers' `deterministic` and `use_running_average`.
      call: `(module, *inputs) -> outputs`, where it is not the module itself that is called.
      **modes: other attributes of layers to set.
    """
    from flax import nnx

    if train is not None:
        modes = {"deterministic": not train, "use_running_average": not train, **modes}
    is_instance = isinstance(model, nnx.Module)
    not_random = nnx.Not(nnx.RngState)

    def in_mode(module: Any) -> Any:
        return nnx.view(module, raise_if_not_found=False, **modes) if modes else module

    def collection(variable: Any) -> str:
        return nnx.variable_name_from_type(type(variable), allow_register=True)

    def variables_of(module: Any) -> dict[str, Any]:
        collections: dict[str, dict[Any, Any]] = {}
        for path, variable in nnx.to_flat_state(nnx.state(module, not_random)):
            name = "params" if isinstance(variable, nnx.Param) else collection(variable)
            collections.setdefault(name, {})[path] = variable.get_value()
        collections.pop("intermediate", None)
        return {name: nnx.traversals.unflatten_mapping(c) for name, c in collections.items()}

    abstract = in_mode(model if is_instance else nnx.eval_shape(lambda: model(nnx.Rngs(0))))
    graph, template, random = nnx.split(abstract, not_random, nnx.RngState)
    slots = [
        (path, variable, "params" if isinstance(variable, nnx.Param) else collection(variable))
        for path, variable in nnx.to_flat_state(template)
        if not isinstance(variable, nnx.Intermediate)
    ]

    def init(rngs: Any, *inputs: Any, **named: Any) -> dict[str, Any]:
        if is_instance:
            # A copy: training donates its arrays, and the user keeps the instance.
            return jax.tree.map(jnp.copy, variables_of(model))
        rngs = dict(rngs) if isinstance(rngs, dict) else {"params": rngs}
        return variables_of(model(nnx.Rngs(**{"default": rngs["params"], **rngs})))

    def apply(
        variables: Any, *inputs: Any, rngs: Any = None, mutable: Any = False, **named: Any
    ) -> Any:
        flat = {name: nnx.traversals.flatten_mapping(tree) for name, tree in variables.items()}
        state = nnx.from_flat_state([(p, v.replace(flat[name][p])) for p, v, name in slots])
        module = nnx.merge(graph, state, _keyed(random, rngs or {}))
        outputs = module(*inputs, **named) if call is None else call(module, *inputs, **named)
        if mutable is False:
            return outputs
        updates = variables_of(module)
        return outputs, {name: tree for name, tree in updates.items() if in_filter(mutable, name)}

    return ModelFunctions(init, apply)


def update_nnx(model: Any, variables: Any) -> None:
    """Writes trained variables back into an nnx instance.

    >>> from flax import nnx
    >>> layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> update_nnx(layer, {"params": {"kernel": jnp.ones((1, 1)), "bias": jnp.ones(1)}})
    >>> float(layer(jnp.ones(1))[0])
    2.0

    Args:
      model: the instance that `from_nnx` was given.
      variables: such as `model.state.variables`.
    """
    from flax import nnx

    state = nnx.state(model, nnx.Not(nnx.RngState))
    values = {}
    for tree in variables.values():
        values.update(nnx.traversals.flatten_mapping(tree))
    flat = [
        (path, v.replace(values.get(path, v.get_value()))) for path, v in nnx.to_flat_state(state)
    ]
    nnx.update(model, nnx.from_flat_state(flat))


def _keyed(random: Any, rngs: dict[str, Any]) -> Any:
    """The random state of a call: each stream's key from `rngs`, its count at 0.

    A stream made by `nnx.Rngs(0)` is called "default" whatever the layer: it takes the key of
    any stream but "params". The place of the stream is folded in, so that no two are alike.
    """
    from flax import nnx

    flat = nnx.to_flat_state(random)
    fallback = next((key for name, key in rngs.items() if name != "params"), None)
    keyed = []
    for i, (path, variable) in enumerate(flat):
        value = variable.get_value()
        if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            keyed.append((path, variable.replace(jnp.zeros(value.shape, value.dtype))))
            continue
        key = rngs.get(variable.tag, fallback)
        key = jax.random.key(0) if key is None else jax.random.fold_in(key, i)
        shape = value.shape
        keyed.append((path, variable.replace(jax.random.split(key, shape) if shape else key)))
    return nnx.from_flat_state(keyed)
