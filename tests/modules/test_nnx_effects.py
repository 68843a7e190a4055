"""What a call leaves in its module, beside loops of `nnx.jit` that keep all of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from strategies import strategies

import flaxfit as ff
from flaxfit.modules import from_nnx, nnx_step

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
BATCHES = [(X[:8], Y[:8]), (X[8:], Y[8:])]


class Count(nnx.Variable):
    """A state of its own type."""


class Momentum(nnx.Module):
    """A momentum encoder: each call moves the parameters of the target."""

    def __init__(self, rngs):
        self.online = nnx.Linear(4, 1, use_bias=False, rngs=rngs)
        self.target = nnx.Linear(4, 1, use_bias=False, rngs=rngs)

    def __call__(self, x):
        online = jax.lax.stop_gradient(self.online.kernel[...])
        self.target.kernel[...] = 0.5 * (self.target.kernel[...] + online)
        return self.online(x) + 0.3 * self.target(x)


class Held:
    """An object of no library."""

    calls = 0


class Called(nnx.Module):
    """A layer whose call has an effect."""

    def __init__(self, rngs, effect=lambda module, x: x):
        self.layer = nnx.Linear(4, 1, rngs=rngs)
        self.count = Count(jnp.zeros(()))
        self.effect = effect
        self.held = Held()
        self.training = False

    def __call__(self, x):
        return self.layer(self.effect(self, x))


class Remat(nnx.Module):
    """Transformations that return parameters as new arrays."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers, self.layer = make(rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def over_layers(layer, x):
            return layer(x)

        return nnx.remat(lambda layer, x: layer(x))(self.layer, over_layers(self.layers, x))


@functools.cache
def by_hand():
    """The losses of two steps of `nnx.jit`, and the module after them."""
    module = Momentum(nnx.Rngs(0))
    trained = nnx.All(nnx.Param, nnx.PathContains("online"))
    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=trained)

    @nnx.jit
    def step(module, optimizer, x, y):
        def loss_fn(module):
            return jnp.mean((module(x) - y) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, trained))(module)
        optimizer.update(module, grads)
        return loss

    return [float(step(module, optimizer, x, y)) for x, y in BATCHES], module


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *({"strategy": name} for name in strategies(4)),
        {"accumulate": 2},
        {"accumulate": 2, "across": "batch", "strategy": "one device"},
        {"run_eagerly": True, "accumulate": 2, "strategy": "one device"},
        {"loss": None, "objective": lambda f, b, r: (f(*b.inputs) - b.targets[0])[:, 0] ** 2},
    ],
    ids=lambda options: " ".join(k if callable(v) else f"{k}={v}" for k, v in options.items()),
)
def test_writes_to_frozen_parameters_are_kept_as_by_hand(options):
    made = {"strategy": strategies(4)[options["strategy"]]()} if "strategy" in options else {}
    losses, expected = by_hand()
    module = Momentum(nnx.Rngs(0))
    given = {"loss": "mse", "freeze": "target/.*", **options, **made}
    history = ff.Model(module, optax.sgd(0.1), **given).fit(BATCHES, verbose=0)
    np.testing.assert_allclose(history["loss"], [sum(losses) / 2], rtol=1e-6)
    for own, other in zip(
        *(jax.tree.leaves(nnx.state(m)) for m in (module, expected)), strict=True
    ):
        np.testing.assert_allclose(own, other, rtol=1e-6)


def fit(module, **options):
    return ff.Model(module, optax.sgd(0.1), "mse", **options).fit(BATCHES, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("is_eager", [False, True])
def test_writes_to_other_parameters_are_refused(is_eager):
    with pytest.raises(
        ValueError, match=r"writes target/kernel, but such parameters are trained.*nnx_step"
    ):
        fit(Momentum(nnx.Rngs(0)), run_eagerly=is_eager)
    with pytest.raises(ValueError, match="are rounded to 16 bits by precision='bfloat16'"):
        fit(Momentum(nnx.Rngs(0)), freeze="target/.*", precision="bfloat16", run_eagerly=is_eager)
    (loss,) = fit(Remat(nnx.Rngs(0)), run_eagerly=is_eager)["loss"]
    assert np.isfinite(loss)


def test_normalized_weights_are_trained_as_in_linen():
    module = Called(nnx.Rngs(0))
    module.layer = nnx.WeightNorm(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    init, apply = from_nnx(module, train=True)
    _, updates = apply(init(None), X, mutable=True)
    assert "written_params" not in updates


def set_made(module, x):
    if not hasattr(module, "made"):
        module.made = True
        module.count[...] += 1
    return x + module.count[...]


def set_in_training(module, x):
    if module.training:
        module.made = True
        return x
    return x * getattr(module, "made", False)


def count_in_held(module, x):
    module.held.calls += 1
    return x * module.held.calls


def replace_count(module, x):
    module.count = nnx.BatchStat(module.count[...] + 1)
    return x


def create_state(module, x):
    if not hasattr(module, "created"):
        module.created = Count(jnp.zeros(()))
    module.created[...] += 1
    return x + module.created[...]


def create_layer(module, x):
    if not hasattr(module, "lazy"):
        module.lazy = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    return module.lazy(x)


def create_unread(module, x):
    module.unread = Count(x.mean())
    return x


def append(module, x):
    module.count.set_value(jnp.append(module.count[...], 1.0))
    return x


def leave_scratch(module, x):
    module.calls = getattr(module, "calls", 0) + 1
    module.held.calls += 1
    module.scratch = x + 1
    module.last = nnx.Cache(x.mean())
    return module.scratch - 1


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize(
    ("effect", "message"),
    [
        (set_made, r"creates self.made \(True\), which its next call would see"),
        (set_in_training, r"creates self.made \(True\)"),
        (count_in_held, r"creates self.held.calls \(1\)"),
        (replace_count, r"sets self.count \(BatchStat\)"),
        (create_state, r"creates self.created \(Count\)"),
        (create_layer, "creates the parameters self.lazy.*call the module once"),
        (create_unread, "adds or removes unread, by `sow` or by an assignment"),
        (append, r"changes the state Count/count from float32\[\] to float32\[2\]"),
    ],
)
def test_what_a_second_call_would_see_is_refused(effect, message, is_eager):
    with pytest.raises(ValueError, match=message):
        fit(Called(nnx.Rngs(0), effect), run_eagerly=is_eager)


def test_it_is_refused_in_evaluation_and_in_steps_of_nnx_too():
    module = Called(nnx.Rngs(0), set_made)
    init, apply = from_nnx(module, train=False)
    with pytest.raises(ValueError, match="self.made"):
        apply(init(None), X)

    def step(model, batch):
        return {"mean": model(batch.inputs[0]).mean()}

    own = nnx_step(step, model=module)
    with pytest.raises(ValueError, match="self.made"):
        next(ff.TrainLoop(own.init, ff.TrainTask(step=own, data=BATCHES), 0, stdout=False))


def leave_scratch_in_training_only(module, x):
    if not module.training:
        raise RuntimeError("for training only")
    return leave_scratch(module, x)


def test_what_no_call_reads_does_no_harm_even_where_the_module_cannot_evaluate():
    expected = fit(Called(nnx.Rngs(0)))["loss"]
    for effect in leave_scratch, leave_scratch_in_training_only:
        assert fit(Called(nnx.Rngs(0), effect))["loss"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "value",
    [True, 2.0, np.float32(3), jnp.array(True), jnp.array(2), jnp.ones((), jnp.bfloat16)],
    ids=str,
)
def test_a_state_and_a_frozen_parameter_may_be_set_to_a_constant(value):
    def set_value(module, x):
        module.count.set_value(value)
        module.frozen.set_value(value)
        return x

    module = Called(nnx.Rngs(0), set_value)
    module.frozen = nnx.Param(jnp.zeros(()))
    model = ff.Model(module, optax.sgd(0.1), "mse", freeze="frozen")
    model.fit(BATCHES, verbose=0)
    for found in model.state.model_state["Count"]["count"], model.state.params["frozen"]:
        assert found == np.float32(value) and found.dtype == np.float32


def test_shapes_in_place_of_arrays_are_refused_by_name():
    module = nnx.eval_shape(lambda: Called(nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"nnx.eval_shape.*lambda rngs: Module\(rngs\)"):
        fit(module)
