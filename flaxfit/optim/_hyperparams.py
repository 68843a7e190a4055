"""Finds, reads and sets hyperparameters anywhere in an optimizer state."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from flaxfit.tree._types import ArrayLike, Function, OptState, PyTree


class OverrideState(NamedTuple):
    """The state of a hyperparameter that goes by a schedule unless it is overridden."""

    schedule: PyTree
    """The state of the schedule, which counts on under an override."""
    value: ArrayLike
    """The override."""
    is_set: ArrayLike
    """Whether the override counts."""


class GroupsState(NamedTuple):
    """The states of the optimizers of several groups of parameters."""

    states: tuple[OptState, ...]
    names: tuple[dict[str, tuple[()]], ...]
    """The name of each group, as the key of a dict: a named tuple crosses `jit` faster than a class
    with static fields, and can hold no text."""


def hyperparams(opt_state: OptState, group: str | int | None = None) -> dict[str, PyTree]:
    """The hyperparameters in an optimizer's state, by name; those of groups by group and name.

    They are looked for in the whole tree: in states of `OptimizerDef`s, of groups, and of optax's
    own `inject_hyperparams`. A value that goes by a schedule is that of the latest step (before
    the first step, of that one). Pure: under `jit` the values are traced.

    >>> optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    >>> float(hyperparams(optimizer.init(jnp.ones(2)))["learning_rate"])
    0.5

    Args:
      opt_state: any state of an optimizer.
      group: the name of a group, or its position: only what that group has.

    Raises:
      ValueError: there is no such group.
    """
    if group is None:
        return _read(opt_state)
    name = group_name(opt_state, group)
    return next(_read(state) for own, state in _groups(opt_state) if own == name)


def set_hyperparams(
    opt_state: OptState, *, group: str | int | None = None, **values: ArrayLike
) -> OptState:
    """The optimizer's state with some hyperparameters set.

    A value that was set beats a schedule until None clears it; the schedule counts on meanwhile.
    What does not go by a schedule cannot be cleared: set it to the number that it was made with.
    Nothing is recompiled for it: shapes, dtypes and placement stay as they are.

    >>> optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    >>> state = set_hyperparams(optimizer.init(jnp.ones(2)), learning_rate=0.1)
    >>> float(hyperparams(state)["learning_rate"])
    0.1...

    Args:
      opt_state: any state of an optimizer.
      group: the name of a group, or its position; None: every group that has the hyperparameter.
      **values: numbers by name, or None; without a group, None clears it in each group that goes
        by a schedule.

    Raises:
      TypeError: a value is not a number.
      ValueError: there is no such hyperparameter or group, or it cannot be set.
    """
    name = None if group is None else group_name(opt_state, group)
    chosen = [opt_state] if name is None else [s for own, s in _groups(opt_state) if own == name]
    known = {hyperparam for state in chosen for hyperparam in names_of(state)}
    check_known(values, known, describe(opt_state))
    for hyperparam in values:
        if values[hyperparam] is None and not any(_can_clear(x, hyperparam) for x in chosen):
            raise ValueError(
                f"Cannot clear {hyperparam}: it has no schedule to go by again. Set it to a "
                "number, such as the one that it was made with."
            )
    return _map(opt_state, lambda state: _set(state, values), name)


def with_hyperparams_of(opt_state: OptState, other: PyTree) -> OptState:
    """An optimizer's state with the hyperparameters that are set in another state of it.

    Those that go by a schedule stay as they are.

    >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    >>> state = optimizer.init(jnp.ones(2))
    >>> state = with_hyperparams_of(state, set_hyperparams(state, learning_rate=0.25))
    >>> float(hyperparams(state)["learning_rate"])
    0.25
    """

    def visit(node: PyTree, other: PyTree) -> PyTree:
        if not isinstance(node, optax.InjectStatefulHyperparamsState):
            if isinstance(node, GroupsState):
                return node._replace(states=with_hyperparams_of(node.states, other.states))
            if isinstance(node, optax.transforms.PartitionState):
                inner = with_hyperparams_of(node.inner_states, other.inner_states)
                return node._replace(inner_states=inner)
            return node
        values, states = dict(other.hyperparams), dict(node.hyperparams_states)
        for name, own in states.items():
            if isinstance(own, OverrideState):
                set_to = other.hyperparams_states[name]
                states[name] = own._replace(value=set_to.value, is_set=set_to.is_set)
            else:
                values[name] = node.hyperparams[name]
        inner = with_hyperparams_of(node.inner_state, other.inner_state)
        return node._replace(hyperparams=values, hyperparams_states=states, inner_state=inner)

    return jax.tree.map(visit, opt_state, other, is_leaf=_is_known)


def describe(opt_state: OptState) -> str:
    """What hyperparameters a state holds, by group, in words."""
    groups = {name: names_of(state) for name, state in _groups(opt_state)}
    if any(groups.values()):
        return ", ".join(f"{list(names)} in group {name!r}" for name, names in groups.items())
    return str(list(names_of(opt_state))) if names_of(opt_state) else ""


def check_known(given: Iterable[str], known: Iterable[str], description: str) -> None:
    """Checks that hyperparameters are known.

    Raises:
      ValueError: with those that are.
    """
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
    """Checks that something can be the value of a hyperparameter.

    Raises:
      TypeError: it is not a number.
      ValueError: it is NaN or infinite.
    """
    is_number = isinstance(value, int | float | np.ndarray | np.generic | jax.Array)
    if not is_number or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, or None to go by a schedule again, got {value}.")
    if isinstance(value, float | np.ndarray | np.generic) and not np.all(np.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {value}.")


# The tree of a state: what injects hyperparameters, and what splits the parameters in groups.


def _is_known(node: PyTree) -> bool:
    kinds = optax.InjectStatefulHyperparamsState | optax.transforms.PartitionState | GroupsState
    return isinstance(node, kinds)


def _nodes(state: PyTree) -> list[PyTree]:
    return [node for node in jax.tree.leaves(state, is_leaf=_is_known) if _is_known(node)]


def _children(node: PyTree) -> dict[str, PyTree]:
    """The states of the groups of a node, by name."""
    if isinstance(node, GroupsState):
        return {name: state for (name,), state in zip(node.names, node.states, strict=True)}
    if isinstance(node, optax.transforms.PartitionState):
        return {str(label): state for label, state in node.inner_states.items()}
    return {}


def _groups(state: PyTree) -> list[tuple[str, OptState]]:
    """The groups anywhere in a state, with their own states."""
    found = []
    for node in _nodes(state):
        children = _children(node)
        found += children.items()
        for child in children.values() if children else [getattr(node, "inner_state", ())]:
            found += _groups(child)
    return found


def _read(state: PyTree) -> dict[str, PyTree]:
    found: dict[str, PyTree] = {}
    for node in _nodes(state):
        if isinstance(node, optax.InjectStatefulHyperparamsState):
            found = {**_read(node.inner_state), **node.hyperparams, **found}
        for name, child in _children(node).items():
            if own := _read(child):
                found[name] = own
    return found


def names_of(state: PyTree) -> dict[str, None]:
    """The names of all hyperparameters of a state, whatever their group, in order."""
    names: dict[str, None] = {}
    for node in _nodes(state):
        if isinstance(node, optax.InjectStatefulHyperparamsState):
            names |= dict.fromkeys(node.hyperparams) | names_of(node.inner_state)
        for child in _children(node).values():
            names |= names_of(child)
    return names


def group_name(state: PyTree, group: str | int) -> str:
    """The name of a group, which may be given by its position.

    Raises:
      ValueError: there is no such group; those that there are are listed.
    """
    names = list(dict.fromkeys(name for name, _ in _groups(state)))
    if group in names:
        return str(group)
    if isinstance(group, int) and -len(names) <= group < len(names):
        return names[group]
    known = f"The groups are {names}." if names else "This optimizer has no groups."
    raise ValueError(f"There is no group {group!r}. {known}")


def _can_clear(state: PyTree, name: str) -> bool:
    """Whether a hyperparameter goes by a schedule that can be overridden, anywhere in a state."""
    for node in _nodes(state):
        is_own = isinstance(node, optax.InjectStatefulHyperparamsState)
        if is_own and isinstance(node.hyperparams_states.get(name), OverrideState):
            return True
        inner = [node.inner_state] if is_own else list(_children(node).values())
        if any(_can_clear(each, name) for each in inner):
            return True
    return False


def _map(state: PyTree, function: Function, group: str | None) -> PyTree:
    """Maps the nodes with hyperparameters: all of them, or those of the groups of that name."""

    def visit(node: PyTree) -> PyTree:
        if isinstance(node, optax.InjectStatefulHyperparamsState):
            node = function(node) if group is None else node
            return node._replace(inner_state=_map(node.inner_state, function, group))
        children = _children(node)
        if not children:
            return node
        changed = {
            name: _map(child, function, None if name == group else group)
            for name, child in children.items()
        }
        if isinstance(node, GroupsState):
            return node._replace(states=tuple(changed.values()))
        return node._replace(
            inner_states=dict(zip(node.inner_states, changed.values(), strict=True))
        )

    return jax.tree.map(visit, state, is_leaf=_is_known)


def _set(node: PyTree, values: Mapping[str, ArrayLike]) -> PyTree:
    """A node whose hyperparameters of these names have these values."""
    now, states = dict(node.hyperparams), dict(node.hyperparams_states)
    for name in values.keys() & now.keys():
        value, own = values[name], states.get(name)
        if name in states and not isinstance(own, OverrideState):
            raise ValueError(
                f"Cannot set {name}: it follows a schedule that optax.inject_hyperparams does not "
                "let one override. Make the optimizer with flaxfit.optim.OptimizerDef instead."
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
    """A value as an array that compiled functions take in place of `old`."""
    if jnp.shape(value) != jnp.shape(old):
        raise ValueError(f"{name} has shape {jnp.shape(old)}, got shape {jnp.shape(value)}.")
    is_whole = jnp.issubdtype(old.dtype, jnp.integer)
    if is_whole and isinstance(value, float) and not value.is_integer():
        raise ValueError(
            f"{name} was made as a whole number and stays one, got {value}. Make the optimizer "
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
