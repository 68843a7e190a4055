"""Gradients in microbatches, of scaled losses, of some parameters only; steps that are skipped."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops import assert_close, assert_equal, init_of
from marks import diagonal, thorough

import flaxfit as ff
from flaxfit.step._gradient import ForwardArguments, count_parts

rng = np.random.default_rng(2)
X = rng.normal(size=(48, 5)).astype(np.float32)
Y = np.tanh(X @ rng.normal(size=(5, 3))).astype(np.float32)


def waves(key, shape, dtype):
    return 0.5 * np.cos(np.arange(np.prod(shape)), dtype=dtype).reshape(shape)


class MLP(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(7, kernel_init=waves, name="stem")(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dense(3, kernel_init=waves, name="head")(nn.relu(x))


def train(n_steps=4, n_devices=1, batch_size=12, norm=False, apply=None, of_loop=None, **options):
    """The loop after some steps, and its checkpoints."""
    module, data = MLP(norm), ff.ArrayStream(X, Y, batch_size=batch_size)
    usual = {"optimizer": optax.adam(0.05), "loss": "mse", "data": data, "metrics": ["mae"]}
    task = ff.TrainTask(apply or module.apply, **{**usual, **options})
    given = {"n_steps": n_steps, "devices": jax.devices()[:n_devices], "grad_norm": True}
    loop = ff.TrainLoop(init_of(module, 5), task, 0, **given, **(of_loop or {}))
    return loop, list(loop)


def test_parts_are_as_many_as_divide():
    task = ff.TrainTask(MLP().apply, optax.sgd(0.1), "mse", accumulate=4)
    sizes, one = (1, 2, 3, 4, 5, 6, 8, 9), ForwardArguments(task, *[None] * 4)
    several = [one._replace(batch=ff.Batch((X[:n],))) for n in sizes]
    assert [count_parts(arguments) for arguments in several] == [1, 2, 3, 4, 1, 3, 4, 3]


def test_microbatches_that_cannot_be_padded_must_divide():
    with pytest.raises(ValueError, match=r"10 examples over 2 devices in 2 parts each.*8 or 12"):
        train(pad=False, n_devices=2, batch_size=10, accumulate=2)


@pytest.mark.slow
def test_a_batch_norm_sees_one_microbatch_after_the_other():
    loop, _ = train(1, norm=True, accumulate=3)
    module = MLP(norm=True)
    start, _ = train(0, norm=True)
    state = start.state.model_state
    apply = jax.jit(functools.partial(module.apply, mutable=["batch_stats"]))
    for part in X[:12].reshape(3, 4, 5):
        _, state = apply({"params": start.state.params, **state}, part)
    assert_close(loop.state.model_state, state, rtol=1e-6)


@pytest.mark.slow
def test_microbatches_differ_in_their_dropout():
    class Noise(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, ())
            return nn.Dropout(0.5, deterministic=False)(x * w)

    ones = np.ones((8, 16), np.float32)
    data = [(np.ones((16, 16), np.float32), np.zeros((16, 16), np.float32))]
    task = ff.TrainTask(Noise().apply, optax.sgd(0.1), "mse", data, accumulate=2)
    loop = ff.TrainLoop(Noise().init, task, 0, devices=jax.devices()[:1])
    key = ff.step_key(loop.state.key, 0)

    @jax.jit
    def part(i):
        key_of_part = jax.random.fold_in(jax.random.fold_in(key, i), 0)
        return Noise().apply({"params": {"w": 1.0}}, ones, rngs={"dropout": key_of_part})

    parts = [part(i) for i in range(2)]
    assert np.any(parts[0] != parts[1])
    expected = np.mean(np.square(parts))
    assert next(loop).loss == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("n_devices", [thorough(1), 2])
def test_frozen_parameters_are_not_touched_and_have_no_moments(n_devices):
    options = {"optimizer": optax.adamw(0.05, weight_decay=0.5), "freeze": "stem/.*"}
    loop, checkpoints = train(4, n_devices, **options)
    before, after = train(0)[0].state.params, loop.state.params
    assert_close(after["stem"], before["stem"], rtol=0)
    assert np.any(after["head"]["kernel"] != before["head"]["kernel"])
    n_moments = sum(x.size for x in jax.tree.leaves(loop.state.opt_state) if x.ndim)
    assert n_moments == 2 * sum(x.size for x in jax.tree.leaves(after["head"]))
    assert checkpoints[-1].loss < checkpoints[0].loss


@pytest.mark.slow
def test_no_gradient_is_computed_for_a_frozen_stem():
    def flops(**options):
        module = MLP()
        task = ff.TrainTask(module.apply, optax.sgd(0.1), "mse", **options)
        state = ff.init_state(module.init, task.optimizer, 0, (X,))
        step = jax.jit(ff.make_train_step(task)).lower(state, ff.Batch((X,), (Y,))).compile()
        cost = step.cost_analysis()
        assert cost is not None
        return cost["flops"]

    # Of forward and backward through two layers, the backward pass through the stem falls away.
    assert flops(freeze="stem/.*") < 0.75 * flops()


@pytest.mark.slow
def test_a_gradient_of_what_is_trained_only_is_clipped():
    loop, checkpoints = train(1, optimizer=optax.sgd(1.0), freeze=["stem/.*"], clip_norm=0.01)
    moved = jax.tree.map(np.subtract, train(0)[0].state.params, loop.state.params)
    assert optax.tree.norm(moved) == pytest.approx(0.01, rel=1e-4)
    assert checkpoints[-1].metrics["grad_norm"] > 0.01


@pytest.mark.parametrize(
    ("freeze", "message"),
    [("stm/.*", r"(?s)'stm/.\*' matches no parameter.*stem/kernel"), (".*", "nothing to train")],
)
def test_freezing_nothing_or_everything_is_an_error(freeze, message):
    with pytest.raises(ValueError, match=message):
        train(freeze=freeze)


@pytest.mark.parametrize(
    ("option", "value"),
    [("accumulate", 0), ("precision", "int8"), ("clip_norm", 0), ("ema", 1.0), ("across", "x")],
)
def test_wrong_options_are_refused_with_their_value(option, value):
    with pytest.raises(ValueError, match=repr(value)):
        train(**{option: value})


def poisoned():
    """Batches of which the second holds an infinite target."""
    y = Y.copy()
    y[12, 0] = np.inf
    return [(X[i : i + 12], y[i : i + 12]) for i in range(0, 48, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 2])
@pytest.mark.parametrize("norm", [thorough(False), True])
def test_a_step_that_is_not_finite_leaves_the_whole_state(n_devices, norm):
    options = {"norm": norm, "optimizer": optax.sgd(0.1)}
    loop, checkpoints = train(None, n_devices, data=poisoned(), skip_nonfinite=True, **options)
    assert [c.metrics["skipped_steps"] for c in checkpoints] == [0, 1, 0, 0]
    before, after = checkpoints[0].state, checkpoints[1].state
    assert_equal(after, before.replace(step=after.step))
    assert int(after.step) == 2
    assert np.isnan(checkpoints[1].loss)
    without = [batch for i, batch in enumerate(poisoned()) if i != 1]
    other, expected = train(None, n_devices, data=without, **options)
    assert_close(loop.state.params, other.state.params, rtol=1e-6)
    assert checkpoints[-1].loss == pytest.approx(expected[-1].loss, rel=1e-6)


def test_without_the_guard_the_same_data_destroys_the_state():
    loop, _ = train(None, data=poisoned(), optimizer=optax.sgd(0.1))
    assert not np.all(np.isfinite(loop.state.params["head"]["kernel"]))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "accumulate"), diagonal(["bfloat16", "float16"], [1, 2]))
def test_sixteen_bits_train_about_as_thirty_two_do(precision, accumulate):
    def small_loss(outputs, targets):
        # So small that the first scale of float16 does not overflow: then no step is skipped.
        return jnp.mean((outputs - targets) ** 2, -1) / 1024

    seen = []

    def apply(variables, x, **options):
        seen.append((variables["params"]["head"]["kernel"].dtype, x.dtype))
        return MLP().apply(variables, x, **options)

    options = {"precision": precision, "accumulate": accumulate, "apply": apply}
    loop, checkpoints = train(20, 2, loss=small_loss, **options)
    losses = [checkpoint.loss for checkpoint in checkpoints]
    _, expected = train(20, loss=small_loss)
    assert {str(dtype) for pair in seen for dtype in pair} == {precision}
    assert {str(x.dtype) for x in jax.tree.leaves(loop.state.params)} == {"float32"}
    assert np.mean(losses) == pytest.approx(np.mean([c.loss for c in expected]), rel=0.03)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 2])
@pytest.mark.parametrize("accumulate", [thorough(1), 3])
def test_the_scale_of_a_loss_that_overflows_is_halved_and_the_step_skipped(n_devices, accumulate):
    options = {"data": [(X[:12], 60000 * Y[:12])] * 20, "precision": "float16"}
    options |= {"loss": lambda o, t: jnp.abs(o.sum(-1) - t.sum(-1)) * 10}
    loop, checkpoints = train(None, n_devices, accumulate=accumulate, **options)
    skipped = [c.metrics["skipped_steps"] for c in checkpoints]
    scales = [float(c.state.opt_state.scale.scale) for c in checkpoints]
    assert skipped[0] == 1
    assert scales[0] == 65536 / 2
    assert skipped[-1] == 0
    assert scales[-1] == 65536 / 2 ** sum(skipped)
    assert_close(checkpoints[0].state.params, train(0)[0].state.params, rtol=0)
    assert np.all(np.isfinite(loop.state.params["head"]["kernel"]))


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 2])
def test_the_average_follows_its_formula(n_devices):
    loop, checkpoints = train(n_devices=n_devices, ema=0.75, freeze="stem/bias")
    average = jax.device_get(train(0)[0].state.params)
    for checkpoint in checkpoints:
        params = jax.device_get(checkpoint.state.params)
        average = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, average, params)
    swapped = ff.optim.swap_ema(loop.state)
    assert_close(swapped.params, average, rtol=1e-6)
    again = ff.optim.swap_ema(swapped)
    assert_close(again.params, loop.state.params, rtol=0)
    assert jax.tree.structure(again) == jax.tree.structure(loop.state)


@pytest.mark.slow
def test_several_steps_in_a_call_give_what_single_ones_give():
    options = {"accumulate": 2, "ema": 0.9, "freeze": "stem/.*", "clip_norm": 1.0}
    options |= {"precision": "bfloat16", "skip_nonfinite": True}
    loop, _ = train(6, **options)
    at_once = {"n_steps_per_checkpoint": 6, "first_checkpoint": 6, "steps_per_call": 3}
    _, (checkpoint,) = train(6, of_loop=at_once, **options)
    assert_close(checkpoint.state.params, loop.state.params, rtol=1e-6)
    assert checkpoint.metrics["skipped_steps"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("across", [None, "batch"])
def test_parts_of_a_batch_need_less_memory_than_the_whole(across):
    def bytes_of(accumulate):
        module = nn.Sequential((nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(1)))
        x = np.ones((1024, 8), np.float32)
        options = {"across": across, "accumulate": accumulate}
        task = ff.TrainTask(module.apply, optax.sgd(0.1), "mse", [(x, x[:, :1])], **options)
        options = {"devices": jax.devices()[:1], "stdout": False}
        return ff.TrainLoop(init_of(module, 8), task, 0, **options).step_memory()

    assert bytes_of(8) < 0.5 * bytes_of(1)


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [1, 2])
def test_a_custom_derivative_may_close_over_arrays_of_the_call(n_devices):
    """JAX runs it when it differentiates: by then a jaxpr of the model alone has lost them."""

    def apply(variables, x, **_):
        is_used = x[:, :1] > 0

        @jax.custom_vjp
        def gated(y):
            return y

        gated.defvjp(lambda y: (y, None), lambda _, gradient: (gradient * is_used,))
        return gated(x @ variables["params"]), {}

    x = np.arange(-8.0, 8.0, dtype=np.float32).reshape(8, 2)
    y = np.zeros((8, 1), np.float32)
    state = ff.TrainState.create(optax.sgd(0.1), {"params": jnp.ones((2, 1))})
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", [(x, y)])
    loop = ff.TrainLoop(state, task, 0, devices=jax.devices()[:n_devices], stdout=False)
    *_, last = loop
    gradient = (x * 2 * x.sum(1, keepdims=True) * (x[:, :1] > 0)).mean(0)
    np.testing.assert_allclose(last.state.params[:, 0], 1 - 0.1 * gradient, rtol=1e-6)
