"""What a step passes to an optimizer: the loss of the whole batch, as a number and a function."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow, thorough
from strategies import strategies

import flaxfit as ff
from flaxfit import make_train_step
from flaxfit.optim import MultiOptimizer, OptimizerDef

# test_eight_devices.py runs this file once more, on eight devices.
N = min(len(jax.devices()), 8)
BATCH = 16
rng = np.random.default_rng(0)
X = rng.normal(size=(2 * BATCH + 5, 3)).astype(np.float32)
Y = (np.tanh(X[:, :2]) + 0.1 * rng.normal(size=(len(X), 2))).astype(np.float32)
W = rng.uniform(0.5, 2, size=len(X)).astype(np.float32)
PARAMS = {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
STRATEGIES = strategies(N)


def predict(params, x):
    return jnp.tanh(x @ params["w"]) + params["b"]


def apply(variables, x, **options):
    y = predict(variables["params"], x)
    return (y, {}) if "mutable" in options else y


def noisy(variables, x, rngs, mutable):
    """With dropout, and a term of the loss that is not weighted."""
    kept = jax.random.bernoulli(rngs["dropout"], 0.5, x.shape)
    return apply(variables, x * kept), {"losses": {"w": jnp.sum(variables["params"]["w"] ** 2)}}


class Seen(NamedTuple):
    value: jax.Array
    value_there: jax.Array
    grad: jax.Array
    grad_there: jax.Array


def probe(rate=0.1):
    """Descends, and keeps what it was passed, and what the functions give at its parameters."""

    def init(params):
        none = jax.tree.map(jnp.zeros_like, params)
        return Seen(jnp.zeros(()), jnp.zeros(()), none, none)

    def update(updates, state, params=None, *, value, grad, value_fn, **extra):
        seen = Seen(value, value_fn(params), grad, jax.grad(value_fn)(params))
        return jax.tree.map(lambda g: -rate * g, updates), seen

    return optax.GradientTransformationExtraArgs(init, update)


def lbfgs():
    return optax.lbfgs(memory_size=3, linesearch=optax.scale_by_zoom_linesearch(4))


def trained(optimizer, strategy, model=apply, **options):
    """The metrics of each step of two epochs, and the last state."""
    data = ff.ArrayStream(X, Y, W, batch_size=BATCH, epochs=2)
    task = ff.TrainTask(model, optimizer, "mse", data, **options)
    loop = ff.TrainLoop(
        lambda key, x: {"params": PARAMS},
        task,
        0,
        strategy=STRATEGIES[strategy](),
        n_steps_per_checkpoint=1,
        stdout=False,
    )
    return [checkpoint.metrics for checkpoint in loop], loop.state


def assert_same(found, expected, rtol=2e-5, atol=2e-6):
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        thorough("one device", 1),
        thorough("one device", 2),
        slow("data-parallel", 1),
        thorough("data-parallel", 2),
        thorough("FSDP", 1),
        slow("FSDP", 2),
        thorough("virtual replicas", 1),
        slow("virtual replicas", 2),
    ],
)
def test_the_functions_give_value_and_gradient_with_the_same_random_keys(strategy, accumulate):
    metrics, state = trained(probe(), strategy, model=noisy, accumulate=accumulate)
    seen = state.opt_state
    assert float(seen.value) == pytest.approx(
        metrics[-1]["loss"] + metrics[-1]["penalty"], rel=1e-6
    )
    assert float(seen.value_there) == pytest.approx(float(seen.value), rel=1e-6)
    assert_same(seen.grad_there, seen.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data-parallel", thorough("FSDP")])
def test_a_loss_that_compares_examples_is_passed_with_all_of_them(strategy):
    def distinct(outputs, targets):
        distances = jnp.sum((outputs[:, None] - targets[None]) ** 2, -1)
        return optax.softmax_cross_entropy_with_integer_labels(-distances, jnp.arange(len(targets)))

    def last(strategy, **options):
        data = ff.ArrayStream(X[:32], Y[:32], batch_size=BATCH, epochs=1)
        task = ff.TrainTask(apply, probe(), distinct, data, across="batch", **options)

        def init(key, x):
            return {"params": PARAMS}

        loop = ff.TrainLoop(init, task, 0, strategy=STRATEGIES[strategy](), stdout=False)
        list(loop)
        return loop.state.opt_state

    seen = last(strategy, accumulate=2)
    assert_same(seen, last("one device"))
    assert_same((seen.value_there, seen.grad_there), (seen.value, seen.grad))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "accumulate"), [("data-parallel", 2), thorough("FSDP", 1)])
def test_an_objective_is_passed_as_a_loss_is(strategy, accumulate):
    def objective(apply, batch, rngs):
        (x,), (y,) = batch.inputs, batch.targets
        return jnp.mean((apply(x) - y) ** 2, -1) + 0.1 * jnp.mean((apply(-x) + y) ** 2, -1)

    data = ff.ArrayStream(X[:32], Y[:32], W[:32], batch_size=BATCH, epochs=1)
    task = ff.TrainTask(apply, probe(), objective=objective, data=data, accumulate=accumulate)

    def init(key, x):
        return {"params": PARAMS}

    loop = ff.TrainLoop(
        init, task, 0, n_steps_per_checkpoint=1, strategy=STRATEGIES[strategy](), stdout=False
    )
    metrics = [checkpoint.metrics for checkpoint in loop]
    seen = loop.state.opt_state
    assert float(seen.value) == pytest.approx(metrics[-1]["loss"], rel=1e-6)
    assert_same((seen.value_there, seen.grad_there), (seen.value, seen.grad))


def by_hand(update, state):
    """The parameters after two epochs of `update(params, state, batch) -> (params, state)`."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    for first in [*range(0, len(X), BATCH)] * 2:
        rows = slice(first, first + BATCH)
        params, state = update(params, state, X[rows], Y[rows], W[rows])
    return params


def loss(params, x, y, w):
    return jnp.sum(jnp.mean((predict(params, x) - y) ** 2, -1) * w) / jnp.sum(w)


@jax.jit
def lbfgs_step(params, state, *batch):

    def value_fn(params):
        return loss(params, *batch)

    value, grad = jax.value_and_grad(value_fn)(params)
    extra = {"value": value, "grad": grad, "value_fn": value_fn}
    updates, state = lbfgs().update(grad, state, params, **extra)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        slow(*case) if case == ("data-parallel", 2) else thorough(*case)
        for case in itertools.product(STRATEGIES, (1, 2))
    ],
)
def test_a_line_search_steps_as_on_one_device_by_hand(strategy, accumulate):
    _, state = trained(lbfgs(), strategy, accumulate=accumulate)
    expected = by_hand(lbfgs_step, lbfgs().init(PARAMS))
    assert_same(state.params, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_virtual_replicas_search_the_same_line_to_the_bit_on_any_devices():
    found = []
    for n in (1, N):
        strategy = ff.DataParallel(jax.devices()[:n], virtual_replicas=N)
        data = ff.ArrayStream(X[:32], Y[:32], batch_size=BATCH, epochs=2)
        task = ff.TrainTask(noisy, lbfgs(), "mse", data, accumulate=2)

        def init(key, x):
            return {"params": PARAMS}

        loop = ff.TrainLoop(init, task, 0, strategy=strategy, stdout=False)
        list(loop)
        found.append(loop.state.params)
    jax.tree.map(np.testing.assert_array_equal, *found)


def state_of(task):
    return ff.TrainState.create(task.optimizer, {"params": PARAMS})


def step_of(optimizer, n=BATCH, **options):
    """The state and the sums of one step."""
    task = ff.TrainTask(apply, optimizer, "mse", **options)
    return jax.jit(make_train_step(task))(state_of(task), ff.Batch((X[:n],), (Y[:n],), W[:n]))


ROWS = (X[:BATCH], Y[:BATCH], W[:BATCH])


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
    return loss({**PARAMS, "w": w}, *ROWS)


@functools.cache
def line_search_of_w():
    return whole_step(lbfgs(), PARAMS["w"], loss_of_w)


@pytest.mark.slow
def test_frozen_parameters_stay_out_of_a_line_search_whose_gradient_is_not_clipped():
    clipped = optax.chain(optax.clip_by_global_norm(0.1), lbfgs())
    state, _ = step_of(lbfgs(), freeze="b", clip_norm=0.1, ema=0.5)
    expected = {"b": PARAMS["b"], "w": whole_step(clipped, PARAMS["w"], loss_of_w)}
    assert_same(state.params, expected)
    average = {"w": (PARAMS["w"] + expected["w"]) / 2}  # What is frozen has none.
    assert_same(state.opt_state.average, average)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["", thorough("b")])
def test_each_group_searches_along_its_own_line(freeze):
    groups = MultiOptimizer(("w", lbfgs()), ("b", OptimizerDef(optax.polyak_sgd, scaling=0.5)))
    state, _ = step_of(groups, freeze=freeze or ())
    polyak, of_b = optax.polyak_sgd(scaling=0.5), PARAMS["b"]
    if not freeze:
        of_b = whole_step(polyak, of_b, lambda b: loss({**PARAMS, "b": b}, *ROWS), ["value"])
    assert_same(state.params, {"w": line_search_of_w(), "b": of_b})


@pytest.mark.slow
def test_a_partition_of_optax_says_how_its_gradient_is_masked():
    labels = {"w": "a", "b": "b"}
    parts = {"a": lbfgs(), "b": optax.sgd(0.1)}
    with pytest.raises(ValueError) as error:
        step_of(optax.partition(parts, labels))
    assert "mask_compatible_extra_args=True" in "".join(error.value.__notes__)
    state, _ = step_of(optax.partition(parts, labels, mask_compatible_extra_args=True))
    assert_same(state.params["w"], line_search_of_w())


def test_float16_passes_what_is_not_scaled():
    state, _ = step_of(probe(), precision="float16")
    seen = state.opt_state.inner
    value, grad = jax.jit(jax.value_and_grad(loss))(PARAMS, *ROWS)
    assert float(seen.value) == pytest.approx(float(value), rel=1e-2)
    assert float(seen.value_there) == float(seen.value)
    assert_same(seen.grad, grad, rtol=0.02, atol=0.01)
    assert_same(seen.grad_there, seen.grad, rtol=0, atol=0)


@pytest.mark.slow
def test_a_step_that_is_not_finite_leaves_the_memory_of_a_line_search_alone():
    task = ff.TrainTask(apply, lbfgs(), "mse", skip_nonfinite=True)
    before = state_of(task)
    broken = ff.Batch((X[:BATCH] * np.nan,), (Y[:BATCH],))
    after, sums = jax.jit(make_train_step(task))(before, broken)
    assert float(sums["skipped_steps"][0]) == 1
    assert int(after.step) == 1
    expected = (before.params, before.opt_state)
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), expected)


def test_several_outputs_pass_the_sum_of_their_losses():
    def two(variables, x, **_):
        y = predict(variables["params"], x)
        return {"one": y[:, 0], "two": y[:, 1]}, {}

    weights = {"one": W[:BATCH], "two": np.ones(BATCH, np.float32)}
    batch = ff.Batch((X[:BATCH],), ({"one": Y[:BATCH, 0], "two": Y[:BATCH, 1]},), weights)
    task = ff.TrainTask(two, probe(), {"one": "mse", "two": "mse"}, loss_weights={"two": 3.0})
    state, _ = jax.jit(make_train_step(task))(state_of(task), batch)
    errors = np.asarray(predict(PARAMS, X[:BATCH]) - Y[:BATCH]) ** 2
    w = W[:BATCH]
    expected = (errors[:, 0] * w).sum() / w.sum() + 3 * errors[:, 1].mean()
    assert float(state.opt_state.value) == pytest.approx(expected, rel=1e-5)
    assert_same(state.opt_state.grad_there, state.opt_state.grad)
