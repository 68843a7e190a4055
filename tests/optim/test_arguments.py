"""What optimizers receive: the loss of the whole batch, as a number and as a function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import lbfgs, probe
from loops import given
from marks import thorough

import flaxfit as ff
from flaxfit import make_train_step
from flaxfit.optim import MultiOptimizer, OptimizerDef

BATCH = 16
rng = np.random.default_rng(0)
X = rng.normal(size=(2 * BATCH, 3)).astype(np.float32)
Y = (np.tanh(X[:, :2]) + 0.1 * rng.normal(size=(len(X), 2))).astype(np.float32)
W = rng.uniform(0.5, 2, size=BATCH).astype(np.float32)
PARAMS = {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}


def predict(params, x):
    return jnp.tanh(x @ params["w"]) + params["b"]


def apply(variables, x, **options):
    return predict(variables["params"], x), {}


def loss(params, x=X[:BATCH], y=Y[:BATCH], w=W):
    return jnp.sum(jnp.mean((predict(params, x) - y) ** 2, -1) * w) / jnp.sum(w)


def assert_same(found, expected, rtol=2e-5, atol=2e-6):
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol)


def step_of(optimizer, batch=None, **options):
    """The state and the sums of one step, and the state before it."""
    task = ff.TrainTask(apply, optimizer, "mse", **options)
    before = ff.TrainState.create(task.optimizer, {"params": PARAMS})
    batch = batch or ff.Batch((X[:BATCH],), (Y[:BATCH],), W)
    return *jax.jit(make_train_step(task))(before, batch), before


def whole_step(optimizer, params, loss_fn, names=("value", "grad", "value_fn")):
    """One step by hand of an optimizer that sees these parameters."""

    @jax.jit
    def step(params):
        value, grad = jax.value_and_grad(loss_fn)(params)
        known = {"value": value, "grad": grad, "value_fn": loss_fn}
        extra = {name: known[name] for name in names}
        updates, _ = optimizer.update(grad, optimizer.init(params), params, **extra)
        return optax.apply_updates(params, updates)

    return step(params)


def loss_of_w(w):
    return loss({**PARAMS, "w": w})


@functools.cache
def line_search_of_w():
    return whole_step(lbfgs(), PARAMS["w"], loss_of_w)


@pytest.mark.slow
def test_frozen_parameters_stay_out_of_a_line_search_whose_gradient_is_not_clipped():
    clipped = optax.chain(optax.clip_by_global_norm(0.1), lbfgs())
    state, *_ = step_of(lbfgs(), freeze="b", clip_norm=0.1, ema=0.5)
    expected = {"b": PARAMS["b"], "w": whole_step(clipped, PARAMS["w"], loss_of_w)}
    assert_same(state.params, expected)
    average = {"w": (PARAMS["w"] + expected["w"]) / 2}  # What is frozen has none.
    assert_same(state.opt_state.average, average)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["", thorough("b")])
def test_each_group_searches_along_its_own_line(freeze):
    groups = MultiOptimizer(("w", lbfgs()), ("b", OptimizerDef(optax.polyak_sgd, scaling=0.5)))
    state, *_ = step_of(groups, freeze=freeze or ())
    polyak, of_b = optax.polyak_sgd(scaling=0.5), PARAMS["b"]
    if not freeze:
        of_b = whole_step(polyak, of_b, lambda b: loss({**PARAMS, "b": b}), ["value"])
    assert_same(state.params, {"w": line_search_of_w(), "b": of_b})


@pytest.mark.slow
def test_a_partition_of_optax_says_how_its_gradient_is_masked():
    labels = {"w": "a", "b": "b"}
    parts = {"a": lbfgs(), "b": optax.sgd(0.1)}
    with pytest.raises(ValueError) as error:
        step_of(optax.partition(parts, labels))
    assert "mask_compatible_extra_args=True" in "".join(error.value.__notes__)
    state, *_ = step_of(optax.partition(parts, labels, mask_compatible_extra_args=True))
    assert_same(state.params["w"], line_search_of_w())


def test_float16_passes_what_is_not_scaled():
    state, *_ = step_of(probe(0.1), precision="float16")
    seen = state.opt_state.inner
    value, grad = jax.jit(jax.value_and_grad(loss))(PARAMS)
    assert float(seen.value) == pytest.approx(float(value), rel=1e-2)
    assert float(seen.value_there) == float(seen.value)
    assert_same(seen.grad, grad, rtol=0.02, atol=0.01)
    assert_same(seen.grad_there, seen.grad, rtol=0, atol=0)


@pytest.mark.slow
def test_a_step_that_is_not_finite_leaves_the_memory_of_a_line_search_alone():
    broken = ff.Batch((X[:BATCH] * np.nan,), (Y[:BATCH],))
    after, sums, before = step_of(lbfgs(), broken, skip_nonfinite=True)
    assert float(sums["skipped_steps"][0]) == 1
    assert int(after.step) == 1
    expected = (before.params, before.opt_state)
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), expected)


@pytest.mark.thorough
def test_virtual_replicas_search_the_same_line_to_the_bit_on_any_devices():
    def noisy(variables, x, rngs, mutable):
        kept = jax.random.bernoulli(rngs["dropout"], 0.5, x.shape)
        penalty = jnp.sum(variables["params"]["w"] ** 2)
        return apply(variables, x * kept)[0], {"losses": {"w": penalty}}

    @given
    def init(key, x):
        return {"params": PARAMS}

    found = []
    for n in (1, 4):
        strategy = ff.DataParallel(jax.devices()[:n], virtual_replicas=4)
        data = ff.ArrayStream(X, Y, batch_size=BATCH, epochs=2)
        task = ff.TrainTask(noisy, lbfgs(), "mse", data, accumulate=2)
        loop = ff.TrainLoop(init, task, 0, strategy=strategy, stdout=False)
        list(loop)
        found.append(loop.state.params)
    jax.tree.map(np.testing.assert_array_equal, *found)
