"""A function between the gradient of the whole batch and the optimizer, against a loop by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops import assert_close, assert_equal
from marks import slow, thorough
from strategies import strategies

import flaxfit as ff
from flaxfit import make_train_step
from flaxfit.step._metric_totals import compute

N = min(len(jax.devices()), 8)
BATCH = 16
rng = np.random.default_rng(0)
X = rng.normal(size=(2 * BATCH + 5, 3)).astype(np.float32)
Y = rng.normal(size=(len(X), 2)).astype(np.float32)
W = rng.uniform(0.5, 2, size=len(X)).astype(np.float32)
PARAMS = {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
ROWS = (X[:BATCH], Y[:BATCH], W[:BATCH])
STRATEGIES = strategies(N)


def apply(variables, x, **_):
    return x @ variables["params"]["w"] + variables["params"]["b"]


def loss(params, x, y, w):
    return jnp.sum(jnp.mean((apply({"params": params}, x) - y) ** 2, -1) * w) / jnp.sum(w)


def noisy(grads, state, sums):
    """Clips each array by the norm of its parameters, and adds noise of the size of the loss."""
    total, weight = sums["loss"]
    key = jax.random.fold_in(state.key, state.step)

    def changed(grad, param):
        scale = jnp.minimum(1, 0.5 * jnp.linalg.norm(param) / jnp.linalg.norm(grad))
        return scale * grad + 0.01 * total / weight * jax.random.normal(key, grad.shape)

    return jax.tree.map(changed, grads, state.params)


def step_of(hook, optimizer=None, **options):
    """The parameters after one step, and its metrics."""
    task = ff.TrainTask(apply, optimizer or optax.sgd(1.0), "mse", grads_hook=hook, **options)
    state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
    batch = ff.Batch((X[:BATCH],), (Y[:BATCH],), W[:BATCH])
    state, sums = jax.jit(make_train_step(task))(state, batch)
    return dict(state.params), compute(sums, task.metrics)


assert_same = functools.partial(assert_close, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        thorough("one device", 1),
        slow("data-parallel", 2),
        thorough("FSDP", 1),
        thorough("virtual replicas", 2),
    ],
)
def test_the_hook_sees_the_gradient_of_the_whole_batch(strategy, accumulate):
    data = ff.ArrayStream(X, Y, W, batch_size=BATCH, epochs=1)
    optimizer = optax.adam(0.1)

    @jax.jit
    def by_hand(state, *batch):
        value, grads = jax.value_and_grad(loss)(state.params, *batch)
        hooked = noisy(grads, state, {"loss": (value, 1.0)})
        norms = [optax.tree.norm(grads), optax.tree.norm(hooked)]
        return state.apply_gradient(optimizer, hooked), norms

    task = ff.TrainTask(apply, optimizer, "mse", data, accumulate=accumulate, grads_hook=noisy)
    options = {"n_steps_per_checkpoint": 1, "grad_norm": True, "stdout": False}
    options["strategy"] = STRATEGIES[strategy]()
    loop = ff.TrainLoop(lambda key, x: {"params": PARAMS}, task, 0, **options)
    state = ff.TrainState.create(optimizer, {"params": PARAMS}, key=loop.state.key)
    for checkpoint, first in zip(loop, range(0, len(X), BATCH), strict=True):
        rows = slice(first, first + BATCH)
        state, norms = by_hand(state, X[rows], Y[rows], W[rows])
        reported = [checkpoint.metrics[name] for name in ("grad_norm", "hooked_grad_norm")]
        np.testing.assert_allclose(reported, norms, rtol=1e-5)
        assert_close(dict(checkpoint.state.params), dict(state.params), rtol=1e-4, atol=1e-5)


def test_a_frozen_parameter_is_left_out_of_gradients_and_state():
    def halved(grads, state, sums):
        return jax.tree.map(lambda grad, param: (grad + 0 * param) / 2, grads, state.params)

    params, _ = step_of(halved, freeze="b")
    expected = PARAMS["w"] - jax.jit(jax.grad(loss))(PARAMS, *ROWS)["w"] / 2
    assert_same(params, {"b": PARAMS["b"], "w": expected})


@pytest.mark.slow
def test_the_hook_comes_before_clipping():
    params, metrics = step_of(lambda grads, *_: jax.tree.map(lambda g: 100 * g, grads), clip_norm=1)
    grads = jax.jit(jax.grad(loss))(PARAMS, *ROWS)
    norm = float(optax.tree.norm(grads))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["hooked_grad_norm"] == pytest.approx(100 * norm, rel=1e-5)
    assert_same(params, jax.tree.map(lambda p, g: p - g / norm, PARAMS, grads))


def test_a_step_is_skipped_for_what_the_hook_returns():
    params, metrics = step_of(
        lambda grads, *_: jax.tree.map(lambda g: g * jnp.nan, grads), skip_nonfinite=True
    )
    assert metrics["skipped_steps"] == 1
    assert_equal(params, PARAMS)


def test_the_dtypes_of_gradients_stay():
    params, _ = step_of(lambda grads, *_: jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads))
    assert {str(leaf.dtype) for leaf in params.values()} == {"float32"}


def test_other_gradients_than_were_given_are_refused():
    for wrong in lambda grads: None, lambda grads: grads["w"], lambda grads: {**grads, "w": 1.0}:
        with pytest.raises(ValueError, match="grads_hook must return gradients with the structure"):
            step_of(lambda grads, state, sums, wrong=wrong: wrong(grads))


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="grads_hook must be"):
        ff.TrainTask(apply, optax.sgd(0.1), "mse", grads_hook=1.0)


def test_an_optimizer_that_takes_more_of_the_gradient_has_no_hook():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)
    needs = {
        "grad_fn": sam,
        "value_fn": optax.chain(optax.lbfgs()),
        "obj_fn": optax.contrib.sophia(0.1),
    }
    for needed, optimizer in needs.items():
        with pytest.raises((TypeError, ValueError), match=needed) as error:
            step_of(noisy, optimizer)
        assert "would bypass grads_hook" in "".join(error.value.__notes__)


@pytest.mark.slow
def test_an_optimizer_with_a_hook_sees_no_other_gradient():
    def update(grads, state, params=None, **more):
        assert more.keys() == {"value"}
        return jax.tree.map(jnp.negative, grads), state

    own = optax.GradientTransformationExtraArgs(lambda params: (), update)
    transparent = optax.contrib.sam(optax.sgd(1.0), optax.sgd(1.0), sync_period=1)
    expected, _ = step_of(noisy)
    for optimizer in own, transparent, optax.chain(own):
        assert_same(step_of(noisy, optimizer)[0], expected)
