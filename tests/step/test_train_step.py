"""The pure step: weights, penalties and losses of every kind, against formulas in NumPy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import thorough

import flaxfit as ff
from flaxfit.step._metric_totals import compute

rng = np.random.default_rng(1)
X = rng.normal(size=(12, 3)).astype(np.float32)
Y = X.sum(1)
W = rng.uniform(0.1, 3, size=12).astype(np.float32)
PARAMS = np.array([0.5, -1.0, 2.0], np.float32)


def linear(variables, x, **_):
    return x @ variables["params"]


def make_state(task, params=PARAMS, model_state=None):
    return ff.TrainState(
        jnp.int32(0), params, task.optimizer.init(params), model_state or {}, jax.random.key(0)
    )


def make_task(loss="mse", apply=linear, **options):
    return ff.TrainTask(apply, optax.sgd(1.0), loss, **options)


def run(task, batch, n_devices=1, state=None):
    """One step, on one device or on the equal parts of a batch."""
    state = state or make_state(task)
    if n_devices == 1:
        state, sums = jax.jit(ff.make_train_step(task))(state, batch)
    else:
        strategy = ff.DataParallel(jax.devices()[:n_devices])
        step = ff.make_train_step(task, axis_name=strategy.axis_name)
        placed, parts = strategy.place(state), strategy.split(batch)
        state, sums = strategy.compile(step, (placed, parts))(placed, parts)
        state = strategy.collect(state)
    return state, compute(sums, task.metrics)


@pytest.mark.parametrize("n_devices", [1, thorough(2), 3, thorough(4)])
@pytest.mark.parametrize("weights", [thorough(None), W])
def test_the_gradient_is_that_of_the_weighted_mean_over_the_whole_batch(n_devices, weights):
    state, metrics = run(make_task(), ff.Batch((X,), (Y,), weights), n_devices)
    w = np.ones(12) if weights is None else weights.astype(np.float64)
    errors = X.astype(np.float64) @ PARAMS - Y
    gradient = (2 * w * errors) @ X / w.sum()
    np.testing.assert_allclose(PARAMS - state.params, gradient, rtol=2e-6)
    assert metrics["loss"] == pytest.approx((w * errors**2).sum() / w.sum(), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-6)


def test_a_loss_per_token_is_one_mean_over_all_elements():
    task = make_task(apply=lambda variables, x, **_: x * variables["params"])
    _, metrics = run(task, ff.Batch((X,), (2 * X,), W), 4)
    values = (X.astype(np.float64) * PARAMS - 2 * X) ** 2
    expected = (W[:, None] * values).sum() / (W.sum() * 3)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n_devices", [1, 4])
def test_a_scalar_loss_is_averaged_over_devices(n_devices):
    task = make_task(lambda outputs, targets: jnp.mean((outputs - targets) ** 2))
    state, metrics = run(task, ff.Batch((X,), (Y,)), n_devices)
    expected, same = run(make_task(), ff.Batch((X,), (Y,)))
    np.testing.assert_allclose(state.params, expected.params, rtol=1e-6)
    assert metrics["loss"] == pytest.approx(same["loss"], rel=1e-6)


@pytest.mark.parametrize("n_devices", [1, 4])
def test_a_penalty_is_added_unweighted_and_reported_by_its_own_name(n_devices):
    def loss(outputs, targets):
        return (outputs - targets) ** 2, 0.25 * jnp.mean(outputs**2)

    state, metrics = run(make_task(loss), ff.Batch((X,), (Y,), W), n_devices)
    plain, without = run(make_task(), ff.Batch((X,), (Y,), W))
    outputs = X @ PARAMS
    assert metrics["penalty"] == pytest.approx(0.25 * np.mean(outputs**2), rel=1e-5)
    assert metrics["loss"] == pytest.approx(without["loss"], rel=1e-6)
    extra = 0.25 * 2 * outputs @ X / 12
    np.testing.assert_allclose(plain.params - state.params, extra, rtol=1e-4)


def test_losses_that_a_module_sows_are_a_penalty_and_intermediates_are_dropped():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "activity", 0.5 * jnp.sum(x**2))
            self.sow("intermediates", "x", x)
            return nn.Dense(1, kernel_init=nn.initializers.ones)(x)[:, 0]

    module = Sowing()
    task = ff.TrainTask(module.apply, optax.sgd(0.1), "mse")
    state = ff.init_state(module.init, task.optimizer, 0, (X,))
    assert state.model_state == {}
    state, metrics = run(task, ff.Batch((X,), (Y,)), state=state)
    assert metrics["penalty"] == pytest.approx(0.5 * (X**2).sum(), rel=1e-5)
    assert state.model_state == {}


@pytest.mark.parametrize("n_devices", [1, 4])
def test_a_batch_whose_weights_are_all_zero_changes_nothing_but_the_step(n_devices):
    task = ff.TrainTask(linear, optax.adamw(0.1, weight_decay=0.5), "mse")
    before = make_state(task)
    # adamw raises where it is not given the parameters.
    state, metrics = run(task, ff.Batch((X,), (Y,), np.zeros(12, np.float32)), n_devices, before)
    np.testing.assert_array_equal(state.params, PARAMS)
    assert int(state.step) == 1 and int(state.opt_state[0].count) == 0
    assert metrics["loss"] == 0


def test_a_row_of_weight_zero_may_hold_a_nan_loss():
    def loss(outputs, targets):
        return jnp.where(targets > 1e6, jnp.nan, (outputs - targets) ** 2)

    targets, weights = Y.copy(), np.ones(12, np.float32)
    targets[5], weights[5] = 1e7, 0
    state, metrics = run(make_task(loss), ff.Batch((X,), (targets,), weights))
    rest = np.arange(12) != 5
    expected, same = run(make_task(), ff.Batch((X[rest],), (Y[rest],)))
    np.testing.assert_allclose(state.params, expected.params, rtol=1e-5)
    assert metrics["loss"] == pytest.approx(same["loss"], rel=1e-6)


def test_inputs_outputs_and_targets_may_be_named_several_or_none():
    def by_name(variables, *, image, scale, **_):
        return scale * (image @ variables["params"])

    def two_outputs(variables, x, **_):
        return (x @ variables["params"], x[:, 0]), {}

    def loss(first, second, a, b):
        return (first - a) ** 2 + (second - b) ** 2

    def loss_of(task, *batch):
        return run(task, ff.Batch(*batch))[1]["loss"]

    outputs, zeros = X @ PARAMS, np.zeros(12, np.float32)
    squares = (outputs - Y) ** 2
    named = loss_of(make_task(apply=by_name), {"image": X, "scale": 1 + zeros}, (Y,))
    assert named == pytest.approx(np.mean(squares), rel=1e-5)
    several = loss_of(make_task(loss, two_outputs), (X,), (Y, zeros))
    assert several == pytest.approx(np.mean(squares + X[:, 0] ** 2), rel=1e-5)
    unsupervised = loss_of(make_task(lambda outputs: outputs**2), (X,), ())
    assert unsupervised == pytest.approx(np.mean(outputs**2), rel=1e-5)


def test_each_stream_replica_and_step_has_a_key_of_its_own():
    def apply(variables, x, *, rngs, mutable):
        noise = [jax.random.uniform(rngs[name]) for name in ("dropout", "noise")]
        return x @ variables["params"], {"seen": {"noise": jnp.stack(noise)}}

    task = make_task(apply=apply, rngs=("dropout", "noise"))
    state = make_state(task, model_state={"seen": {"noise": jnp.zeros(2)}})
    seen = []
    for _ in range(2):
        state, _ = run(task, ff.Batch((X,), (Y,)), state=state)
        seen.extend(state.model_state["seen"]["noise"].tolist())
    assert len(set(seen)) == 4
    expected = jax.random.fold_in(ff.step_key(state.key, 1), 1)
    assert seen[3] == float(jax.random.uniform(expected))


@pytest.mark.parametrize("n_devices", [thorough(1), 4])
@pytest.mark.parametrize("anything", [np.nan, thorough(np.inf), 1e30])
def test_targets_of_weight_zero_leave_no_mark_on_the_gradient(n_devices, anything):
    """Not even where a device has no other rows, as the first of four here."""
    weights, idle = W.copy(), [0, 1, 2, 7]
    weights[idle] = 0
    targets = Y.copy()
    targets[idle] = anything
    task = make_task(lambda outputs, targets: jnp.square(outputs - targets))
    state, metrics = run(task, ff.Batch((X,), (targets,), weights), n_devices)
    expected, _ = run(task, ff.Batch((X,), (Y,), weights), n_devices)
    np.testing.assert_allclose(state.params, expected.params, rtol=1e-6)
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize(
    ("returned", "n_outputs"),
    [
        (lambda y: y, 1),
        (lambda y: (y, y), 2),
        (lambda y: (y, {"seen": y}), 1),
        (lambda y: ((y, y), {}), 2),
        (lambda y: {"y": y}, 1),
    ],
    ids=["one output", "two outputs", "with updates", "two with updates", "a mapping"],
)
def test_an_apply_may_return_outputs_alone_or_a_pair_of_them_and_a_mapping(returned, n_outputs):
    def loss(*arguments):
        assert len(arguments) == n_outputs + 1
        return (jax.tree.leaves(arguments)[0] - arguments[-1]) ** 2

    task = make_task(loss, lambda variables, x, **_: returned(x @ variables["params"]))
    _, metrics = run(task, ff.Batch((X,), (Y,)))
    assert metrics["loss"] == pytest.approx(np.mean((X @ PARAMS - Y) ** 2), rel=1e-5)


@pytest.mark.parametrize(
    "make", [ff.make_train_step, ff.make_eval_step, lambda task: ff.make_predict_step(task.apply)]
)
def test_a_batch_that_is_not_in_normal_form_is_refused(make):
    step, state = make(make_task()), make_state(make_task())
    with pytest.raises(TypeError, match=r"takes a Batch, Batch\(\(x,\), \(y,\)\), got tuple"):
        step(state, (X, Y))
    with pytest.raises(TypeError, match=r"holds tuples of arrays, got an array: write Batch\("):
        step(state, ff.Batch(X, Y))
