"""OptimizerDef trains as its factory does, whatever is overridden on the way."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from loops import assert_close

from flaxfit.optim import OptimizerDef, hyperparams

PARAMS = {"w": np.array([[0.5, -1.0], [2.0, 0.25]], np.float32), "b": np.array([0.1], np.float32)}
N_STEPS = 8
# Some steps are overridden: one with 0.0, which stops the parameters but not the moments.
RATES = [0.1, 0.1, 0.0, 0.02, 0.1, 0.3, 0.1, 0.1]
RNG = np.random.default_rng(0)
GRADS = [
    {name: RNG.normal(size=p.shape).astype(np.float32) for name, p in PARAMS.items()}
    for _ in range(N_STEPS)
]


RULES = {
    "sgd": (optax.sgd, {}),
    "momentum": (optax.sgd, {"momentum": 0.9}),
    "adam": (optax.adam, {"b1": 0.9, "b2": 0.99}),
    "adamw": (optax.adamw, {"b2": 0.99, "weight_decay": 0.01}),
}
SGD, MOMENTUM, ADAM, _ = (
    OptimizerDef(factory, learning_rate=0.1, **options) for factory, options in RULES.values()
)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_the_trajectory_with_overrides_per_step_is_that_of_a_schedule(name):
    factory, options = RULES[name]
    scheduled = factory(lambda step: jnp.asarray(RATES)[step], **options)
    params, state = PARAMS, scheduled.init(PARAMS)
    by_schedule = jax.jit(scheduled.update)
    optimizer = OptimizerDef(factory, learning_rate=0.1, **options).create(PARAMS)
    plain = jax.jit(lambda o, g: o.apply_gradient(g))
    overridden = jax.jit(lambda o, g, rate: o.apply_gradient(g, learning_rate=rate))
    for rate, grads in zip(RATES, GRADS, strict=True):
        updates, state = by_schedule(grads, state, params)
        params = optax.apply_updates(params, updates)
        optimizer = plain(optimizer, grads) if rate == 0.1 else overridden(optimizer, grads, rate)
        assert_close(optimizer.target, params, rtol=1e-6, atol=1e-6)
    # What is overridden for a step leaves no trace.
    assert float(hyperparams(optimizer.state)["learning_rate"]) == np.float32(0.1)


def test_an_override_of_a_step_beats_a_schedule_which_counts_on():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    definition = OptimizerDef(optax.sgd, learning_rate=schedule)
    params, state = jnp.zeros(()), definition.init(jnp.zeros(()))
    seen = []
    for override in ({}, {"learning_rate": 7.0}, {"learning_rate": None}, {}):
        updates, state = definition.update(jnp.ones(()), state, params, **override)
        seen.append((-float(updates), float(hyperparams(state)["learning_rate"])))
    assert seen == [(1.0, 1.0), (7.0, 0.75), (0.5, 0.5), (0.25, 0.25)]


def test_a_set_replaces_all_hyperparameters_for_a_step():
    definition = MOMENTUM
    whole = definition.update_hyper_params(momentum=0.0, learning_rate=2.0)
    assert whole == {"learning_rate": 2.0, "momentum": 0.0}
    optimizer = definition.create(jnp.zeros(())).apply_gradient(jnp.ones(()))
    moved = optimizer.apply_gradient(jnp.ones(()), hyper_params=whole, learning_rate=1.0)
    assert float(moved.target - optimizer.target) == -1.0
    assert definition.hyper_params == {"learning_rate": 0.1, "momentum": 0.9}
    # What a set leaves out is as it was given.
    start = definition.create(jnp.zeros(()))
    moved = start.apply_gradient(jnp.ones(()), hyper_params={"momentum": 0.5})
    assert float(moved.target) == -np.float32(0.1)


def test_other_arguments_are_passed_on_and_are_no_hyperparameters():
    definition = OptimizerDef(optax.adam, learning_rate=1, mu_dtype=jnp.bfloat16, nesterov=True)
    state = definition.init(jnp.ones(3))
    assert list(hyperparams(state)) == ["learning_rate"]
    assert optax.tree.get(state, "mu").dtype == jnp.bfloat16


@pytest.mark.slow
def test_static_arguments_stay_plain_numbers():
    params: Any = {"w": jnp.ones((4, 8))}
    given = {"learning_rate": 0.1, "min_dim_size_to_factor": 4}
    definition = OptimizerDef(optax.adafactor, static="min_dim_size_to_factor", **given)
    ours = definition.create(params)
    plain = optax.adafactor(**given)
    state = plain.init(params)
    step = jax.jit(lambda o, g: o.apply_gradient(g))
    for _ in range(3):
        grads = jax.tree.map(lambda p: 0.1 * p + 1.0, params)
        ours = step(ours, grads)
        updates, state = plain.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(ours.target["w"], params["w"], rtol=1e-6)
    factor: Any = optax.tree.get(ours.state, "v_row")
    assert factor["w"].shape == (4,)
    unknown = OptimizerDef(optax.adafactor, **given)
    with pytest.raises(TypeError, match="static="):
        jax.jit(unknown.update)(params, unknown.init(params), params)


@pytest.mark.slow
def test_states_keep_their_dtypes_beside_precise_hyperparameters():
    params = {"half": jnp.ones(2, jnp.bfloat16), "full": jnp.ones(2)}
    optimizer = OptimizerDef(optax.adam, learning_rate=1e-3, b1=0.9).create(params)
    after = optimizer.apply_gradient(params)
    dtypes = jax.tree.map(lambda x: x.dtype, (after.state, after.target))
    assert dtypes == jax.tree.map(lambda x: x.dtype, (optimizer.state, params))
    assert hyperparams(after.state)["learning_rate"].dtype == jnp.float32


def test_it_is_a_transformation_of_optax_like_any_other():
    definition = ADAM
    assert isinstance(definition, optax.GradientTransformationExtraArgs)
    chained = optax.chain(optax.scale(2.0), definition)
    state = chained.init(PARAMS)
    updates, _ = chained.update(PARAMS, state, PARAMS, learning_rate=0.0)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    marked = optax.tree.map_params(chained, lambda leaf: "of a parameter", state)
    assert jax.tree.leaves(marked).count("of a parameter") == 4


def test_what_optax_takes_beside_hyperparameters_is_passed_on():
    definition = OptimizerDef(optax.polyak_sgd, max_learning_rate=1.0)
    updates, _ = definition.update(
        jnp.ones(()), definition.init(jnp.ones(())), jnp.ones(()), value=jnp.float32(0.25)
    )
    assert float(updates) == -0.25


@struct.dataclass
class SignHyperParams:
    learning_rate: float
    flip: bool = False


class Sign(OptimizerDef):
    """Steps by the sign of the running sum of the gradients, written parameter by parameter."""

    def __init__(self, learning_rate, flip=False):
        super().__init__(SignHyperParams(learning_rate, flip))

    def init_param_state(self, param):
        return {"sum": jnp.zeros_like(param)}

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        total = state["sum"] + grad
        direction = -1 if hyper_params.flip else 1
        rate = hyper_params.learning_rate / (step + 1)
        return param - direction * rate * jnp.sign(total), {"sum": total}


class NamedSign(Sign):
    """The same with its hyperparameters by name."""

    def __init__(self, learning_rate, flip=False):
        OptimizerDef.__init__(self, learning_rate=learning_rate, flip=flip)


@pytest.mark.parametrize("kind", [Sign, NamedSign])
def test_an_optimizer_of_ones_own_is_written_for_one_parameter(kind):
    optimizer = kind(0.5, flip=True).create(PARAMS)
    step = jax.jit(lambda o, g, rate: o.apply_gradient(g, learning_rate=rate))
    optimizer = step(step(optimizer, GRADS[0], 0.5), GRADS[1], 0.25)
    for name, p in PARAMS.items():
        expected = p + 0.5 * np.sign(GRADS[0][name])
        expected += 0.25 / 2 * np.sign(GRADS[0][name] + GRADS[1][name])
        np.testing.assert_allclose(optimizer.target[name], expected, rtol=1e-6)
    assert float(hyperparams(optimizer.state)["learning_rate"]) == 0.5


def test_the_dataclass_of_ones_own_optimizer_is_replaced_as_one():
    definition = Sign(0.5)
    assert definition.hyper_params == SignHyperParams(0.5)
    changed = definition.update_hyper_params(learning_rate=2.0)
    assert dataclasses.asdict(changed) == {"learning_rate": 2.0, "flip": False}
    moved = definition.create(jnp.zeros(())).apply_gradient(jnp.ones(()), hyper_params=changed)
    assert float(moved.target) == -2.0
    with pytest.raises(ValueError, match="pass|Pass"):
        definition.update(jnp.ones(()), definition.init(jnp.ones(())))


UNKNOWN = ValueError, r"called rate.*learning_rate"
UNUSABLE: list[Any] = [
    (lambda: OptimizerDef(), TypeError, "needs a function that makes"),
    (lambda: OptimizerDef(optax.adam(0.1)), TypeError, "needs a function that makes"),
    (lambda: OptimizerDef(optax.adam), TypeError, "missing.*learning_rate.*It takes"),
    (lambda: OptimizerDef(optax.adam, learning_rate=1, beta=2), TypeError, "beta.*It takes.*b1"),
    (
        lambda: OptimizerDef(optax.sgd, learning_rate=1, static="b1"),
        ValueError,
        r"static.*\['b1'\]",
    ),
    (
        lambda: OptimizerDef(optax.adamw, learning_rate=1, mask=lambda p: {"w": True}),
        ValueError,
        "mask is a function, but not a schedule.*static",
    ),
    (lambda: SGD.update_hyper_params(rate=1), *UNKNOWN),
    (lambda: SGD.create(PARAMS).apply_gradient(PARAMS, rate=1), *UNKNOWN),
    (lambda: SGD.create(PARAMS).apply_gradient(PARAMS, hyper_params={"rate": 1}), *UNKNOWN),
    (
        lambda: SGD.create(PARAMS).apply_gradient(PARAMS, learning_rate="x"),
        TypeError,
        "must be a number",
    ),
    (
        lambda: OptimizerDef(optax.adam, 1e-3),
        TypeError,
        r"by name, got \(0.001,\): write OptimizerDef",
    ),
]


class OwnRate(OptimizerDef):
    def __init__(self, learning_rate):
        super().__init__(learning_rate=learning_rate)

    def init_param_state(self, param):
        return ()

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        return param - hyper_params.learning_rate * grad, state


@pytest.mark.parametrize(("use", "error", "message"), UNUSABLE)
def test_what_cannot_be_is_a_worded_error(use, error, message):
    with pytest.raises(error, match=message):
        use()


def test_what_a_factory_needs_as_a_plain_number_is_named_before_the_first_step():
    optimizer = OptimizerDef(optax.adafactor, learning_rate=0.1, min_dim_size_to_factor=2)
    with pytest.raises(TypeError, match=r"needs the plain value(.|\n)*static="):
        jax.jit(optimizer.init)({"w": jnp.ones((4, 4))})


def test_a_random_key_is_no_hyperparameter():
    optimizer = OptimizerDef(optax.noisy_sgd, learning_rate=0.1, key=jax.random.key(0))
    assert list(optimizer.hyper_params) == ["learning_rate"]
    optimizer.init(jnp.ones(2))


@pytest.mark.parametrize("factory", [optax.sgd, OwnRate], ids=["optax", "own"])
def test_a_rate_of_none_is_given_at_each_step(factory):
    is_own = isinstance(factory, type)
    rate = {"learning_rate": None}
    definition = factory(**rate) if is_own else OptimizerDef(factory, **rate)
    optimizer = definition.create(jnp.ones(2))
    step = jax.jit(
        lambda optimizer, rate: optimizer.apply_gradient(jnp.ones(2), learning_rate=rate)
    )
    moved = step(step(optimizer, 0.5), 0.25)
    np.testing.assert_allclose(moved.target, 0.25)
    assert definition.hyper_params == rate
    for given in {}, {"learning_rate": None}, {"hyper_params": rate}:
        with pytest.raises(ValueError, match="was given no rate: call apply_gradient"):
            optimizer.apply_gradient(jnp.ones(2), **given)


def test_adafactor_without_a_rate_computes_its_own():
    optimizer = OptimizerDef(optax.adafactor, learning_rate=None).create(jnp.ones(2))
    found = optimizer.apply_gradient(jnp.ones(2)).target
    own = optax.adafactor()
    updates, _ = own.update(jnp.ones(2), own.init(jnp.ones(2)), jnp.ones(2))
    np.testing.assert_array_equal(found, optax.apply_updates(jnp.ones(2), updates))
