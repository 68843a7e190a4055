"""The arguments of an update that a step passes besides gradients, state and parameters."""

import inspect
from collections.abc import Iterable
from typing import Any

import jax
import optax

from flaxfit.optim._freeze import merge
from flaxfit.tree import Function, OptState, Params, PyTree, parameters

OPTAX_ARGUMENTS = frozenset(("grad", "grad_fn", "obj_fn", "value", "value_fn"))
"""Arguments of an update that transformations of Optax take, and are not hyperparameters."""

_OF_SEARCHES = {"value", "grad", "value_fn"}
# The arguments of transformations that raise for others, even in chains, by type of state.
_ACCEPTED = {
    optax.contrib.SAMState: {"grad_fn"},
    optax.ScaleByBacktrackingLinesearchState: _OF_SEARCHES,
    optax.ScaleByZoomLinesearchState: _OF_SEARCHES,
}


def with_arguments(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer take arguments of any name; its update gets the ones it accepts."""
    parameters = parameters_of(optimizer.update)
    named = {p.name for p in parameters}

    def update(
        updates: PyTree, state: OptState, params: Params = None, **given: Any
    ) -> tuple[PyTree, OptState]:
        if not takes_any(parameters):
            given = {name: x for name, x in given.items() if name in named}
        for kind, accepted in _ACCEPTED.items():
            if holds(state, kind):
                rest = OPTAX_ARGUMENTS - accepted
                given = {name: x for name, x in given.items() if name not in rest}
        return optimizer.update(updates, state, params, **given)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def takes_any(parameters: Iterable[inspect.Parameter]) -> bool:
    """Returns whether parameters take arguments of any name."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def holds(opt_state: OptState, kind: type) -> bool:
    """Returns whether a state holds a node of a type."""

    def is_kind(node: object) -> bool:
        return isinstance(node, kind)

    return any(map(is_kind, jax.tree.leaves(opt_state, is_leaf=is_kind)))


def of_selected(arguments: dict[str, Any], params: Params, select: Function) -> dict[str, Any]:
    """Adapts the arguments of an update to an optimizer that sees only selected parameters.

    `select(tree)` masks the other parameters; functions of the parameters still get all of them.
    """

    def whole(selected: Params) -> Params:
        return merge(selected, params)

    def of_gradient(function: Function) -> Function:
        return lambda selected, *rest: select(function(whole(selected), *rest))

    def of_value(function: Function) -> Function:
        return lambda selected, *rest, **more: function(whole(selected), *rest, **more)

    made = {"grad": select, "grad_fn": of_gradient, "value_fn": of_value, "obj_fn": of_value}
    return {name: made[name](x) if name in made else x for name, x in arguments.items()}


def selected(labels: PyTree, label: int, tree: PyTree) -> PyTree:
    """Masks the leaves of a tree that do not have a label."""
    return jax.tree.map(lambda own, x: x if own == label else optax.MaskedNode(), labels, tree)


def parameters_of(update: Function) -> list[inspect.Parameter]:
    """Returns the arguments that an update takes after `(updates, state, params)`."""
    return list(parameters(update).values())[3:]
