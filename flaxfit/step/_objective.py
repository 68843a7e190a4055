"""Objectives: losses that call the model by themselves, `f(apply, batch, rngs) -> values`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch, n_examples
from flaxfit.step._broadcasting import couples_rows
from flaxfit.task._options import check_names
from flaxfit.task._precision import in_float32
from flaxfit.tree._types import Function, PyTree, Rngs, Sums
from flaxfit.tree._weights import beside, joined_weights


class ObjectiveResult(NamedTuple):
    """What an objective returned for the examples of a replica."""

    values: jax.Array
    """`(batch, ...)`."""
    weights: PyTree
    """Weights beside the values, or None."""
    aux: Mapping[str, PyTree]
    """By name what else is reported: values by example, or pairs `(sum, weight)`."""


class Calls:
    """The model as an objective calls it: `apply(*inputs, rngs=None, **named) -> outputs`.

    Each call starts from the collections that the one before it left, and has random keys of its
    own, unless `rngs` is given. Calls in Python count: a `lax.scan` around one repeats its keys. A
    model that updates collections cannot be called within `jax.grad` and the like.

    Args:
      run: `(model_state, inputs, rngs) -> (outputs, updates, model_state)`.
      model_state: the collections beside the parameters.
      rngs_of_call: `number of the call -> keys by stream`.
    """

    def __init__(
        self,
        run: Callable[[PyTree, PyTree, Rngs], tuple[PyTree, Mapping[str, PyTree], PyTree]],
        model_state: PyTree,
        rngs_of_call: Callable[[int], Rngs],
    ):
        self._run, self._rngs_of_call = run, rngs_of_call
        self.model_state = model_state
        # Shapes and dtypes alone: arrays could not leave a `jax.grad` around the call.
        self.outputs: list[PyTree] = []
        self.updates: list[Mapping[str, PyTree]] = []

    def __call__(self, *inputs: PyTree, rngs: Rngs | None = None, **named: PyTree) -> PyTree:
        """Applies the model; named inputs are keyword arguments of its call."""
        if inputs and named:
            raise TypeError(
                "apply takes the inputs of the model by position or by keyword, got both: "
                f"{len(inputs)} and {', '.join(named)}."
            )
        rngs = self._rngs_of_call(len(self.outputs)) if rngs is None else rngs
        found = self._run(self.model_state, inputs or named, rngs)
        outputs, updates, self.model_state = found
        self.outputs.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs))
        if updates:
            self.updates.append(updates)
        return outputs


def call_objective(objective: Any, apply: Function, batch: Batch, rngs: Rngs) -> Any:
    """Calls an objective, and checks what it returns.

    Raises:
      TypeError: it returned something other than values, weights and named results.
      ValueError: the values are not by example, or the weights do not fit them.
    """
    n, found = n_examples(batch), objective(apply, batch, rngs)
    parts: list[Any] = list(found) if isinstance(found, tuple) else [found]
    kinds = ", ".join(type(part).__name__ for part in parts)
    parts = [part for i, part in enumerate(parts) if part is not None or not i]
    aux = parts.pop() if len(parts) > 1 and isinstance(parts[-1], Mapping) else {}
    is_array = all(hasattr(part, "shape") for part in parts)
    if not 1 <= len(parts) <= 2 or not is_array or not all(part.ndim for part in parts[1:]):
        raise TypeError(
            f"The objective returned {kinds}; expected values of shape ({n}, ...), or a tuple "
            "(values, aux), (values, weights) or (values, weights, aux), where aux is a mapping. "
            "It takes no penalty: add that to the values."
        )
    values, *weights = in_float32(tuple(map(jnp.asarray, parts)))
    if values.shape[:1] != (n,):
        raise ValueError(
            f"The objective returned values of shape {values.shape}; expected one value per "
            f"example, of shape ({n},) or ({n}, ...): leave out the mean, so that weights, padding "
            "and several devices are exact."
        )
    own = None
    if weights:
        own = beside(jnp.asarray(weights[0], float), values.shape, "The objective")
    return ObjectiveResult(values, own, in_float32(dict(aux)))


def sums_of_aux(
    aux: Mapping[str, PyTree], weights: jax.Array, own: jax.Array | None
) -> dict[str, Sums]:
    """The sums of what an objective reports beside its values: `(sum, weight)` by name.

    Values are weighted as those of the objective, by its `own` weights where these fit, too.
    """
    found = {}
    check_names(aux)
    for name, value in jax.lax.stop_gradient(dict(aux)).items():
        parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
        if len(parts) == 2 and not any(map(jnp.ndim, parts)):
            found[name] = tuple(jnp.asarray(part, jnp.float32) for part in parts)
        elif len(parts) == 1 and jnp.shape(parts[0])[:1] == weights.shape[:1]:
            values = jnp.asarray(parts[0], jnp.float32)
            factor = jnp.ones(len(values))
            if own is not None and own.shape == values.shape[: own.ndim]:
                factor = own
            w = joined_weights(factor, weights, values.shape, f"aux[{name!r}]")
            found[name] = jnp.sum(jnp.where(w != 0, w * values, 0)), jnp.sum(w)
        else:
            raise ValueError(
                f"The objective reports {name!r} of shape {jnp.shape(parts[0])}; expected one "
                f"value per example, of shape ({len(weights)}, ...), whose mean is reported, or a "
                "pair (sum, weight) of numbers, which are added."
            )
    return found


def replayed(objective: Any, rngs: Rngs) -> Function:
    """An objective as a function of the outputs of its calls and the batch.

    It returns what the objective does, and the inputs of the calls.
    """

    def function(*outputs_and_batch: PyTree) -> tuple[Any, list[PyTree]]:
        *outputs, batch = outputs_and_batch
        seen: list[PyTree] = []

        def apply(*inputs: PyTree, rngs: Rngs | None = None, **named: PyTree) -> PyTree:
            seen.append((inputs, named))
            return outputs[len(seen) - 1]

        return objective(apply, batch, rngs), seen

    return function


def combines_examples(
    objective: Any, outputs: tuple[PyTree, ...], batch: Batch, rngs: Rngs
) -> bool:
    """Whether an objective combines the examples of a batch, apart from what the model does."""
    function = replayed(objective, rngs)

    def values_and_inputs(*outputs_and_batch: PyTree) -> PyTree:
        found, inputs = function(*outputs_and_batch)
        return [found[0] if isinstance(found, tuple) else found, inputs]

    return couples_rows(values_and_inputs, outputs, (batch,))
