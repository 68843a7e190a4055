"""MultiOptimizer: each group by its own rule, the rest left exactly as it is."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import ModelParamTraversal
from loops import assert_close

from flaxfit import TrainState
from flaxfit.optim import MultiOptimizer, OptimizerDef, hyperparams

SGD = OptimizerDef(optax.sgd, learning_rate=0.5)
ADAM = OptimizerDef(optax.adam, learning_rate=0.25, b1=0.9)
PARAMS = {
    "encoder": {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)},
    "head": {"kernel": np.full((2, 1), 2, np.float32), "bias": np.ones(1, np.float32)},
    "scale": np.array([-0.0, 3.0], np.float32),
    "empty": {},
}
GRADS = jax.tree.map(lambda p: 0.5 * p + 1, PARAMS)
BY_PATTERN = MultiOptimizer(("encoder/.*", SGD), ("head/.*", ADAM))


class Heads:
    """Selects the part of a tree called head."""

    def iterate(self, inputs):
        yield inputs["head"]

    def update(self, fn, inputs):
        return {**inputs, "head": fn(inputs["head"])}


def on_part(definition, part, n_steps, **overrides):
    """What an optimizer makes of a part of the tree alone."""
    optimizer = definition.create(PARAMS[part])
    for _ in range(n_steps):
        optimizer = optimizer.apply_gradient(GRADS[part], **overrides)
    return optimizer.target


def test_each_group_goes_by_its_own_optimizer_and_the_rest_stays():
    optimizer = BY_PATTERN.create(PARAMS)
    step = jax.jit(lambda optimizer: optimizer.apply_gradient(GRADS))
    for _ in range(3):
        optimizer = step(optimizer)
    expected = {**PARAMS, "encoder": on_part(SGD, "encoder", 3), "head": on_part(ADAM, "head", 3)}
    assert_close(optimizer.target, expected, rtol=1e-6)
    np.testing.assert_array_equal(optimizer.target["scale"], PARAMS["scale"])


@pytest.mark.parametrize(
    "focus",
    [
        "head/.*",
        re.compile(r"head/\w+"),
        lambda path, value: path.startswith("head/"),
        lambda path, value: value.shape[-1] == 1,
        Heads(),
    ],
    ids=["text", "pattern", "function of the path", "function of the value", "traversal"],
)
def test_a_focus_updates_what_its_filter_chooses_and_keeps_moments_of_nothing_else(focus):
    decaying = OptimizerDef(optax.adamw, learning_rate=0.5, weight_decay=0.5)
    optimizer = decaying.create(PARAMS, focus=focus)
    after = jax.jit(lambda o, g: o.apply_gradient(g))(optimizer, GRADS)
    for name, value in {**PARAMS, "head": on_part(decaying, "head", 1)}.items():
        assert_close(after.target[name], value, rtol=1e-6)
    kept = {leaf.shape for leaf in jax.tree.leaves(after.state) if leaf.ndim}
    assert kept == {(2, 1), (1,)}


def test_traversals_of_flax_choose_a_group():
    with pytest.warns(DeprecationWarning):
        traversal = ModelParamTraversal(lambda path, value: path == "/head/bias")
    moved = SGD.create(PARAMS, focus=traversal).apply_gradient(GRADS).target
    np.testing.assert_array_equal(moved["head"]["bias"], [0.25])
    np.testing.assert_array_equal(moved["head"]["kernel"], PARAMS["head"]["kernel"])


def test_gradients_of_the_rest_may_be_anything():
    grads = {**GRADS, "scale": np.full(2, np.nan, np.float32)}
    after = BY_PATTERN.create(PARAMS).apply_gradient(grads)
    np.testing.assert_array_equal(after.target["scale"], PARAMS["scale"])


def test_one_override_is_for_every_group_that_has_it():
    optimizer = BY_PATTERN.create(PARAMS)
    moved = optimizer.apply_gradient(GRADS, learning_rate=0.125, b1=0.5).target
    expected = on_part(ADAM, "head", 1, learning_rate=0.125, b1=0.5)
    np.testing.assert_allclose(moved["head"]["kernel"], expected["kernel"], rtol=1e-6)
    encoder = PARAMS["encoder"]["kernel"] - 0.125 * GRADS["encoder"]["kernel"]
    np.testing.assert_allclose(moved["encoder"]["kernel"], encoder, rtol=1e-6)


@pytest.mark.parametrize(
    "sets",
    [
        [{"learning_rate": 0.0}, None],
        {"encoder/.*": {"learning_rate": 0.0}},
        {0: {"learning_rate": 0.0}},
    ],
)
def test_groups_are_overridden_one_by_one(sets):
    moved = BY_PATTERN.create(PARAMS).apply_gradient(GRADS, hyper_params=sets).target
    np.testing.assert_array_equal(moved["encoder"]["kernel"], PARAMS["encoder"]["kernel"])
    expected = on_part(ADAM, "head", 1)
    np.testing.assert_allclose(moved["head"]["kernel"], expected["kernel"], rtol=1e-6)


def test_each_group_has_its_set_of_hyperparameters():
    assert BY_PATTERN.hyper_params == [{"learning_rate": 0.5}, {"learning_rate": 0.25, "b1": 0.9}]
    changed = BY_PATTERN.update_hyper_params(learning_rate=1.0, b1=0.5)
    assert changed == [{"learning_rate": 1.0}, {"learning_rate": 1.0, "b1": 0.5}]
    changed = BY_PATTERN.update_hyper_params(hyper_params=changed, b1=0.25)
    assert changed == [{"learning_rate": 1.0}, {"learning_rate": 1.0, "b1": 0.25}]


def test_a_group_may_have_a_plain_transformation_of_optax():
    mixed = MultiOptimizer(("encoder/.*", optax.sgd(0.5)), ("head/.*", SGD))
    moved = mixed.create(PARAMS).apply_gradient(GRADS, learning_rate=0.0).target
    expected = on_part(SGD, "encoder", 1)
    np.testing.assert_array_equal(moved["encoder"]["kernel"], expected["kernel"])
    np.testing.assert_array_equal(moved["head"]["kernel"], PARAMS["head"]["kernel"])


@pytest.mark.slow
def test_the_value_of_a_box_is_named_as_the_box():
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    grads = jax.tree.map(jnp.ones_like, params)
    after = MultiOptimizer((".*/kernel", SGD)).create(params).apply_gradient(grads).target
    before, moved = nnx.to_pure_dict(params)["layers"], nnx.to_pure_dict(after)["layers"]
    np.testing.assert_array_equal(moved[1]["kernel"], before[1]["kernel"] - 0.5)
    np.testing.assert_array_equal(moved[1]["bias"], before[1]["bias"])

    dense = nn.Dense(1, kernel_init=nn.with_partitioning(nn.initializers.ones, ("in", "out")))
    boxed = dense.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    after = SGD.create(boxed, focus="kernel").apply_gradient(jax.tree.map(jnp.ones_like, boxed))
    np.testing.assert_array_equal(after.target["kernel"].value, [[0.5], [0.5]])


def test_groups_of_a_chain_and_groups_of_groups_work():
    inner = MultiOptimizer((".*/kernel", SGD), (".*/bias", ADAM))
    outer: Any = optax.chain(optax.scale(2.0), MultiOptimizer(("head/.*", inner)))
    state = outer.init(PARAMS)
    updates, state = outer.update(GRADS, state, PARAMS, learning_rate=0.125)
    np.testing.assert_allclose(updates["head"]["kernel"], -0.25 * GRADS["head"]["kernel"])
    assert list(hyperparams(state, "head/.*")) == [".*/kernel", ".*/bias"]


def test_optax_finds_the_parameters_in_the_state():
    marked = optax.tree.map_params(BY_PATTERN, lambda leaf: "param", BY_PATTERN.init(PARAMS))
    assert jax.tree.leaves(marked).count("param") == 4


UNUSABLE = [
    (lambda: MultiOptimizer(), ValueError, "at least one group"),
    (lambda: MultiOptimizer("encoder/.*"), TypeError, r"pairs \(filter, optimizer\).*for group 0"),
    (lambda: MultiOptimizer(("a", SGD), ("b", 0.1)), TypeError, "for group 1"),
    (lambda: MultiOptimizer((3, SGD)), TypeError, "pattern of paths.*got 3 for group 0"),
    (lambda: MultiOptimizer(("a(", SGD)), ValueError, r"no valid pattern: 'a\('"),
    (lambda: MultiOptimizer(("a", SGD), ("a", ADAM)), ValueError, "same name"),
    (
        lambda: MultiOptimizer((".*kernel", SGD), ("head/.*", ADAM)).init(PARAMS),
        ValueError,
        r"Multiple optimizers match.*\n  head/kernel \(groups '.\*kernel', 'head/.\*'\)$",
    ),
    (
        lambda: MultiOptimizer(("hed/.*", SGD)).init(PARAMS),
        ValueError,
        r"'hed/.\*' matches no parameter.*:(\n  .*){5}$",
    ),
    (lambda: SGD.create(PARAMS, focus=lambda path, x: False), ValueError, "'0' matches no param"),
    (lambda: SGD.create(PARAMS, focus="head"), ValueError, "'head' matches no parameter"),
    (lambda: SGD.create(PARAMS, focus=re.compile("h.d")), ValueError, "'h.d' matches no parameter"),
    (
        lambda: SGD.create({str(i): 1.0 for i in range(1053)}, focus="x"),
        ValueError,
        r":(\n  \d+){50}\n  \.\.\. and 1,003 more$",
    ),
    (
        lambda: BY_PATTERN.update(GRADS, BY_PATTERN.init(PARAMS)),
        ValueError,
        r"optimizer.update\(grads, state, params\)",
    ),
    (
        lambda: BY_PATTERN.create(PARAMS).apply_gradient(GRADS, rate=1),
        ValueError,
        r"called rate.*\['learning_rate'\] in group 'encoder/.\*', .*'b1'\] in group",
    ),
    (
        lambda: BY_PATTERN.create(PARAMS).apply_gradient(GRADS, hyper_params=[{}]),
        ValueError,
        "a set for each of the groups.*got 1",
    ),
    (
        lambda: BY_PATTERN.create(PARAMS).apply_gradient(GRADS, hyper_params={"tail": {}}),
        ValueError,
        r"no groups \['tail'\], only",
    ),
    (
        lambda: (
            MultiOptimizer(("head/.*", optax.sgd(0.1)))
            .create(PARAMS)
            .apply_gradient(GRADS, hyper_params=[{"learning_rate": 1}])
        ),
        ValueError,
        "not an OptimizerDef",
    ),
]


@pytest.mark.parametrize(("use", "error", "message"), UNUSABLE)
def test_what_cannot_be_is_a_worded_error(use, error, message):
    with pytest.raises(error, match=message):
        use()


def updates_of(groups, params, **arguments) -> Any:
    return groups.update(params, groups.init(params), params, **arguments)[0]


def test_a_group_may_be_frozen_as_a_whole():
    """A backbone and a head, the backbone frozen: its group waits until it is thawed."""
    groups = MultiOptimizer(
        ("a", OptimizerDef(optax.adam, learning_rate=0.1)),
        ("b", OptimizerDef(optax.adam, learning_rate=0.2)),
    )
    params = {"a": jnp.ones(2), "b": optax.MaskedNode()}
    updates = updates_of(groups, params)
    assert float(updates["a"][0]) == pytest.approx(-0.1, rel=1e-5)  # Adam's epsilon.
    with pytest.raises(ValueError, match="Group 'b' matches no parameter"):
        groups.init({"a": jnp.ones(2), "c": optax.MaskedNode()})


def test_overrides_reach_a_definition_within_a_chain_and_no_other_group():
    chained = optax.chain(optax.clip(9.0), OptimizerDef(optax.sgd, learning_rate=0.1))
    groups = MultiOptimizer(
        ("a", chained), ("b", OptimizerDef(optax.adam, learning_rate=0.2, b1=0.9))
    )
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    still = updates_of(groups, params, learning_rate=0.0)
    assert float(still["a"][0]) == float(still["b"][0]) == 0
    moved = updates_of(groups, params, b1=0.0)
    assert float(moved["a"][0]) == pytest.approx(-0.1)
    with pytest.raises(ValueError, match="No hyperparameter is called momentum"):
        updates_of(groups, params, momentum=0.0)


def test_a_filter_of_values_is_told_that_it_has_none_in_a_compiled_step():
    groups = MultiOptimizer((lambda path, value: value.sum() > 0, optax.sgd(0.1)))
    params = {"a": jnp.ones(1)}
    assert groups.init(params)
    with pytest.raises(TypeError, match="the path, the shape and the dtype"):
        jax.jit(groups.init)(params)


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("group", ["head/.*", 1, -1])
def test_one_group_is_updated_alone(group):
    start = BY_PATTERN.create(PARAMS).apply_gradient(GRADS)
    found = jax.jit(lambda o, g: o.apply_gradient(g, group=group))(start, GRADS)
    both = jax.jit(lambda o, g: o.apply_gradient(g))(start, GRADS)
    assert_equal(found.target, {**start.target, "head": both.target["head"]})
    assert_equal(found.state.states, (start.state.states[0], both.state.states[1]))
    assert not np.array_equal(found.target["head"]["kernel"], start.target["head"]["kernel"])


def test_one_group_of_a_state_is_updated_alone_within_a_chain():
    optimizer = optax.chain(optax.clip(0.1), BY_PATTERN)
    start = TrainState.create(optimizer, {"params": PARAMS})
    found = start.apply_gradient(optimizer, GRADS, group="encoder/.*", learning_rate=1.0)
    moved = jax.tree.map(lambda p: p - np.float32(0.1), PARAMS["encoder"])
    assert_equal(found.params, {**PARAMS, "encoder": moved})
    assert_equal(found.opt_state[1].states[1], start.opt_state[1].states[1])
    assert int(found.step) == 1


def test_a_group_that_is_not_there_cannot_be_updated_alone():
    state = TrainState.create(BY_PATTERN, {"params": PARAMS})
    with pytest.raises(ValueError, match="no group 'decoder'. The groups are .*encoder"):
        state.apply_gradient(BY_PATTERN, GRADS, group="decoder")
    with pytest.raises(ValueError, match="no group 2"):
        BY_PATTERN.create(PARAMS).apply_gradient(GRADS, group=2)
    sgd = optax.sgd(0.1)
    plain = TrainState.create(sgd, {"params": PARAMS})
    with pytest.raises(ValueError, match="'head' alone: the optimizer has no groups"):
        plain.apply_gradient(sgd, GRADS, group="head")
    with pytest.raises(ValueError, match="0 alone: the optimizer has no groups"):
        SGD.create(PARAMS).apply_gradient(GRADS, group=0)
