"""Generations: parameters that are unfrozen later are updated as by an optimizer of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import thorough

from flaxfit.optim import MultiOptimizer, OptimizerDef
from flaxfit.optim._extended import (
    ExtendedOptimizer,
    continued_state,
    extend,
    generations_of,
    with_generations,
)
from flaxfit.optim._generations import counts, fitting, from_json, to_json

PARAMS = {"head": jnp.ones(3), "neck": jnp.ones((2, 2)), "stem": jnp.ones((2, 3))}
rng = np.random.default_rng(0)
GRADS = [
    jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), PARAMS)
    for _ in range(12)
]
ADAM = OptimizerDef(optax.adam, learning_rate=0.1)


def unfrozen(optimizer, state, params, freeze, **options):
    """The optimizer and its state after a change of what is frozen."""
    new = extend(optimizer, freeze=freeze, generations=generations_of(optimizer), **options)
    state, _, generations = continued_state(state, new, params, {}, is_same=True)
    return with_generations(new, generations), state


def trained(user, stages, **options):
    """Trains as a loop does; returns the parameters after each step."""
    optimizer, params, found = extend(user, freeze=stages[0], **options), PARAMS, []
    state = optimizer.init(params)
    for step, grads in enumerate(GRADS):
        if step in stages and step:
            optimizer, state = unfrozen(optimizer, state, params, stages[step], **options)
        updates, state = jax.jit(optimizer.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        found.append(params)
    return found


def trained_apart(user, begin, before=lambda grads, names: grads):
    """Trains each parameter with an optimizer of its own from the step on where it begins."""
    params, states, found = dict(PARAMS), {}, []
    for step, grads in enumerate(GRADS):
        names = [name for name in params if begin[name] <= step]
        grads = before({name: grads[name] for name in names}, names)
        for name in names:
            state = states.get(name) or user.init(params[name])
            updates, states[name] = user.update(grads[name], state, params[name])
            params[name] = optax.apply_updates(params[name], updates)
        found.append(dict(params))
    return found


STAGES = {0: ("neck", "stem"), 4: ("stem",), 7: ()}
BEGIN = {"head": 0, "neck": 4, "stem": 7}


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 5e-5, 1e-6), one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "user",
    [
        optax.adam(0.1),
        thorough(optax.adamw(0.1, weight_decay=0.1)),
        thorough(optax.nadam(0.1)),
        thorough(optax.adabelief(0.1)),
        thorough(optax.adan(0.1)),
        thorough(optax.amsgrad(0.1)),
        thorough(optax.lamb(0.1)),
        thorough(optax.lion(0.1)),
        thorough(optax.radam(0.1)),
        thorough(optax.rmsprop(0.1, bias_correction=True)),
        thorough(optax.adafactor(0.1, min_dim_size_to_factor=2)),
        thorough(optax.contrib.ademamix(0.1)),
        thorough(optax.contrib.adopt(0.1)),
        thorough(optax.chain(optax.scale_by_adam(), optax.trace(0.9), optax.scale(-0.1))),
        ADAM,
    ],
)
def test_each_parameter_is_updated_as_by_an_optimizer_that_begins_with_it(user):
    assert_close(trained(user, STAGES), trained_apart(user, BEGIN))


@pytest.mark.slow
def test_all_gradients_are_clipped_together():
    def clipped(grads, names):
        clip = optax.clip_by_global_norm(0.5)
        return clip.update(grads, clip.init(grads))[0]

    expected = trained_apart(optax.adam(0.1), BEGIN, clipped)
    assert_close(trained(optax.adam(0.1), STAGES, clip_norm=0.5), expected)


@pytest.mark.slow
def test_the_average_is_that_of_the_parameters():
    found = trained(optax.adam(0.1), STAGES, ema=0.9)
    assert_close(found, trained_apart(optax.adam(0.1), BEGIN))


@pytest.mark.slow
def test_groups_count_by_themselves():
    groups = MultiOptimizer(("head|neck", ADAM), ("stem", ADAM))
    assert_close(trained(groups, STAGES), trained_apart(ADAM, BEGIN))


def test_a_schedule_keeps_the_common_count():
    rate = optax.piecewise_constant_schedule(0.1, {7: 0.01})
    found = trained(optax.adam(rate), {0: ("neck", "stem"), 6: ()})
    steps = [abs(b["stem"] - a["stem"]) for a, b in zip(found[5:8], found[6:9], strict=True)]
    assert np.max(steps[0]) > 0.05
    assert np.max(steps[1:]) < 0.01


def test_what_is_frozen_again_begins_again():
    user, stages = optax.adam(0.1), {0: ("stem",), 2: (), 4: ("stem",), 6: ()}
    found = trained(user, stages)
    state, stem = user.init(found[5]["stem"]), found[5]["stem"]
    for grads, params in zip(GRADS[6:], found[6:], strict=True):
        updates, state = user.update(grads["stem"], state, stem)
        stem = optax.apply_updates(stem, updates)
        np.testing.assert_allclose(params["stem"], stem, 1e-5)


@pytest.mark.parametrize("user", [optax.sgd(0.1, momentum=0.9), optax.rmsprop(0.1), optax.lbfgs()])
def test_an_optimizer_without_correction_stays_itself(user):
    optimizer = extend(user, freeze=("stem",))
    state = optimizer.init(PARAMS)
    assert unfrozen(optimizer, state, PARAMS, ())[0] is user


def test_before_the_first_step_nothing_is_late():
    optimizer = extend(optax.adam(0.1), freeze=("stem",))
    optimizer, state = unfrozen(optimizer, optimizer.init(PARAMS), PARAMS, ())
    assert not isinstance(optimizer, ExtendedOptimizer)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(PARAMS))


def late_adam():
    optimizer = extend(optax.adam(0.1), freeze=("stem",))
    state = optimizer.init(PARAMS)
    for grads in GRADS[:3]:
        _, state = optimizer.update(grads, state, PARAMS)
    return unfrozen(optimizer, state, PARAMS, ())


def test_the_state_is_that_of_the_optimizer_alone():
    optimizer, state = late_adam()
    own = optax.adam(0.1).init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(own)
    assert jax.tree.structure(optimizer.init(PARAMS)) == jax.tree.structure(own)
    assert [int(count) for count in counts(state, frozenset(PARAMS))] == [3]


def test_a_state_from_before_the_unfreezing_has_nothing_late():
    optimizer, state = late_adam()
    generations = generations_of(optimizer)
    assert fitting(generations, state, PARAMS) == generations
    assert fitting(generations, optimizer.init(PARAMS), PARAMS) == ()
    assert from_json(to_json(generations)) == generations
