"""The gradient of a loss of the whole batch, while the model computes one part at a time.

L. Gao, Y. Zhang, J. Han, J. Callan, "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup", 2021: compute the outputs of all parts, then the derivatives of the loss with
respect to them, then run the model again on each part and backpropagate these derivatives.
"""

from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch
from flaxfit.step._compare import ForwardPass, compare
from flaxfit.step._gradient import (
    ForwardArguments,
    Gradient,
    count_parts,
    grad_of,
    in_parts,
    mean_loss,
    over_parts,
    sums_of_weights,
    trained_params,
    weight_of_loss,
)
from flaxfit.step._model_call import (
    apply_model,
    as_outputs,
    sum_of_penalties,
    updated_state,
    which_have_rows,
)
from flaxfit.step._random import rngs_of
from flaxfit.task import in_float32
from flaxfit.tree import Params, PyTree


def whole_batch_gradient(arguments: ForwardArguments, weight: PyTree, n: int) -> Gradient:
    """Computes the gradient of a loss of all outputs; see `accumulated_gradient`.

    Memory holds the activations of one part, and the outputs of all parts.
    """
    task, state, batch, key, _ = arguments
    trained, scale = trained_params(arguments)
    parts = in_parts(batch, n)
    outputs, model_state = _outputs_of(arguments, parts)
    has_rows = _which_have_rows(arguments)
    slopes, result = _slopes(arguments, outputs, weight, has_rows)

    def of_part(model_state: PyTree, given: Any, key: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        part, slope = given

        def objective(trained: Params) -> tuple[jax.Array, PyTree]:
            params, rngs = arguments.at(trained).params, rngs_of(task.rngs, key)
            found, updates = apply_model(task, params, model_state, part, rngs)
            floats = _floats(in_float32(as_outputs(found)))
            # The gradient of <outputs, dL/d(outputs)> is that of L, by the chain rule.
            total = sum((jnp.vdot(x, s) for x, s in zip(floats, slope, strict=True)), jnp.zeros(()))
            if (penalty := sum_of_penalties(None, updates)) is not None:
                total += penalty / n
            return total, ((updated_state(model_state, updates), penalty), scale)

        grads, ((model_state, penalty), next_scale) = grad_of(objective, scale)(trained)
        return model_state, (grads, penalty), next_scale

    _, (grads, sown), scales = over_parts(of_part, state.model_state, (parts, slopes), key)
    penalty = result.penalty
    if sown is not None:
        penalty = sown / n if penalty is None else penalty + sown / n
    scale = jax.tree.map(lambda x: x.min(0), scales)
    return Gradient(grads, result.sums, penalty, model_state, scale)


def weight_of_whole_loss(arguments: ForwardArguments) -> PyTree:
    """Like `weight_of_loss`, for a loss of all outputs."""
    n = count_parts(arguments)
    if n == 1:
        return weight_of_loss(arguments)
    has_rows = _which_have_rows(arguments)
    outputs = _joined(_outputs_of(arguments, in_parts(arguments.batch, n))[0], has_rows)
    return sums_of_weights(_compared(arguments, outputs, has_rows))


def _compared(
    arguments: ForwardArguments, outputs: tuple[PyTree, ...], has_rows: PyTree
) -> ForwardPass:
    """Applies the loss to the outputs of the whole batch."""
    return compare(
        arguments.task, outputs, arguments.batch, arguments.replicas, rows_of=lambda: has_rows
    )


def _outputs_of(arguments: ForwardArguments, parts: Batch) -> tuple[tuple[PyTree, ...], PyTree]:
    """Returns the outputs of all parts, stacked, and the last model state."""
    task, state, *_ = arguments

    def of_part(model_state: PyTree, part: Batch, key: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        rngs = rngs_of(task.rngs, key)
        outputs, updates = apply_model(task, state.params, model_state, part, rngs)
        return updated_state(model_state, updates), (), in_float32(as_outputs(outputs))

    model_state, _, outputs = over_parts(of_part, state.model_state, parts, arguments.key)
    return outputs, model_state


def _slopes(
    arguments: ForwardArguments, outputs: tuple[PyTree, ...], weight: PyTree, has_rows: PyTree
) -> tuple[list[jax.Array], ForwardPass]:
    """Returns the derivatives of the loss by the stacked outputs, and its forward pass."""
    leaves, structure = jax.tree.flatten(outputs)

    def loss(floats: list[jax.Array]) -> tuple[jax.Array, ForwardPass]:
        left = iter(floats)
        merged = structure.unflatten([next(left) if _is_float(x) else x for x in leaves])
        result = _compared(arguments, _joined(merged, has_rows), has_rows)
        penalty = 0 if result.penalty is None else result.penalty
        return mean_loss(result, arguments.batch, weight) + penalty, result

    return jax.grad(loss, has_aux=True)(_floats(outputs))


def _which_have_rows(arguments: ForwardArguments) -> tuple[PyTree, ...]:
    """Returns a mask of the model's outputs with an axis of examples."""
    task, state, batch, key, _ = arguments

    def outputs_of(batch: Batch) -> PyTree:
        rngs = rngs_of(task.rngs, key)
        return apply_model(task, state.params, state.model_state, batch, rngs)[0]

    return which_have_rows(outputs_of, batch)


def _joined(stacked: PyTree, has_rows: PyTree) -> PyTree:
    """Concatenates the outputs of all parts.

    Arrays without an axis of examples, such as a learned scale, are averaged if they are floats;
    otherwise the first is taken.
    """

    def joined(x: jax.Array, has_axis: bool) -> jax.Array:
        if has_axis:
            return x.reshape(-1, *x.shape[2:])
        return x.mean(0) if _is_float(x) else x[0]

    return jax.tree.map(joined, stacked, has_rows)


def _floats(tree: PyTree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _is_float(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
