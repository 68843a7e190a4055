"""The arguments of an update that a step passes beside gradients, state and parameters."""

import inspect
from typing import Any

import jax
import optax

from flaxfit.optim._freeze import merge
from flaxfit.tree._types import Function, Params, PyTree

OPTAX_ARGUMENTS = frozenset(("grad", "grad_fn", "obj_fn", "value", "value_fn"))
"""Arguments of an update that transformations of Optax take, and are not hyperparameters."""


def named_arguments(update: Function) -> frozenset[str]:
    """The arguments of `OPTAX_ARGUMENTS` that the signature of an update names."""
    return OPTAX_ARGUMENTS.intersection(p.name for p in _parameters(update))


def takes_any(update: Function) -> bool:
    """Whether an update takes arguments of any name."""
    return any(p.kind is p.VAR_KEYWORD for p in _parameters(update))


def with_arguments(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer take further arguments; they are dropped only if its update has none."""
    if isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return optimizer
    if takes_any(optimizer.update) or named_arguments(optimizer.update):
        return optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
    return optax.with_extra_args_support(optimizer)


def of_selected(arguments: dict[str, Any], params: Params, select: Function) -> dict[str, Any]:
    """The arguments of an update for an optimizer that sees a selection of the parameters only.

    `select(tree)` replaces the other parameters by masked nodes; functions of the parameters get
    them unchanged.
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
    """The leaves of a tree that have a label, with masked nodes in the place of others."""
    return jax.tree.map(lambda own, x: x if own == label else optax.MaskedNode(), labels, tree)


def _parameters(update: Function) -> list[inspect.Parameter]:
    """The parameters of an update after gradients, state and the parameters that it updates."""
    try:
        return list(inspect.signature(update).parameters.values())[3:]
    except (TypeError, ValueError):  # Some callables have no signature.
        return []
