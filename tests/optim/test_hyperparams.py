"""Hyperparameters are found and set in any optimizer state, without a new compilation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxfit.optim import MultiOptimizer, OptimizerDef, hyperparams, set_hyperparams

PARAMS = {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}
BARE = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5, momentum=0.9)
OURS: Any = OptimizerDef(optax.sgd, learning_rate=0.5, momentum=0.9)
GROUPS = MultiOptimizer(
    ("a", OptimizerDef(optax.sgd, learning_rate=0.5)),
    (lambda path, value: path == "b", OptimizerDef(optax.adam, learning_rate=0.25, b1=0.8)),
)
LABELLED = optax.partition({"x": BARE, "y": OURS}, {"a": "x", "b": "y"})


def values(state, group=None):
    """Hyperparameters as plain numbers."""
    return jax.tree.map(lambda x: round(float(x), 6), hyperparams(state, group))


@pytest.mark.parametrize(
    "optimizer",
    [
        BARE,
        OURS,
        optax.chain(optax.clip(1.0), BARE),
        optax.chain(optax.clip(1.0), OURS),
        optax.MultiSteps(optax.chain(OURS), 2),
        optax.inject_hyperparams(lambda scale: optax.chain(BARE, optax.scale(scale)))(2.0),
    ],
    ids=["bare", "ours", "bare in chain", "ours in chain", "in MultiSteps", "nested"],
)
def test_they_are_read_and_set_wherever_they_are_without_compiling_again(optimizer):
    update = jax.jit(lambda state: optimizer.update(PARAMS, state, PARAMS)[1])
    state = update(update(optimizer.init(PARAMS)))
    assert values(state).items() >= {"learning_rate": 0.5, "momentum": 0.9}.items()
    n_compiled = update._cache_size()
    state = update(set_hyperparams(state, learning_rate=0.125))
    assert values(state).items() >= {"learning_rate": 0.125, "momentum": 0.9}.items()
    assert update._cache_size() == n_compiled


def test_setting_takes_effect_in_the_next_update():
    state = set_hyperparams(OURS.init(PARAMS), learning_rate=2.0, momentum=0.0)
    updates, _ = OURS.update(PARAMS, state, PARAMS)
    np.testing.assert_array_equal(updates["a"], [-2.0, -2.0])


def test_hyperparameters_of_groups_are_read_by_group():
    state = GROUPS.init(PARAMS)
    assert values(state) == {"a": {"learning_rate": 0.5}, "1": {"learning_rate": 0.25, "b1": 0.8}}
    assert values(state, "1") == values(state, 1) == {"learning_rate": 0.25, "b1": 0.8}


def test_labels_of_optax_are_groups_too():
    state = set_hyperparams(LABELLED.init(PARAMS), group="y", learning_rate=0.0)
    assert values(state, "x") == {"learning_rate": 0.5, "momentum": 0.9}
    assert values(state, "y") == {"learning_rate": 0.0, "momentum": 0.9}


def test_one_group_is_set_by_name_or_position_or_all_that_have_it():
    state = GROUPS.init(PARAMS)
    of_a, of_b = {"learning_rate": 0.125}, {"learning_rate": 0.25, "b1": 0.8}
    for group in 0, "a":
        changed = set_hyperparams(state, group=group, learning_rate=0.125)
        assert values(changed) == {"a": of_a, "1": of_b}
    changed = set_hyperparams(state, learning_rate=0.125, b1=0.5)
    assert values(changed) == {"a": of_a, "1": {"learning_rate": 0.125, "b1": 0.5}}


def test_what_is_set_beats_a_schedule_until_cleared_and_the_schedule_counts_on():
    schedule = optax.piecewise_constant_schedule(1.0, {2: 0.5, 4: 0.5})
    optimizer = OptimizerDef(optax.sgd, learning_rate=schedule)
    update = jax.jit(lambda state: optimizer.update(PARAMS, state, PARAMS)[1])
    state, seen = optimizer.init(PARAMS), []
    for step in range(6):
        if step == 1:
            state = set_hyperparams(state, learning_rate=7.0)
        if step == 5:
            state = set_hyperparams(state, learning_rate=None)
        state = update(state)
        seen.append(values(state)["learning_rate"])
    assert seen == [1.0, 7.0, 7.0, 7.0, 7.0, float(schedule(5))]
    assert update._cache_size() == 1


def test_setting_is_pure_and_keeps_structure_types_and_placement():
    state = jax.device_put(GROUPS.init(PARAMS), jax.devices()[1])
    changed = set_hyperparams(state, learning_rate=0.125)
    assert values(state, "a") == {"learning_rate": 0.5}
    assert jax.tree.structure(changed) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(changed), jax.tree.leaves(state), strict=True):
        assert (new.dtype, new.weak_type, new.sharding) == (old.dtype, old.weak_type, old.sharding)
        assert new.committed == old.committed


def test_no_buffer_is_in_a_state_twice():
    optimizer = OptimizerDef(optax.sgd, learning_rate=optax.constant_schedule(0.5))
    state = set_hyperparams(optimizer.init(PARAMS), learning_rate=0.125)
    jax.jit(lambda state: state, donate_argnums=0)(state)


def test_setting_works_inside_jit_and_on_numpy_leaves():
    state = OURS.init(PARAMS)
    traced = jax.jit(lambda state, rate: set_hyperparams(state, learning_rate=rate))(state, 0.125)
    on_host = set_hyperparams(jax.device_get(state), learning_rate=0.125)
    assert values(traced) == values(on_host) == {"learning_rate": 0.125, "momentum": 0.9}
    assert isinstance(hyperparams(on_host)["learning_rate"], np.ndarray)


@pytest.mark.parametrize(
    ("optimizer", "arguments", "error", "message"),
    [
        (OURS, {"lr": 0.1}, ValueError, r"called lr.*\['learning_rate', 'momentum'\]"),
        (GROUPS, {"lr": 0.1}, ValueError, r"\['learning_rate'\] in group 'a', .* in group '1'"),
        (GROUPS, {"b1": 0.1, "group": "a"}, ValueError, "called b1"),
        (GROUPS, {"learning_rate": 0.1, "group": "c"}, ValueError, r"no group 'c'.*\['a', '1'\]"),
        (GROUPS, {"learning_rate": 0.1, "group": 2}, ValueError, "no group 2"),
        (OURS, {"learning_rate": 0.1, "group": "a"}, ValueError, "has no groups"),
        (
            optax.adam(0.1),
            {"learning_rate": 0.1},
            ValueError,
            "keeps no hyperparameters.*OptimizerDef",
        ),
        (OURS, {"learning_rate": "fast"}, TypeError, "must be a number.*got fast"),
        (OURS, {"learning_rate": np.ones(2)}, ValueError, r"shape \(\), got shape \(2,\)"),
        (OURS, {"learning_rate": None}, ValueError, "Cannot clear learning_rate"),
        (
            optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(1.0)),
            {"learning_rate": 0.1},
            ValueError,
            "follows a schedule",
        ),
        (
            optax.inject_hyperparams(optax.sgd)(learning_rate=1),
            {"learning_rate": 0.5},
            ValueError,
            "integer",
        ),
    ],
)
def test_what_cannot_be_set_is_an_error_that_says_what_can(optimizer, arguments, error, message):
    with pytest.raises(error, match=message):
        set_hyperparams(optimizer.init(PARAMS), **arguments)


def test_a_state_without_hyperparameters_reads_as_empty():
    assert hyperparams(optax.adam(0.1).init(PARAMS)) == {}
    with pytest.raises(ValueError, match="no group 'a'"):
        hyperparams(jnp.zeros(()), "a")


def test_without_a_group_none_clears_what_goes_by_a_schedule_and_leaves_the_rest():
    groups = MultiOptimizer(
        ("a", OptimizerDef(optax.sgd, learning_rate=optax.linear_schedule(1.0, 0.0, 10))),
        ("b", OptimizerDef(optax.sgd, learning_rate=0.5)),
    )
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    state = set_hyperparams(groups.init(params), learning_rate=0.25)
    state = set_hyperparams(state, learning_rate=None)
    _, state = groups.update(params, state, params)
    rates = {name: float(own["learning_rate"]) for name, own in hyperparams(state).items()}
    assert rates == {"a": 1.0, "b": 0.25}


@pytest.mark.parametrize("value", [float("nan"), np.inf])
def test_a_rate_must_be_finite(value):
    state = OptimizerDef(optax.sgd, learning_rate=0.1).init(jnp.ones(1))
    with pytest.raises(ValueError, match="learning_rate must be a finite number"):
        set_hyperparams(state, learning_rate=value)
