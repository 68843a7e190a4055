"""The gradient of the loss on one replica: of its whole batch, or accumulated over parts."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch, n_examples
from flaxfit.modules._functions import WRITTEN
from flaxfit.optim._averaged import like
from flaxfit.optim._freeze import mask, merge
from flaxfit.state import TrainState
from flaxfit.step._compare import ForwardPass, weight_sums, weights_of
from flaxfit.step._forward import forward
from flaxfit.step._replicas import AnyReplicas
from flaxfit.task import TrainTask
from flaxfit.tree import Function, Params, PyTree, Sums, flat, is_key


class Gradient(NamedTuple):
    """The gradient of the mean loss, and further results of the forward pass."""

    grads: Params
    """The gradient with respect to the trained parameters; frozen ones are masked out."""
    sums: dict[str, Sums]
    penalty: jax.Array | None
    model_state: PyTree
    scale: PyTree
    """The next `DynamicScale` of the loss; `()` without loss scaling."""


class ForwardArguments(NamedTuple):
    """The arguments of `forward`, in order, for the batch of a replica or for a part of it."""

    task: TrainTask
    state: TrainState
    batch: Batch
    key: jax.Array
    replicas: AnyReplicas

    def at(self, trained: Params) -> TrainState:
        """Returns the state with these values of the trained parameters."""
        return self.state.replace(params=merge(trained, self.state.params))


def gradient(arguments: ForwardArguments, weight: PyTree, n_parts: int = 1) -> Gradient:
    """Differentiates the loss of one part of a batch, `sum(w * loss) / weight + penalty / n_parts`.

    `weight` is the sum of weights of the whole batch, or sums by output, divided by the number of
    replicas.
    """
    if (hook := arguments.task.example_grads_hook) is not None:
        return _gradient_by_example(hook, arguments, weight)
    trained, scale = trained_params(arguments)

    def objective(trained: Params) -> tuple[jax.Array, tuple[ForwardPass, PyTree]]:
        result = forward(*arguments._replace(state=arguments.at(trained)))
        penalty = 0 if result.penalty is None else result.penalty
        mean = mean_loss(result, arguments.batch, weight, n_parts)
        return mean + penalty / n_parts, (result, scale)

    grads, (result, next_scale) = grad_of(objective, scale)(trained)
    return Gradient(grads, result.sums, result.penalty, result.model_state, next_scale)


def _gradient_by_example(hook: Function, arguments: ForwardArguments, weight: PyTree) -> Gradient:
    """Sums the gradients of single examples, each after a hook.

    Example i has the random key `fold_in(key, i)`.
    """
    trained, _ = trained_params(arguments)

    def of_example(row: Batch, key: jax.Array) -> Gradient:
        alone = jax.tree.map(lambda x: x[None], row)

        def loss(trained: Params) -> tuple[jax.Array, tuple[ForwardPass, jax.Array]]:
            result = forward(arguments.task, arguments.at(trained), alone, key)
            _check_alone(result, arguments.state.model_state)
            own = weight_sums(arguments.task.loss, alone)
            own = own if result.weights is None else sums_of_weights(result)
            if isinstance(own, Mapping):
                raise ValueError(
                    "example_grads_hook needs one weight for each example, and the batch has "
                    "weights by output."
                )
            return mean_loss(result, alone, own), (result, own)

        grads, (result, own) = jax.grad(loss, has_aux=True)(trained)
        factor = own / jnp.where(weight > 0, weight, 1)
        # A product alone would not do: a hook that divides by a zero norm returns NaN.
        grads = jax.tree.map(
            lambda g: jnp.where(own > 0, factor * g, 0).astype(g.dtype),
            hooked("example_grads_hook", hook, grads),
        )
        return Gradient(grads, result.sums, None, result.model_state, ())

    numbers = jnp.arange(n_examples(arguments.batch))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(arguments.key, numbers)
    found = jax.vmap(of_example)(arguments.batch, keys)
    grads, sums = (jax.tree.map(lambda x: x.sum(0), each) for each in (found.grads, found.sums))
    model_state = jax.tree.map(lambda x: x[0], found.model_state)
    return Gradient(grads, sums, None, model_state, ())


def _check_alone(result: ForwardPass, model_state: PyTree) -> None:
    """Checks that the gradient of an example depends on no other example."""
    if result.values.ndim == 0 or result.penalty is not None:
        what = "is one number" if result.values.ndim == 0 else "has a penalty"
        raise ValueError(
            f"example_grads_hook needs a loss with one value per example, but the loss {what} for "
            "the whole batch: return values of shape (batch,), and add penalties in grads_hook."
        )
    before, after = flat(model_state), flat(result.model_state)
    changed = [
        path
        for path, leaf in after.items()
        # NNX counts drawn random numbers in uint32 variables, which are equal for all examples.
        if leaf is not before.get(path) and leaf.dtype != jnp.uint32
        if not is_key(leaf)
    ]
    if changed:
        raise ValueError(
            f"The model updates {', '.join(changed[:3])} in training, as statistics of a batch, "
            "but example_grads_hook computes each example alone: use layers without batch "
            "statistics, such as LayerNorm or GroupNorm, or keep the statistics fixed (mutable=())."
        )


def hooked(name: str, hook: Function, grads: Params, *more: PyTree) -> Params:
    """Calls a hook; returns its gradients, cast to the dtypes of the given ones."""
    found = jax.tree.map(jnp.asarray, hook(grads, *more))
    shapes, expected = (jax.tree.map(jnp.shape, tree) for tree in (found, grads))
    if jax.tree.structure(found) != jax.tree.structure(grads) or shapes != expected:
        raise ValueError(
            f"{name} must return gradients with the structure and the shapes of its argument, "
            f"{expected!r:.300}; it returned {shapes!r:.300}."
        )
    return like(found, grads)


def trained_params(arguments: ForwardArguments) -> tuple[Params, PyTree]:
    """Returns the trained parameters, and the `DynamicScale` of the loss or `()`."""
    task, state, *_ = arguments
    scale: PyTree = getattr(state.opt_state, "scale", ()) if task.precision == "float16" else ()
    trained = mask(state.params, task.freeze)
    whole = [
        f"{path} ({leaf.dtype})"
        for path, leaf in flat(trained).items()
        if not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if whole:
        raise ValueError(
            f"Cannot train {', '.join(whole[:5])}: only floating-point parameters have gradients. "
            "Name their paths in freeze=, or keep them in another collection than params."
        )
    return trained, scale


def grad_of(objective: Function, scale: PyTree) -> Function:
    """Converts `params -> (value, (result, scale))` to `params -> (gradient, (result, scale))`.

    A `DynamicScale` scales the value, so that small gradients do not underflow in 16 bits; the
    returned scale is the next one.
    """
    if scale == ():
        return jax.grad(objective, has_aux=True)

    def scaled(params: Params) -> tuple[Params, tuple[PyTree, PyTree]]:
        found = scale.value_and_grad(objective, has_aux=True)(params)
        result, _ = found.aux[1]
        return found.grad, (result, found.dynamic_scale)

    return scaled


def mean_loss(result: ForwardPass, batch: Batch, weight: PyTree, n_parts: int = 1) -> jax.Array:
    """Returns the loss of one of `n_parts` parts, divided by the weight of the whole batch."""
    if result.values.ndim == 0:
        return result.values / n_parts
    loss = result.sums["loss"]
    if isinstance(weight, Mapping):
        return jnp.sum(jnp.stack([_divided(loss[name][0], weight[name]) for name in weight]))
    if result.weights is not None:
        return _divided(loss[0], weight)
    return _divided(loss[0], weight * (result.values.size // weights_of(batch).size))


def accumulated_gradient(arguments: ForwardArguments, weight: PyTree, n: int) -> Gradient:
    """Sums the gradients of `n` parts of a batch, computed one after the other.

    Only the activations of one part are in memory. Part i has the random key `fold_in(key, i)`, and
    starts from the model state of part i - 1.
    """

    def of_part(model_state: PyTree, part: Batch, key: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        found = gradient(_part_of(arguments, model_state, part, key), weight, n)
        return found.model_state, (found.grads, found.sums, found.penalty), found.scale

    parts = in_parts(arguments.batch, n)
    model_state, total, scales = over_parts(
        of_part, arguments.state.model_state, parts, arguments.key
    )
    grads, sums, penalty = total
    # All parts start from the same scale; a part that overflows lowers it.
    scale = jax.tree.map(lambda x: x.min(0), scales)
    return Gradient(grads, sums, None if penalty is None else penalty / n, model_state, scale)


def _part_of(
    arguments: ForwardArguments, model_state: PyTree, batch: Batch, key: jax.Array
) -> ForwardArguments:
    state = arguments.state.replace(model_state=model_state)
    return arguments._replace(state=state, batch=batch, key=key)


def weight_of_loss(arguments: ForwardArguments) -> PyTree:
    """Returns the sum of loss weights times batch weights, or sums by output.

    The gradient is divided by it, so it needs a forward pass of its own; the compiler removes all
    operations of this pass that the weights do not depend on.
    """
    return _forward_sums(lambda result, n_parts: sums_of_weights(result), arguments)


def loss_sums(arguments: ForwardArguments) -> tuple[PyTree, jax.Array | None]:
    """Returns the sums of the loss and the penalty, as in `gradient`, by a forward pass alone."""

    def loss_of(result: ForwardPass, n_parts: int) -> tuple[PyTree, jax.Array | None]:
        penalty = None if result.penalty is None else result.penalty / n_parts
        return result.sums["loss"], penalty

    return _forward_sums(loss_of, arguments)


def _forward_sums(added: Function, arguments: ForwardArguments) -> PyTree:
    """Sums `added(forward pass, n_parts)` over the parts of a batch."""
    n = count_parts(arguments)

    def of_part(model_state: PyTree, part: Batch, key: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        result = forward(*_part_of(arguments, model_state, part, key))
        return result.model_state, added(result, n), ()

    model_state, key = arguments.state.model_state, arguments.key
    if n == 1:
        return of_part(model_state, arguments.batch, key)[1]
    return over_parts(of_part, model_state, in_parts(arguments.batch, n), key)[1]


def sums_of_weights(result: ForwardPass) -> PyTree:
    """Returns the weight of the sum of a loss, or weights by output."""
    loss = result.sums["loss"]
    is_by_output = isinstance(loss, Mapping)
    return {name: each[1] for name, each in loss.items()} if is_by_output else loss[1]


def in_parts(batch: PyTree, n: int) -> PyTree:
    """Divides a batch into `n` parts, along a new first axis."""
    return jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)


def over_parts(
    of_part: Function, model_state: PyTree, parts: PyTree, key: jax.Array
) -> tuple[PyTree, PyTree, PyTree]:
    """Scans `of_part(model_state, part, key) -> (model_state, added, listed)` over parts.

    Returns the last model state, the sum of `added`, and `listed` stacked. All parts start from the
    same parameters; values that parts write to parameters are averaged.
    """

    def of_one(model_state: PyTree, part: PyTree, key: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        new, added, listed = of_part(model_state, part, key)
        state = {name: tree for name, tree in new.items() if name != WRITTEN}
        return state, (added, new.get(WRITTEN, {})), listed

    n = len(jax.tree.leaves(parts)[0])
    zeros: PyTree = None
    # A traced scan needs an initial carry of the final structure; an eager one is a Python loop.
    if not jax.config.jax_disable_jit:
        first = jax.tree.map(lambda x: x[0], parts)
        _, added, _ = jax.eval_shape(of_one, model_state, first, key)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), added)

    def add_part(carry: PyTree, numbered: tuple[jax.Array, Batch]) -> PyTree:
        (model_state, total), (number, part) = carry, numbered
        model_state, new, listed = of_one(model_state, part, jax.random.fold_in(key, number))
        total = new if total is None else jax.tree.map(jnp.add, total, new)
        return (model_state, total), listed

    start = (model_state, zeros)
    (model_state, found), listed = jax.lax.scan(add_part, start, (jnp.arange(n), parts))
    total, written = found
    if written:
        written = jax.tree.map(lambda x: (x / n).astype(x.dtype), written)
        model_state = {**model_state, WRITTEN: written}
    return model_state, total, listed


def count_parts(arguments: ForwardArguments) -> int:
    """Returns the largest divisor of the number of examples that is at most `accumulate`."""
    n, wanted = n_examples(arguments.batch), arguments.task.accumulate
    return next(parts for parts in range(min(wanted, n), 0, -1) if n % parts == 0)


def _divided(total: jax.Array, weight: jax.Array) -> jax.Array:
    return total / jnp.where(weight > 0, weight, 1)
