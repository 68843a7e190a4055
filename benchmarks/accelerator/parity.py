"""Parity: a TrainLoop against a hand-written loop on the same device.

Every distance is that of the variables, as a part of the way that the hand-written loop took. The
tolerance must catch an error: the same loop with a learning rate that is off by four times the
tolerance has to fail the check that flaxfit passes.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import flaxfit as ff

# A gradient sums some thousands of products, each rounded to 2**-24 in an order that the compiler
# chooses: 1e-6 of its size is usual, and errors of a few steps add up. A network in bfloat16 rounds
# each activation and each gradient of one to 2**-9, unless operations are fused, which the
# compiler chooses as well: 1 % is usual.
TOLERANCE = {None: 5e-5, "bfloat16": 2e-2}
RATE, MOMENTUM = 0.1, 0.9


class Failed(Exception):
    """A check failed."""


class Regularized(nn.Module):
    """Running statistics and random numbers, which a step must update."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(16, use_bias=False)(x))
        x = nn.Dropout(0.3, deterministic=False)(nn.relu(x))
        return nn.Dense(4)(x)


random = np.random.default_rng(0)
X = random.normal(size=(64, 8)).astype(np.float32)
Y = (X @ random.normal(size=(8, 4))).argmax(-1).astype(np.int32)
IMAGES = random.normal(size=(64, 12, 12, 1)).astype(np.float32)


def batches_of(x: Any, y: Any, *sizes: int) -> list[Any]:
    """Batches of these sizes, one after the other."""
    ends = np.cumsum(sizes)
    return [(x[end - n : end], y[end - n : end]) for n, end in zip(sizes, ends, strict=True)]


def by_hand(
    module: Any, state: Any, batches: Iterable[Any], rate: float, precision: str | None
) -> tuple[Any, list[float]]:
    """The variables and the losses of a hand-written loop of SGD with momentum."""

    def down(tree: Any) -> Any:
        if precision is None:
            return tree
        low = jnp.dtype(precision)
        return jax.tree.map(lambda a: a.astype(low) if a.dtype == jnp.float32 else a, tree)

    @jax.jit
    def update(variables: Any, velocity: Any, step: Any, rate: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            rngs = {"dropout": jax.random.fold_in(ff.step_key(state.key, step), 0)}
            inputs = {**variables, "params": down(params)}
            logits, new = module.apply(inputs, down(x), rngs=rngs, mutable=["batch_stats"])
            logits = logits.astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), new

        params = variables["params"]
        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
        params = jax.tree.map(lambda p, v: p - rate * v, params, velocity)
        return {**new, "params": params}, velocity, value

    variables, losses = state.variables, []
    velocity = jax.tree.map(jnp.zeros_like, variables["params"])
    for step, (x, y) in enumerate(batches):
        variables, velocity, value = update(variables, velocity, step, rate, x, y)
        losses.append(float(value))
    return jax.device_get(variables), losses


def loop_of(module: Any, data: Any, *, optimizer: Any = None, init: Any = None, **options: Any):
    """A TrainLoop of the cross-entropy on the first device."""
    precision = options.pop("precision", None)
    optimizer = optimizer or optax.sgd(RATE, MOMENTUM)
    task = ff.TrainTask(
        module.apply, optimizer, "crossentropy", data, ["accuracy"], precision=precision
    )
    if "strategy" not in options:
        options["devices"] = jax.devices()[:1]
    return ff.TrainLoop(init or module.init, task, 0, stdout=False, **options)


def distance(ours: Any, theirs: Any, start: Any) -> float:
    """Returns the distance of two trees, relative to that from the start to the second."""

    def flat(tree: Any) -> np.ndarray:
        return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])

    ours, theirs, start = (flat(jax.device_get(tree)) for tree in (ours, theirs, start))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - start))


def parity(
    module: Any, batches: list[Any], precision: str | None = None, **options: Any
) -> Callable[[], str]:
    """Makes a check that a TrainLoop takes the steps of a hand-written loop."""

    def check() -> str:
        loop = loop_of(module, batches, precision=precision, **options)
        start = jax.device_get(loop.state.replace(key=None)).replace(key=loop.state.key)
        taken = [*loop]
        ours = {name: taken[-1].state.variables[name] for name in start.variables}
        theirs, losses = by_hand(module, start, batches, RATE, precision)
        tolerance = TOLERANCE[precision]
        apart = distance(ours, theirs, start.variables)
        wrong, _ = by_hand(module, start, batches, RATE * (1 + 4 * tolerance), precision)
        off = distance(ours, wrong, start.variables)
        if not apart <= tolerance < off:
            raise Failed(f"{apart:.1e} of the way apart; with a wrong learning rate {off:.1e}")
        far = max(abs(c.loss / b - 1) for c, b in zip(taken, losses, strict=True))
        if not far <= tolerance:
            raise Failed(f"a loss differs by {far:.1e} of it")
        return f"{apart:.0e} of the way apart, at most {tolerance:g}; {off:.0e} with a wrong rate"

    return check
