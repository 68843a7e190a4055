"""Rejects optimizers that a step cannot call, and arguments that an optimizer does not use."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from flaxfit.optim._arguments import OPTAX_ARGUMENTS, holds, parameters_of, takes_any
from flaxfit.optim._optimizer import Adjustable
from flaxfit.tree import OptState, PyTree

# Given mean gradients, both would train without an error, but wrongly, if the shapes happen to fit.
_UNSUPPORTED = {
    optax.LookaheadState: "lookahead needs parameters as optax.LookaheadParams",
    optax.contrib.DifferentiallyPrivateAggregateState: (
        "differentially_private_aggregate needs a gradient per example (clip each by "
        "TrainTask(example_grads_hook=...), add noise by grads_hook=)"
    ),
}


@contextlib.contextmanager
def demands_explained(
    opt_state: OptState, passed: Iterable[str], *, has_hook: bool
) -> Iterator[None]:
    """Rejects optimizers that a step cannot call; adds to errors what a step passes."""
    try:
        for kind, need in _UNSUPPORTED.items():
            if holds(opt_state, kind):
                raise ValueError(f"TrainTask cannot train with this optimizer: {need}.")
        yield
    except (AttributeError, TypeError, ValueError) as error:
        hook = (
            "The others, which have or compute the gradient, would bypass grads_hook: leave it "
            "out. example_grads_hook changes their gradient, too, and optax.chain("
            "optax.stateless(f), optimizer) changes the gradients alone. "
        )
        error.add_note(
            "A step calls optimizer.update(gradients, state, params) with mean gradients, and "
            f"passes those of {', '.join(sorted(passed))} that its signature takes; within "
            f"optax.chain, update must take all with **extra. {hook if has_hook else ''}"
            "An optimizer that needs more belongs in a custom step, TrainTask(step=...). "
            "optax.partition and optax.masked mask grad only with mask_compatible_extra_args=True; "
            "groups of a MultiOptimizer mask it themselves."
        )
        raise


def not_taken(
    optimizer: Any, updates: PyTree, state: OptState, params: PyTree, given: Mapping[str, Any]
) -> list[str]:
    """Returns the names of arguments that are not in the signature, nor used when traced."""
    parameters = parameters_of(optimizer.update)
    doubtful = given.keys() - OPTAX_ARGUMENTS - {p.name for p in parameters}
    if not doubtful or isinstance(optimizer, Adjustable):  # Rejects unknown names itself.
        return []

    def is_used(name: str) -> bool:
        def update(value: PyTree) -> PyTree:
            return optimizer.update(updates, state, params, **{**given, name: value})

        leaves = jax.tree.leaves(given[name])
        if not all(
            isinstance(x, int | float | np.generic | np.ndarray | jax.Array) for x in leaves
        ):
            return False
        try:
            program = jax.make_jaxpr(update)(given[name]).jaxpr
        except jax.errors.JAXTypeError:  # It uses the concrete value.
            return True
        inputs = [*program.outvars, *(x for each in program.eqns for x in each.invars)]
        return not {*map(id, program.invars)}.isdisjoint(map(id, inputs))

    return sorted(name for name in doubtful if not (takes_any(parameters) and is_used(name)))
