"""Layouts: by names and rules, by patterns of paths, by size; on a mesh that fits the devices."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxfit as ff


def state_of(params, axes=None, optimizer=None):
    """A state of shapes; `axes` are names of the dimensions by path within the parameters."""

    def init(rngs, x):
        boxed = {
            name: nn.LogicallyPartitioned(jnp.ones(shape), axes[name])
            if axes and name in axes
            else jnp.ones(shape)
            for name, shape in params.items()
        }
        return {"params": boxed}

    optimizer = optimizer or optax.sgd(0.1)
    return jax.eval_shape(lambda: ff.init_state(init, optimizer, 0, (jnp.ones(1),)))


def specs(strategy, state):
    return {path: array.spec for path, array in strategy.describe(state).arrays.items()}


def four(shape=None, **options):
    return ff.Sharded(shape, devices=jax.devices()[:4], **options)


def test_fsdp_splits_the_largest_dimension_that_divides_and_leaves_small_arrays_whole():
    state = state_of({"wide": (48, 512), "odd": (4097, 6), "tall": (1030, 64), "bias": (512,)})
    found = specs(four(fsdp=True), state)
    assert found["params/wide"] == P(None, "data")
    assert found["params/tall"] == P(None, "data")  # 1030 does not divide by 4.
    assert found["params/odd"] == P(None, None)
    assert found["params/bias"] == P(None)


def test_fsdp_takes_what_the_rules_leave_whole():
    state = state_of({"w": (256, 64)}, {"w": ("mlp", "embed")})
    mesh = {"data": 2, "model": 2}
    assert specs(four(mesh, fsdp=True), state)["params/w"] == P("model", "data")
    assert specs(four(mesh), state)["params/w"] == P("model", None)
    both = four({"fsdp": 2, "data": 2}, fsdp=True)
    assert specs(both, state)["params/w"] == P("fsdp", None) and both.n_devices == 4
    assert specs(four({"x": 4}, fsdp="x"), state)["params/w"] == P("x", None)


def test_the_first_rule_whose_axes_are_free_counts():
    state = state_of({"w": (64, 64)}, {"w": ("a", "b")})
    rules = [("b", "model"), ("a", "model"), ("a", "data")]
    mesh = {"data": 2, "model": 2}
    assert specs(four(mesh, rules=rules), state)["params/w"] == P("data", "model")
    assert specs(four(mesh, rules={"a": ("data", "model")}), state)["params/w"] == P(
        ("data", "model"), None
    )


def test_a_name_that_is_an_axis_needs_no_rule():
    state = state_of({"w": (64, 64)}, {"w": (None, "model")})
    assert specs(four({"model": 4}), state)["params/w"] == P(None, "model")


def test_patterns_of_paths_split_models_without_names():
    rules = [("dense.*", P(None, "model")), (".*", P("data"))]
    state = state_of({"dense_0": (8, 8), "other": (8, 8)}, optimizer=optax.adam(0.1))
    found = specs(four({"data": 2, "model": 2}, rules=rules), state)
    assert found["params/dense_0"] == found["opt_state/0/mu/dense_0"] == P(None, "model")
    assert found["params/other"] == P("data", None)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.1)),
        optax.adafactor(0.1, min_dim_size_to_factor=8),
        optax.multi_transform(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}, {"w": "a", "v": "b"}
        ),
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    ],
    ids=["adamw", "chain", "adafactor", "multi", "steps"],
)
def test_the_state_of_any_optimizer_is_split_like_its_parameters(optimizer):
    shapes = {"w": (64, 512), "v": (512, 64)}
    state = state_of(shapes, {"w": ("embed", "mlp"), "v": ("mlp", "embed")}, optimizer)
    layout = four({"data": 2, "model": 2}, fsdp=True).describe(state)
    expected = {(64, 512): P("data", "model"), (512, 64): P("model", "data")}
    for path, array in layout.arrays.items():
        if array.shape in expected:
            assert array.spec == expected[array.shape], path
        elif math.prod(array.shape) >= 64:  # A factor of Adafactor's.
            assert array.spec == P({64: "data", 512: "model"}[array.shape[0]]), path


def test_an_array_of_the_optimizer_that_is_like_no_parameter_is_split_by_fsdp():
    state = state_of({"w": (64, 64), "v": (64, 64)}, optimizer=optax.flatten(optax.adam(0.1)))
    assert specs(four(fsdp=True), state)["opt_state/0/mu"] == P("data")


@pytest.mark.parametrize(
    ("names", "rules", "message"),
    [
        (("a", "b"), [("a", "modle")], r"\('a', 'modle'\) names 'modle'.* params/w$"),
        (("c", "b"), [("b", "model")], r"params/w \(6, 9\): dimension 1 \(b\) of size 9 .* 2"),
        (("a", "b"), [("a", "data"), ("b", "data")], r"params/w .* dimension 1 \(b\) .*'data'"),
        (("a", "a"), [("a", "data")], r"params/w .* \(a\) should be split over 'data', which an"),
        (("a", "b"), [("w", P("data", "data"))], r"params/w .* two dimensions over 'data'"),
        (("a", "b"), [("w", P(None, None, "data"))], r"params/w .* splits 3 dimensions"),
        (("a", "b"), [("w", P("pipe"))], r"'pipe', which the mesh does not have.* params/w"),
    ],
)
def test_bad_rules_are_refused_and_the_parameters_listed(names, rules, message):
    state = state_of({"w": (6, 9), "fine": (8,)}, {"w": names})
    with pytest.raises(ValueError, match=r"the mesh \(data=2, model=2\)") as error:
        four({"data": 2, "model": 2}, rules=rules).shardings(state)
    assert re.search(message, str(error.value), re.DOTALL | re.MULTILINE), str(error.value)
    assert "params/fine" not in str(error.value)


@pytest.mark.parametrize("shape", [{}, {"data": 3}, {"data": -1, "model": -1}, {"data": 0}])
def test_a_mesh_of_another_number_of_devices_is_refused(shape):
    with pytest.raises(ValueError, match=r"Cannot arrange 4 devices in a mesh"):
        four(shape)


def test_a_mesh_without_names_of_axes_is_refused():
    with pytest.raises(TypeError, match=r"such as \{'data': -1, 'model': 2\}, got 4"):
        four(4)


def test_fsdp_over_an_axis_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"needs an axis 'fsdp' or 'data'.* has 'x'"):
        four({"x": 4}, fsdp=True)


def test_the_layout_prints_as_a_table():
    state = state_of({"w": (64, 512), "bias": (512,)})
    text = str(four({"data": 2, "model": 2}, fsdp=True).describe(state))
    assert "mesh data=2, model=2: 4 devices, batches split over data" in text
    assert re.search(r"params/w +float32\[64, 512\] +\(-, data\) +65.5 kB", text)
    assert re.search(r"params/bias +float32\[512\] +whole +2.0 kB", text)
    assert "nothing is split over model" in text
    assert re.search(r"state 133.1 kB, on each device 67.6 kB, of these 2.1 kB", text)


@pytest.mark.slow
def test_names_of_nnx_are_followed():
    def make(rngs):
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
        return nnx.Linear(16, 8, kernel_init=init, rngs=rngs)

    strategy = four({"data": 2, "model": 2})
    model = ff.Model(make, optax.adam(0.1), "mse", strategy=strategy)
    model.fit(np.ones((16, 16), np.float32), np.ones((16, 8)), batch_size=16, verbose=0)
    found = specs(strategy, model.state)
    assert found["params/kernel"] == found["opt_state/0/mu/kernel"] == P(None, "model")
    for tree in (model.state.params, model.state.opt_state[0].mu):
        assert tree["kernel"].addressable_shards[0].data.shape == (16, 4)
