"""A training step of the user's own, in the same loop: two networks, whole batches, rewards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import assert_close, assert_equal, waves

import flaxfit as ff

RNG = np.random.default_rng(0)
REAL = (RNG.normal(size=(40, 2)) * 0.5 + np.array([2.0, -1.0])).astype("f4")


GENERATOR = nn.Dense(2, kernel_init=waves)
DISCRIMINATOR = nn.Sequential(
    [nn.Dense(8, kernel_init=waves), nn.tanh, nn.Dense(1, kernel_init=waves)]
)
OPTIMIZER = ff.optim.MultiOptimizer(
    ("generator/.*", optax.sgd(0.1)), ("discriminator/.*", optax.adam(0.02))
)


def init(rngs, real):
    keys = jax.random.split(rngs["params"])
    return {
        "params": {
            "generator": GENERATOR.init(keys[0], real)["params"],
            "discriminator": DISCRIMINATOR.init(keys[1], real)["params"],
        }
    }


def gan_step(state, batch):
    """Both networks learn from the same noise and the same images."""
    (real,) = batch.inputs
    noise = jax.random.normal(ff.step_key(state.key, state.step), real.shape)

    def losses(params):
        held = jax.lax.stop_gradient
        fake = GENERATOR.apply({"params": params["generator"]}, noise)

        def score(params, x):
            return jnp.asarray(DISCRIMINATOR.apply({"params": params}, x))

        d = params["discriminator"]
        d_loss = (nn.softplus(-score(d, real)) + nn.softplus(score(d, held(fake)))).mean()
        g_loss = nn.softplus(-score(held(d), fake)).mean()
        return d_loss + g_loss, {"d_loss": d_loss, "g_loss": g_loss}

    grads, sums = jax.grad(losses, has_aux=True)(state.params)
    return state.apply_gradient(OPTIMIZER, grads), sums


def make_gan(**options):
    data = ff.ArrayStream(REAL, batch_size=20)
    task = ff.TrainTask(step=gan_step, optimizer=OPTIMIZER, data=data)
    return ff.TrainLoop(init, task, 0, n_steps=4, stdout=False, **options)


def loop_of(step, data, init=init, **options):
    return ff.TrainLoop(init, ff.TrainTask(step=step, data=data), 0, stdout=False, **options)


def close(one, other):
    assert_close(one.params, other.params, rtol=2e-5, atol=1e-6)


class Sums:
    """Sums that are no numbers to whoever compares them."""

    def __init__(self, values):
        self.values = values

    def __eq__(self, other):
        raise TypeError("not to be compared")


jax.tree_util.register_pytree_node(Sums, lambda s: ((s.values,), None), lambda _, s: Sums(*s))


@pytest.mark.slow
def test_other_data_may_give_sums_of_the_same_names_and_other_shapes():
    def step(state, batch):
        (x,) = batch.inputs
        return state, {"columns": Sums(x.sum(0))}

    columns = ff.metrics.Metric(lambda *_: None, lambda sums: np.asarray(sums.values))
    task = ff.TrainTask(step=step, data=[REAL], metrics={"columns": columns})
    loop = ff.TrainLoop(
        lambda *_: {"params": np.zeros(2)}, task, 0, stdout=False, devices=jax.devices()[:1]
    )
    for data in (REAL, REAL, np.hstack([REAL, REAL])):
        loop.data = [data]
        found = loop.next_checkpoint().metrics["columns"]
        np.testing.assert_allclose(found, data.sum(0), rtol=1e-5)


@pytest.mark.slow
def test_two_networks_are_trained_as_by_hand():
    loop = make_gan()
    state = loop.state
    found = list(loop)
    by_hand = jax.jit(gan_step)
    for i, checkpoint in enumerate(found):
        start = 20 * (i % 2)
        state, sums = by_hand(state, ff.Batch((REAL[start : start + 20],)))
        assert checkpoint.metrics == pytest.approx(
            {name: float(value) for name, value in sums.items()}, rel=1e-5
        )
    close(found[-1].state, state)
    assert found[-1].step == int(found[-1].state.step) == 4
    with pytest.raises(
        KeyError, match="no metric 'loss'; it has d_loss, g_loss. A custom step reports"
    ):
        print(found[-1].loss)
    resumed = make_gan()
    resumed.restore(found[0])
    *_, last = resumed
    assert_equal(last.state.params, found[-1].state.params)


@pytest.mark.slow
def test_it_runs_on_one_device_and_several_steps_per_call_alike():
    one = list(make_gan(devices=jax.devices()[:1], steps_per_call=2, first_checkpoint=4))
    assert isinstance(make_gan(devices=jax.devices()[:1]).strategy, ff.DataParallel)
    assert isinstance(make_gan().strategy, ff.Sharded)
    every = list(make_gan())
    close(one[-1].state, every[-1].state)
    mean = np.mean([checkpoint.metrics["d_loss"] for checkpoint in every])
    assert one[-1].metrics["d_loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.slow
def test_a_remainder_is_not_padded():
    sizes = []

    def step(state, batch):
        sizes.append((batch.inputs[0].shape[0], batch.weights))
        return state, {"total": (batch.inputs[0].sum(), batch.inputs[0].size)}

    data = ff.ArrayStream(REAL[:22], batch_size=16, epochs=1)
    *_, last = loop_of(step, data, first_checkpoint=99)
    assert last.metrics["total"] == pytest.approx(REAL[:22].mean(), rel=1e-5)
    assert set(sizes) == {(16, None), (6, None)}


def test_a_step_may_report_nothing():
    def step(state, batch):
        return state.replace(params=state.params + 1), {}

    data = ff.ArrayStream(REAL[:32], batch_size=16)
    *_, last = loop_of(step, data, lambda *_: {"params": np.zeros(2)}, n_steps=9)
    assert last.metrics == {} and np.asarray(last.state.params).tolist() == [9, 9]


def test_a_metric_of_the_task_computes_with_the_sums_of_its_name():
    mae = ff.metrics.mae

    def step(state, batch):
        (x,) = batch.inputs
        return state, {"error": mae.measure(x, jnp.zeros_like(x)), "seen": (jnp.float32(len(x)),)}

    task = ff.TrainTask(step=step, data=[REAL, REAL], metrics={"error": mae})
    checkpoint = list(ff.TrainLoop(init, task, 0, first_checkpoint=9, stdout=False))[-1]
    assert checkpoint.metrics == pytest.approx({"error": np.abs(REAL).mean(), "seen": 80})


@pytest.mark.slow
def test_a_contrastive_loss_sees_the_whole_batch():
    def contrast(one, other):
        numbers = jnp.arange(len(one))
        return optax.softmax_cross_entropy_with_integer_labels(one @ other.T, numbers).mean()

    def step(state, batch):
        return state, {"loss": contrast(*batch.inputs)}

    views = REAL[:32], REAL[:32] + np.float32(0.1)
    loop = loop_of(step, [(views, ())], lambda *_: {"params": np.zeros(2)})
    assert isinstance(loop.strategy, ff.Sharded)
    assert loop.next_step().loss == pytest.approx(float(contrast(*views)), rel=1e-5)


@pytest.mark.slow
def test_a_step_takes_batches_that_were_made_from_its_own_state():
    def step(state, batch):
        (seen,), (target,) = batch.inputs, batch.targets
        return state.replace(params=state.params + target.mean()), {"seen": seen.mean()}

    task, batch = ff.TrainTask(step=step), np.ones(8, np.float32)
    loop = ff.TrainLoop(lambda *_: {"params": np.ones(2)}, task, 0, batch, stdout=False)
    for expected in (1, 2, 4):
        param = np.asarray(loop.state.params)[0]
        assert loop.next_step((param * batch, param * batch)).metrics == {"seen": expected}


@pytest.mark.slow
def test_a_model_is_fitted_by_a_step_of_its_own_and_measured_as_ever():
    module, optimizer = nn.Dense(1, kernel_init=nn.initializers.zeros), optax.adam(0.2)

    def step(state, batch):
        """Mixes examples up with one another."""
        mixed = jax.tree.map(lambda x: (x + x[::-1]) / 2, batch)
        (x,), (y,) = mixed.inputs, mixed.targets

        def loss(params):
            return ((module.apply({"params": params}, x) - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradient(optimizer, grads), {"loss": value}

    model = ff.Model(module, optimizer, "mse", step=step)
    y = REAL @ np.array([[1.0], [2.0]], "f4")
    history = model.fit(REAL, y, batch_size=20, epochs=15, verbose=0, validation_data=(REAL, y))
    assert history["val_loss"][-1] < 0.1 * history["val_loss"][0]
    assert model.predict(REAL).shape == y.shape


def test_a_step_that_sees_whole_batches_refuses_replicas():
    with pytest.raises(ValueError, match=r"needs whole batches, but .*: use strategy=Sharded\(\)"):
        loop_of(gan_step, REAL, strategy=ff.DataParallel())


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda state, batch: state, TypeError, r"returned TrainState; expected \(state, sums\)"),
        (lambda state, batch: (state, 1.0), TypeError, "returned TrainState and float; expected"),
        (
            lambda state, batch: (state, {"x": jnp.ones(3)}),
            TypeError,
            "for 'x'; expected a number",
        ),
        (
            lambda state, batch: (state.replace(params={"w": jnp.ones(3)}), {}),
            ValueError,
            r"(?s)does not match its input.*params/w: - became float32\[3\]",
        ),
    ],
    ids=["no sums", "no mapping", "an array", "another state"],
)
def test_what_is_no_step_is_named(step, error, message):
    with pytest.raises(error, match=message):
        loop_of(step, REAL).next_step()


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 1.0, "ema": 0.9},
        {"grads_hook": lambda grads, state, sums: grads},
        {"skip_above": 6.0},
    ],
    ids=", ".join,
)
def test_options_of_the_task_that_would_have_no_effect_are_refused(options):
    with pytest.raises(ValueError, match=f"{', '.join(options)} would have no effect"):
        ff.TrainTask(step=gan_step, **options)


def test_settings_that_would_have_no_effect_are_refused():
    with pytest.raises(TypeError, match="step must be"):
        ff.TrainTask(step="adam")
    with pytest.raises(ValueError, match="returns no gradients to keep"):
        loop_of(gan_step, REAL, keep_grads=True)
    with pytest.raises(ValueError, match="norms would have no effect"):
        loop_of(gan_step, REAL).norms = ("generator/.*",)
    task = ff.TrainTask(step=gan_step, data=REAL)
    assert dataclasses.replace(task, data=None).step is gan_step
