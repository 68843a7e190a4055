"""Finds, reads and sets hyperparameters anywhere in an optimizer state."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from flaxfit.optim._overridable import OverrideState
from flaxfit.tree import ArrayLike, Function, OptState, PyTree


class GroupsState(NamedTuple):
    """The states of the optimizers of several groups of parameters."""

    states: tuple[OptState, ...]
    names: tuple[dict[str, tuple[()]], ...]
    """The name of each group, as the key of a dict: a named tuple crosses `jit` faster than a class
    with static fields, and can hold no text."""


def hyperparams(opt_state: OptState, group: str | int | None = None) -> dict[str, PyTree]:
    """Reads the hyperparameters in an optimizer state: by name, or for groups by group and name.

    Searches the whole tree: the states of `OptimizerDef`s, of groups, and of Optax's own
    `inject_hyperparams`. A scheduled value is the one of the latest step, or of the first step
    before any was taken. Under `jit` the values are traced.

    >>> optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    >>> float(hyperparams(optimizer.init(jnp.ones(2)))["learning_rate"])
    0.5

    Args:
      opt_state: the state of any optimizer.
      group: the name or the position of a group, to read only that.

    Raises:
      ValueError: the state has no such group.
    """
    if group is None:
        return _read(opt_state)
    name = group_name(opt_state, group)
    return next(_read(state) for own, state in _groups(opt_state) if own == name)


def set_hyperparams(
    opt_state: OptState, *, group: str | int | None = None, **values: ArrayLike
) -> OptState:
    """Returns the optimizer state with some hyperparameters set.

    A set value overrides a schedule, which advances meanwhile, until None clears it. A
    hyperparameter without a schedule cannot be cleared: set it to its first value. Shapes, dtypes
    and placement stay the same, so that nothing is recompiled.

    >>> optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    >>> state = set_hyperparams(optimizer.init(jnp.ones(2)), learning_rate=0.1)
    >>> float(hyperparams(state)["learning_rate"])
    0.1...

    Args:
      opt_state: the state of any optimizer.
      group: the name or the position of a group; None: every group that has the hyperparameter.
      **values: numbers by name. None clears an override, without a group in every group that has
        a schedule.

    Raises:
      TypeError: a value is not a number.
      ValueError: the hyperparameter or the group does not exist or cannot be set.
    """
    name = None if group is None else group_name(opt_state, group)
    chosen = [opt_state] if name is None else [s for own, s in _groups(opt_state) if own == name]
    known = {hyperparam for state in chosen for hyperparam in names_of(state)}
    check_known(values, known, describe(opt_state))
    for hyperparam in values:
        if values[hyperparam] is None and not any(_can_clear(x, hyperparam) for x in chosen):
            raise ValueError(
                f"Cannot clear {hyperparam}: it has no schedule to return to. Set it to a number, "
                "such as its first value."
            )
    return _map(opt_state, lambda node: _set(node, values), name)


def with_hyperparams_of(opt_state: OptState, other: OptState) -> OptState:
    """Copies hyperparameters and overrides from another state; schedules stay."""

    def visit(node: PyTree, other: PyTree) -> PyTree:
        if not is_injected(node):
            return node
        values, states = dict(other.hyperparams), dict(node.hyperparams_states)
        for name, own in states.items():
            if isinstance(own, OverrideState):
                source = other.hyperparams_states[name]
                states[name] = own._replace(value=source.value, is_set=source.is_set)
            else:
                values[name] = node.hyperparams[name]
        inner = with_hyperparams_of(node.inner_state, other.inner_state)
        return node._replace(hyperparams=values, hyperparams_states=states, inner_state=inner)

    return jax.tree.map(visit, opt_state, other, is_leaf=is_injected)


def learning_rates(
    values: Mapping[str, PyTree], group: str | None = None
) -> dict[str | None, float]:
    """Returns the learning rates among hyperparameters by group; the key is None without groups.

    >>> learning_rates({"learning_rate": 0.1, "b1": 0.9})
    {None: 0.1}
    >>> learning_rates({"stem/.*": {"learning_rate": 0.01}, "head/.*": {"learning_rate": 0.1}})
    {'stem/.*': 0.01, 'head/.*': 0.1}
    """
    rate = values.get("learning_rate")
    found: dict[str | None, float] = {group: rate} if isinstance(rate, int | float) else {}
    for name, own in values.items():
        if isinstance(own, Mapping):
            found |= learning_rates(own, name)
    return found


def in_group(values: Mapping[str, PyTree], group: str) -> dict[str | None, float]:
    """Returns the learning rates of a group and of its nested groups, by group."""
    found: dict[str | None, float] = {}
    for name, own in values.items():
        if isinstance(own, Mapping):
            found |= learning_rates(own, name) if name == group else in_group(own, group)
    return found


def describe(opt_state: OptState) -> str:
    """Lists the hyperparameters of a state, by group."""
    groups = {name: names_of(state) for name, state in _groups(opt_state)}
    if any(groups.values()):
        return ", ".join(f"{list(names)} in group {name!r}" for name, names in groups.items())
    return str(list(names_of(opt_state))) if names_of(opt_state) else ""


def check_known(given: Iterable[str], known: Iterable[str], description: str) -> None:
    """Raises a ValueError that lists the hyperparameters if a name is unknown."""
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    if not description:
        raise ValueError(
            f"Cannot set {', '.join(unknown)}: this optimizer keeps no hyperparameters in its "
            "state. Make it with flaxfit.optim.OptimizerDef(optax.adam, learning_rate=1e-3)."
        )
    raise ValueError(
        f"No hyperparameter is called {', '.join(unknown)}. The optimizer was given {description}."
    )


def check_number(name: str, value: ArrayLike) -> None:
    """Checks that the value of a hyperparameter is a finite number."""
    is_number = isinstance(value, int | float | np.ndarray | np.generic | jax.Array)
    if not is_number or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, or None to clear an override, got {value}.")
    if isinstance(value, float | np.ndarray | np.generic) and not np.all(np.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {value}.")


def names_of(state: OptState) -> dict[str, None]:
    """Returns the names of all hyperparameters of a state, whatever their group, in order."""
    return dict.fromkeys(name for node in _injected(state) for name in node.hyperparams)


def scheduled(state: OptState, group: str | None = None) -> set[str]:
    """Returns the names of hyperparameters that follow a schedule, in a group or anywhere."""
    chosen = [state] if group is None else [s for own, s in _groups(state) if own == group]
    return {name for own in chosen for node in _injected(own) for name in node.hyperparams_states}


def group_name(state: OptState, group: str | int) -> str:
    """Returns the name of a group, which may be given by its position."""
    return _name_among(list(dict.fromkeys(name for name, _ in _groups(state))), group)


def group_named(state: OptState, group: str | int) -> str:
    """Returns the name of a group of a `MultiOptimizer`, anywhere in a state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, GroupsState))
    found = next((node for node in nodes if isinstance(node, GroupsState)), None)
    if found is None:
        raise ValueError(
            f"Cannot update the group {group!r} alone: the optimizer has no groups. Make it with "
            "flaxfit.optim.MultiOptimizer((filter, optimizer), ...)."
        )
    return _name_among(list(_children(found)), group)


def _name_among(names: Sequence[str], group: str | int) -> str:
    if group in names:
        return str(group)
    if isinstance(group, int) and -len(names) <= group < len(names):
        return names[group]
    known = f"The groups are {names}." if names else "This optimizer has no groups."
    raise ValueError(f"There is no group {group!r}. {known}")


def is_injected(node: PyTree) -> bool:
    """Returns whether a node of a state holds hyperparameters."""
    return isinstance(node, optax.InjectStatefulHyperparamsState)


def _injected(state: OptState) -> Iterator[optax.InjectStatefulHyperparamsState]:
    """Yields every node with hyperparameters, outer ones before inner ones."""
    for node in jax.tree.leaves(state, is_leaf=is_injected):
        if is_injected(node):
            yield node
            yield from _injected(node.inner_state)


def _nodes(state: OptState) -> list[PyTree]:
    """Returns the outermost nodes that have hyperparameters or groups."""
    return [node for node in jax.tree.leaves(state, is_leaf=_is_known) if _is_known(node)]


def _is_known(node: PyTree) -> bool:
    return is_injected(node) or isinstance(node, optax.transforms.PartitionState | GroupsState)


def _children(node: PyTree) -> dict[str, OptState]:
    if isinstance(node, GroupsState):
        return {name: state for (name,), state in zip(node.names, node.states, strict=True)}
    if isinstance(node, optax.transforms.PartitionState):
        return {str(label): state for label, state in node.inner_states.items()}
    return {}


def _groups(state: OptState) -> Iterator[tuple[str, OptState]]:
    """Yields the groups anywhere in a state, with their own states."""
    for node in _nodes(state):
        children = _children(node)
        yield from children.items()
        for child in (*children.values(), getattr(node, "inner_state", ())):
            yield from _groups(child)


def _read(state: OptState) -> dict[str, PyTree]:
    found: dict[str, PyTree] = {}
    for node in _nodes(state):
        if is_injected(node):
            found = {**_read(node.inner_state), **node.hyperparams, **found}
        found |= {name: own for name, child in _children(node).items() if (own := _read(child))}
    return found


def _can_clear(state: OptState, name: str) -> bool:
    """Returns whether a hyperparameter has an overridable schedule anywhere in a state."""
    schedules = (node.hyperparams_states.get(name) for node in _injected(state))
    return any(isinstance(each, OverrideState) for each in schedules)


def _map(state: OptState, function: Function, group: str | None) -> OptState:
    """Maps the nodes with hyperparameters, everywhere or in the groups of a name."""

    def visit(node: PyTree) -> PyTree:
        if is_injected(node):
            node = function(node) if group is None else node
            return node._replace(inner_state=_map(node.inner_state, function, group))
        states = [
            _map(child, function, None if name == group else group)
            for name, child in _children(node).items()
        ]
        if isinstance(node, GroupsState):
            return node._replace(states=tuple(states))
        if isinstance(node, optax.transforms.PartitionState):
            return node._replace(inner_states=dict(zip(node.inner_states, states, strict=True)))
        return node

    return jax.tree.map(visit, state, is_leaf=_is_known)


def _set(node: PyTree, values: Mapping[str, ArrayLike]) -> PyTree:
    """Sets the hyperparameters that a node has; ignores other names."""
    now, states = dict(node.hyperparams), dict(node.hyperparams_states)
    for name in values.keys() & now.keys():
        value, own = values[name], states.get(name)
        if name in states and not isinstance(own, OverrideState):
            raise ValueError(
                f"Cannot set {name}: it follows a schedule, which optax.inject_hyperparams cannot "
                "override. Make the optimizer with flaxfit.optim.OptimizerDef instead."
            )
        if value is not None:
            check_number(name, value)
            now[name] = _like(now[name], value, name)
            # A separate array: a donated state must not hold one buffer twice.
            states |= {name: own._replace(value=_like(own.value, value, name))} if own else {}
        if own is not None:
            states[name] = states[name]._replace(is_set=_like(own.is_set, value is not None, name))
    return node._replace(hyperparams=now, hyperparams_states=states)


def _like(old: PyTree, value: ArrayLike, name: str) -> PyTree:
    """Converts a value to an array of the type of `old`, for compiled functions."""
    if jnp.shape(value) != jnp.shape(old):
        raise ValueError(f"{name} has shape {jnp.shape(old)}, got shape {jnp.shape(value)}.")
    is_whole = jnp.issubdtype(old.dtype, jnp.integer)
    if is_whole and isinstance(value, float) and not value.is_integer():
        raise ValueError(
            f"{name} was made as an integer and stays one, got {value}. Make the optimizer "
            "with a float, such as 1.0 instead of 1."
        )
    if not isinstance(old, jax.Array):
        return np.asarray(value, old.dtype)
    if old.weak_type and isinstance(value, int | float):
        new = jnp.asarray(int(value) if is_whole else float(value))
    else:
        new = jnp.array(value, old.dtype)
    is_placed = not isinstance(old, Tracer) and old.committed
    return jax.device_put(new, old.sharding) if is_placed else new
