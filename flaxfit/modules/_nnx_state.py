"""The state of an nnx module: taken apart into plain dicts of arrays, and put together again.

It imports nnx, so it is itself imported only where a model is one.
"""

import functools
import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.partitioning import AxisMetadata
from flax.traverse_util import unflatten_dict
from jax.core import Tracer
from jax.interpreters import partial_eval

from flaxfit.modules._flags import parameters
from flaxfit.tree._types import ArrayLike, Function, PyTree, Rngs

# Written by each call, so not part of the model.
_TRANSIENT = ("intermediates", "losses")

Place = tuple[str, ...]
"""Where a variable is in a dict of variables: its collection, then its path in the module."""


def variables_of(module: nnx.Module, losses: Sequence[str] = ()) -> dict[str, Any]:
    """The variables of a module, random states left out, as linen holds them.

    Those of the types named by `losses` are in the collection "losses".
    """
    leaves = _leaves(_state(module), losses)
    return unflatten_dict({place: _value(leaf) for _, place, leaf in leaves})


def collections_of(module: nnx.Module) -> set[str]:
    """The collections that variables of a module belong to, by their types."""
    return {collection for _, (collection, *_), _ in _leaves(_state(module))}


def persistent(variables: Mapping[str, PyTree]) -> dict[str, Any]:
    """The collections that are part of the model, not of a call."""
    return {name: tree for name, tree in variables.items() if name not in _TRANSIENT}


def axes_of(module: nnx.Module, losses: Sequence[str] = ()) -> dict[str, Any]:
    """The names of the axes of variables made by `nnx.with_partitioning`, as linen holds them.

    That is a collection `params_axes` beside `params`, and so on; there is none without names.
    """
    named = {}
    for _, (collection, *parents, name), leaf in _leaves(_state(module), losses):
        names = leaf.get_metadata().get("out_sharding") if isinstance(leaf, nnx.Variable) else None
        if names is not None and collection not in _TRANSIENT:
            named[f"{collection}_axes", *parents, f"{name}_axes"] = AxisMetadata(tuple(names))
    return unflatten_dict(named)


def viewed(module: nnx.Module, modes: Mapping[str, Any]) -> Any:
    """A module that shares the arrays of another one, with modes set in it and in its parts.

    A mode is an argument of a part's `set_view`, or an attribute that is a bool or None.
    """
    # An `nnx.Rngs` has every attribute, as a stream: to ask it for `set_view` would draw a key.
    view = nnx.view(module, only=_is_module, raise_if_not_found=False, **modes)
    for _, part in nnx.iter_modules(view):
        for name in modes:
            if _has_switch(part, name):
                setattr(part, name, modes[name])
    return view


def mark_arrays(module: nnx.Module) -> None:
    """Marks the plain arrays of a module that is made under a trace, which nnx takes for static."""
    for _, part in list(nnx.iter_graph(module)):
        for name, value in list(vars(part).items()) if isinstance(part, nnx.Pytree) else ():
            if isinstance(value, Tracer):
                setattr(part, name, nnx.data(value))


def attributes_of(module: nnx.Module) -> dict[str, Any]:
    """The attributes of a module and of its parts, by name."""
    return {name: x for _, part in nnx.iter_modules(module) for name, x in vars(part).items()}


def unknown_modes(module: nnx.Module, modes: Mapping[str, Any]) -> list[str]:
    """The modes that no part of a module has."""
    parts = [part for _, part in nnx.iter_modules(module)]
    return [
        name
        for name in modes
        if not any(_has_switch(part, name) or _takes_mode(part, name) for part in parts)
    ]


def split(
    module: nnx.Module, modes: Mapping[str, Any], losses: Sequence[str] = ()
) -> tuple[Any, Any, Any]:
    """The graph of a module, its random states and its other variables, as shapes only.

    The module itself stays as it is; the modes are set in the graph.
    """
    view = viewed(module, modes)
    nnx.pop(view, functools.partial(_is_sown, losses))
    graph, random, state = nnx.split(view, nnx.RngState, ...)
    return graph, *jax.eval_shape(lambda *states: states, random, state)


def filled(state: PyTree, variables: Mapping[str, PyTree], losses: Sequence[str] = ()) -> Any:
    """A state with the values that the variables hold.

    Raises:
      ValueError: some of its variables are not there.
    """
    values, missing = [], []
    for path, place, leaf in _leaves(state, losses):
        try:
            value = functools.reduce(operator.getitem, place, variables)
        except (KeyError, TypeError):
            value = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), _value(leaf))
            if place[0] not in _TRANSIENT:
                missing.append("/".join(place))
        values.append((path, leaf.replace(value) if isinstance(leaf, nnx.Variable) else value))
    if missing:
        raise ValueError(
            f"The variables lack what the model holds at {', '.join(missing)}; they have the "
            f"collections {', '.join(variables)}. Pass what its init returned."
        )
    return nnx.from_flat_state(values)


def keyed(random: Any, rngs: Rngs) -> Any:
    """The random states of a call: each stream's key from `rngs`, its count at 0.

    A stream made by `nnx.Rngs(0)` is called "default" whatever the layer: it takes the key of
    any stream but "params". The place of the stream is folded in, so that no two are alike.
    """
    states = []
    for number, (path, variable) in enumerate(nnx.to_flat_state(random)):
        value = variable.get_raw_value()
        if isinstance(variable, nnx.RngKey):
            key = _key(rngs, variable.tag)
            key = jax.random.key(0) if key is None else jax.random.fold_in(key, number)
            state = jax.random.split(key, value.shape) if value.shape else key
        else:
            state = jnp.zeros(value.shape, value.dtype)
        states.append((path, variable.replace(state)))
    return nnx.from_flat_state(states)


def counts(states: PyTree) -> dict[str, Any]:
    """How many numbers were drawn from each stream, by the stream's path in a module or state."""
    state = states if isinstance(states, nnx.State) else nnx.state(states, nnx.RngState)
    return {
        "/".join(map(str, path[:-1])): variable.get_raw_value()
        for path, variable in nnx.to_flat_state(state)
        if isinstance(variable, nnx.RngCount)
    }


def streams_used(function: Function, random: Any) -> dict[str, str]:
    """The random streams that the results of a function of random states depend on.

    By path, the name of each. A stream may be split or counted on and yet be of no effect.
    """
    leaves = list(nnx.to_flat_state(random))

    def of_arrays(arrays: Sequence[Any]) -> Any:
        filled = [(p, v.replace(x)) for (p, v), x in zip(leaves, arrays, strict=True)]
        return function(nnx.from_flat_state(filled))

    program = jax.make_jaxpr(of_arrays)([variable.get_raw_value() for _, variable in leaves]).jaxpr
    _, is_used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    return {
        "/".join(map(str, path[:-1])): variable.tag
        for (path, variable), is_one in zip(leaves, is_used, strict=True)
        if is_one and isinstance(variable, nnx.RngKey)
    }


def names_of(losses: ArrayLike) -> tuple[str, ...]:
    """The collections of types of variables, given as types or by name."""
    given = (losses,) if isinstance(losses, str | type) else losses
    return tuple(each if isinstance(each, str) else collection_of(each) for each in given)


def collection_of(kind: type) -> str:
    """The collection that holds the variables of a type."""
    if issubclass(kind, nnx.Param):
        return "params"
    try:
        return nnx.variable_name_from_type(kind)
    except ValueError:
        # Not registered: a notebook that defines the class again could not register it twice.
        return kind.__name__


def assign(module: nnx.Module, variables: Mapping[str, PyTree], losses: Sequence[str] = ()) -> None:
    """Gives the variables of a module copies of these values: all of them, or none and an error."""
    state = _state(module)
    new = filled(state, variables, losses)
    old, now = (
        {place: jax.tree.map(jnp.shape, _value(leaf)) for _, place, leaf in _leaves(tree, losses)}
        for tree in (state, new)
    )
    wrong = [
        f"{'/'.join(place)} is {old[place]} in the module and {now[place]} in the variables"
        for place in old
        if place[0] not in _TRANSIENT and old[place] != now[place]
    ]
    if wrong:
        raise ValueError(f"The variables do not fit the module: {'; '.join(wrong)}.")
    kept = [leaf for leaf in _leaves(new, losses) if leaf[1][0] not in _TRANSIENT]
    nnx.update(module, jax.tree.map(jnp.copy, nnx.from_flat_state([(p, v) for p, _, v in kept])))


def _state(module: nnx.Module) -> Any:
    return nnx.state(module, nnx.Not(nnx.RngState))


def _leaves(
    state: PyTree, losses: Sequence[str] = ()
) -> Iterator[tuple[tuple[PyTree, ...], Place, Any]]:
    for path, leaf in nnx.to_flat_state(state):
        yield path, (_collection(leaf, losses), *map(str, path)), leaf


def _value(leaf: ArrayLike) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _collection(leaf: ArrayLike, losses: Sequence[str] = ()) -> str:
    if not isinstance(leaf, nnx.Variable):
        return "constants"
    name = collection_of(type(leaf))
    return "losses" if name in losses else name


def _is_module(_: Any, node: PyTree) -> bool:
    return isinstance(node, nnx.Module)


def _has_switch(part: nnx.Module, name: str) -> bool:
    return isinstance(inspect.getattr_static(part, name, ...), bool | None)


def _takes_mode(part: nnx.Module, name: str) -> bool:
    found = parameters(getattr(part, "set_view", None))
    return name in found or any(p.kind == p.VAR_KEYWORD for p in found.values())


def _is_sown(losses: Sequence[str], _: Any, leaf: ArrayLike) -> bool:
    # What `sow` left in an instance would grow with each call; it always is a tuple.
    return _collection(leaf, losses) in _TRANSIENT and isinstance(_value(leaf), tuple)


def _key(rngs: Rngs, stream: str) -> Any:
    if isinstance(rngs, Mapping):
        others = [name for name in rngs if name != "params"]
        name = next((n for n in (stream, "default", *others, "params") if n in rngs), None)
        rngs = None if name is None else rngs[name]
    if rngs is None or jnp.issubdtype(rngs.dtype, jax.dtypes.prng_key):
        return rngs
    return jax.random.wrap_key_data(rngs)
