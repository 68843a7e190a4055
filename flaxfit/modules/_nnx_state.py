"""Splits the state of an NNX module into plain dicts of arrays, and merges it again."""
# This imports NNX: import it only where a model is an NNX module.

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.partitioning import AxisMetadata
from flax.traverse_util import unflatten_dict
from jax.core import Tracer
from jax.interpreters import partial_eval

from flaxfit.modules._functions import Names
from flaxfit.tree import Function, PyTree, Rngs, Variables, is_key

# Written by each call, so not part of the model.
_TRANSIENT = ("intermediates", "losses")

_OF_CALL = 2**31
"""Folded into the keys for a call that takes `rngs`; above every stream number."""

Place = tuple[str, ...]
"""A path in a dict of variables: the collection, then the path in the module."""

Leaf = nnx.Variable | PyTree
"""A variable, or an array in a plain attribute."""


def variables_of(module: nnx.Module, losses: Sequence[str] = ()) -> Variables:
    """Returns the variables of a module without random states, by collection as in Linen.

    Variables of the types named by `losses` are in the collection "losses".
    """
    leaves = _leaves(_state(module), losses)
    return unflatten_dict({place: _value(leaf) for _, place, leaf in leaves})


def values_of(module: nnx.Module) -> Callable[[], list[Any]]:
    """Returns a function that reads the current arrays of the module's present variables."""
    nodes = [node for _, node in nnx.iter_graph(module)]
    variables = [each for each in nodes if isinstance(each, nnx.Variable)]
    written = [each for each in variables if not isinstance(each, nnx.RngState)]
    return lambda: [each.get_raw_value() for each in written]


def is_transient(kind: type, losses: Sequence[str] = ()) -> bool:
    """Returns whether every call writes variables of a type, so they are not part of the model."""
    is_variable = issubclass(kind, nnx.Variable)
    return is_variable and collection_of(kind) in (*_TRANSIENT, *losses)


def persistent(variables: Variables) -> Variables:
    """Returns the collections that are part of the model, not those that every call writes."""
    return {name: tree for name, tree in variables.items() if name not in _TRANSIENT}


def axes_of(state: nnx.State, losses: Sequence[str] = ()) -> Variables:
    """Returns axis names from `nnx.with_partitioning` as in Linen, in collections such as
    `params_axes`."""
    named = {}
    for _, (collection, *parents, name), leaf in _leaves(state, losses):
        names = leaf.get_metadata().get("out_sharding") if isinstance(leaf, nnx.Variable) else None
        if names is not None and collection not in _TRANSIENT:
            named[f"{collection}_axes", *parents, f"{name}_axes"] = AxisMetadata(tuple(names))
    return unflatten_dict(named)


def mark_arrays(module: nnx.Module) -> None:
    """Marks plain arrays of a module made under a trace as data; NNX would treat them as static."""
    for _, part in list(nnx.iter_graph(module)):
        for name, value in list(vars(part).items()) if isinstance(part, nnx.Pytree) else ():
            if isinstance(value, Tracer):
                setattr(part, name, nnx.data(value))


def selected(module: nnx.Module, filter: Any) -> dict[str, bool]:
    """Returns whether an NNX filter selects each variable, by path including the collection."""
    is_selected = nnx.filterlib.to_predicate(filter)
    return {
        "/".join(place): is_selected(path, leaf) for path, place, leaf in _leaves(_state(module))
    }


def split(
    module: nnx.Module, losses: Sequence[str] = ()
) -> tuple[nnx.GraphDef[nnx.Module], nnx.State, nnx.State]:
    """Returns the graph of a module, and the shapes of its random states and other states.

    Removes sown values from the module.

    Raises:
      TypeError: it has variables whose values are references.
    """
    is_sown = functools.partial(_is_sown, losses)
    graph, random, state = nnx.split(module, nnx.RngState, ...)
    leaves = nnx.to_flat_state(state)
    for path, leaf in leaves:
        kind = next((name for name in ("hijax", "ref") if getattr(leaf, name, False)), None)
        if kind is not None:
            raise TypeError(
                f"{'/'.join(map(str, path))} is a variable with {kind}=True, a reference to an "
                f"array: make the module with nnx.var_defaults({kind}=False)."
            )
    if any(is_sown(path, leaf) for path, leaf in leaves):
        nnx.pop(module, is_sown)
        graph, random, state = nnx.split(module, nnx.RngState, ...)
    return graph, *jax.tree.map(_shape, (random, state))


def filled(state: nnx.State, variables: Variables, losses: Sequence[str] = ()) -> nnx.State:
    """Fills a state with the values of variables.

    Raises:
      ValueError: some of its variables are missing.
    """
    leaves = [*_leaves(state, losses)]
    values = zip(leaves, _values(leaves, variables), strict=True)
    return nnx.from_flat_state(
        [
            (path, leaf.replace(value) if isinstance(leaf, nnx.Variable) else value)
            for (path, _, leaf), value in values
        ]
    )


def keyed(random: nnx.State, rngs: Rngs) -> nnx.State:
    """Returns the random states of a call: each stream's key from `rngs`, its count at 0.

    The stream of `nnx.Rngs(0)` is called "default" in every layer; it takes the key of any stream
    except "params". Folding in the stream's position makes all keys different.
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


def names_of_streams(random: nnx.State) -> frozenset[str] | None:
    """Returns the names of a module's streams; None if a "default" stream takes any name."""
    leaves = [leaf for _, leaf in nnx.to_flat_state(random)]
    names = frozenset(leaf.tag for leaf in leaves if isinstance(leaf, nnx.RngKey))
    return None if "default" in names else names


def rngs_of_call(rngs: Rngs) -> nnx.Rngs | None:
    """Returns the `nnx.Rngs` for a call that takes them, or None if there is no key.

    Each named stream has its own key; other names draw from a separate default key.
    """
    if rngs is None or (isinstance(rngs, Mapping) and not rngs):
        return None
    given = rngs if isinstance(rngs, Mapping) else {"default": rngs}
    # Differs from the module's own streams, whose keys fold in small numbers.
    keys = {
        name: jax.random.split(jax.random.fold_in(as_key(key), _OF_CALL))
        for name, key in given.items()
        if name != "params"
    }
    if not keys:
        return None
    others = next(iter(keys.values()))[1]
    return nnx.Rngs(**{"default": others} | {name: own for name, (own, _) in keys.items()})


def counts(states: nnx.Module | nnx.State) -> dict[str, jax.Array]:
    """Returns the number of draws from each stream, by path in a module or state."""
    state = states if isinstance(states, nnx.State) else nnx.state(states, nnx.RngState)
    return {
        "/".join(map(str, path[:-1])): variable.get_raw_value()
        for path, variable in nnx.to_flat_state(state)
        if isinstance(variable, nnx.RngCount)
    }


def streams_used(function: Function, random: nnx.State) -> dict[str, str]:
    """Returns the names, by path, of the random streams that a function's results depend on.

    A stream that is only split or advanced does not count.
    """
    leaves = list(nnx.to_flat_state(random))

    def of_arrays(arrays: Sequence[jax.Array]) -> PyTree:
        filled = [(p, v.replace(x)) for (p, v), x in zip(leaves, arrays, strict=True)]
        return function(nnx.from_flat_state(filled))

    program = jax.make_jaxpr(of_arrays)([variable.get_raw_value() for _, variable in leaves]).jaxpr
    _, is_used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    return {
        "/".join(map(str, path[:-1])): variable.tag
        for (path, variable), is_one in zip(leaves, is_used, strict=True)
        if is_one and isinstance(variable, nnx.RngKey)
    }


def names_of(losses: Names) -> tuple[str, ...]:
    """Returns the collections of variable types, given as types or by name."""
    given = (losses,) if isinstance(losses, str | type) else losses
    return tuple(each if isinstance(each, str) else collection_of(each) for each in given)


def collection_of(kind: type) -> str:
    """Returns the collection of a variable type."""
    if issubclass(kind, nnx.Param):
        return "params"
    try:
        return nnx.variable_name_from_type(kind)
    except ValueError:
        # Do not register the name: redefining the class in a notebook would then fail.
        return kind.__name__


def assign(module: nnx.Module, variables: Variables, losses: Sequence[str] = ()) -> list[jax.Array]:
    """Sets the variables of a module to these values, or none of them if some do not fit.

    Returns:
      the arrays that were set.
    """
    leaves = [each for each in _leaves(_state(module), losses) if each[1][0] not in _TRANSIENT]
    values = _values(leaves, variables)
    wrong = [
        f"{'/'.join(place)} is {old} in the module and {new} in the variables"
        for (_, place, leaf), value in zip(leaves, values, strict=True)
        if (old := _shapes(_value(leaf))) != (new := _shapes(value))
    ]
    if wrong:
        raise ValueError(f"The variables do not fit the module: {'; '.join(wrong)}.")
    placed = [
        jax.tree.map(_where, _value(leaf), value)
        for (*_, leaf), value in zip(leaves, values, strict=True)
    ]
    constants = {}
    for (path, _, leaf), value in zip(leaves, placed, strict=True):
        if isinstance(leaf, nnx.Variable):  # The module's own object, not a copy.
            leaf.set_raw_value(value)
        else:
            constants[path] = value
    nnx.update(module, unflatten_dict(constants))
    return jax.tree.leaves(placed)


def _shapes(value: PyTree) -> PyTree:
    return jax.tree.map(jnp.shape, value)


def _where(old: PyTree, new: PyTree) -> PyTree:
    """Moves an array to the sharding of another; keeps an array of several processes."""
    is_there = not isinstance(old, jax.Array) or old.sharding == new.sharding
    return new if is_there or not new.is_fully_addressable else jax.device_put(new, old.sharding)


def _values(
    leaves: Sequence[tuple[tuple[PyTree, ...], Place, Leaf]], variables: Variables
) -> list[PyTree]:
    """Returns the values of leaves in the variables, zeros for transient leaves.

    Raises:
      ValueError: some are missing.
    """
    values, missing = [], []
    for _, place, leaf in leaves:
        try:
            value = functools.reduce(operator.getitem, place, variables)
        except (KeyError, TypeError):
            value = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), _value(leaf))
            if place[0] not in _TRANSIENT:
                missing.append("/".join(place))
        values.append(value)
    if missing:
        raise ValueError(
            f"The variables lack {', '.join(missing)}, which the model has; they have the "
            f"collections {', '.join(variables)}. Pass variables by collection, as its init "
            "returns them and state.variables holds them."
        )
    return values


def _state(module: nnx.Module) -> nnx.State:
    return nnx.state(module, nnx.Not(nnx.RngState))


def _leaves(
    state: nnx.State, losses: Sequence[str] = ()
) -> Iterator[tuple[tuple[PyTree, ...], Place, Leaf]]:
    for path, leaf in nnx.to_flat_state(state):
        yield path, (_collection(leaf, losses), *map(str, path)), leaf


def _value(leaf: Leaf) -> PyTree:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _collection(leaf: Leaf, losses: Sequence[str] = ()) -> str:
    if not isinstance(leaf, nnx.Variable):
        return "constants"
    name = collection_of(type(leaf))
    return "losses" if name in losses else name


def _shape(x: PyTree) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(x)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


def _is_sown(losses: Sequence[str], _: object, leaf: Leaf) -> bool:
    # The tuples of `sow` in an instance would grow with each call.
    return is_transient(type(leaf), losses) and isinstance(_value(leaf), tuple)


def _key(rngs: Rngs, stream: str) -> jax.Array | None:
    if isinstance(rngs, Mapping):
        others = [name for name in rngs if name != "params"]
        name = next((n for n in (stream, "default", *others, "params") if n in rngs), None)
        rngs = None if name is None else rngs[name]
    return None if rngs is None else as_key(rngs)


def as_key(key: jax.Array) -> jax.Array:
    """Converts a raw key to a typed key."""
    return key if is_key(key) else jax.random.wrap_key_data(key)
