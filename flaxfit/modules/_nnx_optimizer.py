"""Splits the state of an `nnx.Optimizer` into arrays in dicts and Optax classes."""
# This imports NNX: import it only where a step has NNX optimizers.

import copy
import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict

from flaxfit.tree import PyTree


class SplitOptimizer(NamedTuple):
    """An optimizer as a graph and the NNX form of its state; the values do not matter."""

    graph: nnx.GraphDef[Any]
    form: dict[str, PyTree]
    model: str | None
    """The name of the module that an `nnx.ModelAndOptimizer` holds."""


def split(optimizer: nnx.Optimizer[Any], model: str | None) -> SplitOptimizer:
    """Splits an optimizer, without the module that it may hold."""
    bare: Any = copy.copy(optimizer)
    bare.opt_state = None
    if model is not None:
        bare.model = None
    return SplitOptimizer(nnx.graphdef(bare), _form(optimizer), model)


def merged(
    parts: SplitOptimizer, values: PyTree, modules: Mapping[str, object]
) -> nnx.Optimizer[Any]:
    """Makes an optimizer with these values, and with its module if it holds one."""
    new = _replaced(parts.form, values)
    inner = new.pop("opt_state")
    optimizer: Any = nnx.merge(parts.graph, nnx.State(new))
    optimizer.opt_state = nnx.data(inner)
    if parts.model is not None:
        optimizer.model = modules[parts.model]
    return optimizer


def values_of(optimizer: nnx.Optimizer[Any]) -> dict[str, PyTree]:
    """Returns the state of an optimizer without NNX types; "opt_state" is Optax's."""
    return jax.tree.map(_plain, _form(optimizer), is_leaf=_is_nnx)


def assign(optimizer: nnx.Optimizer[Any], values: PyTree) -> None:
    """Writes values into an optimizer."""
    new = _replaced(_form(optimizer), values)
    optimizer.opt_state = nnx.data(new.pop("opt_state"))
    nnx.update(optimizer, nnx.State(new))


def paths_of(optimizer: nnx.Optimizer[Any]) -> set[tuple[Any, ...]]:
    """Returns the paths of the variables that an optimizer keeps states for."""
    nodes = jax.tree.leaves(optimizer.opt_state, is_leaf=_is_nnx)
    states = [node for node in nodes if isinstance(node, nnx.State)]
    return {path for state in states for path, _ in nnx.to_flat_state(state)}


def _form(optimizer: nnx.Optimizer[Any]) -> dict[str, PyTree]:
    """Returns the variables of an optimizer, without a module's."""
    own = {
        name: x for name, x in nnx.state(optimizer).items() if name not in ("model", "opt_state")
    }
    return {**own, "opt_state": optimizer.opt_state}


def _is_nnx(node: object) -> bool:
    return isinstance(node, nnx.State | nnx.Variable)


def _plain(node: PyTree) -> PyTree:
    if isinstance(node, nnx.State):
        flat = nnx.to_flat_state(node)
        return unflatten_dict({tuple(map(str, path)): _plain(leaf) for path, leaf in flat})
    return node.get_raw_value() if isinstance(node, nnx.Variable) else node


def _replaced(form: PyTree, values: PyTree) -> PyTree:
    """Replaces the values of the NNX form by plain values."""

    def replace(node: PyTree, value: PyTree) -> PyTree:
        if isinstance(node, nnx.State):
            return nnx.from_flat_state(
                [
                    (path, replace(leaf, functools.reduce(operator.getitem, map(str, path), value)))
                    for path, leaf in nnx.to_flat_state(node)
                ]
            )
        return node.replace(value) if isinstance(node, nnx.Variable) else value

    return jax.tree.map(replace, form, values, is_leaf=_is_nnx)
