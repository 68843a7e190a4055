"""The logical axes of the state of any optimizer are derived from those of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from named_models import abstract_state

import flaxfit as ff
from flaxfit.tree._paths import flat


def opt_axes(optimizer):
    """The names of the arrays of an optimizer's state, by path."""
    return flat(abstract_state(optimizer).as_logical_axes().opt_state)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(1e-3),
        optax.lamb(1e-3),
        optax.MultiSteps(optax.adam(1e-3), 4),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.ema(0.9)),
        optax.apply_if_finite(optax.adam(1e-3), 3),
        optax.contrib.schedule_free_adamw(1e-3),
        optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        optax.partition(
            {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)}, {"square": "a", "wide": "b"}
        ),
        ff.optim.MultiOptimizer(
            ("square/.*", ff.optim.OptimizerDef(optax.adamw, learning_rate=1e-3)),
            ("wide/kernel", optax.lamb(1e-3)),
        ),
    ],
)
def test_what_an_optimizer_keeps_for_a_parameter_has_its_names(optimizer):
    state = abstract_state(optimizer)
    names, shapes = flat(state.as_logical_axes().opt_state), flat(state.opt_state)
    assert names.keys() == shapes.keys()
    mirrors = [path for path in names if path.endswith(("kernel", "bias"))]
    assert mirrors
    parameters = flat(state.params_axes)
    for path in names:
        mirrored = next((p for p in parameters if path.endswith(f"/{p}")), None)
        assert names[path] == (parameters[mirrored] if mirrored else P()), path


def test_factors_of_adafactor_have_the_names_of_the_dimensions_they_keep():
    axes = opt_axes(optax.adafactor(1e-3, min_dim_size_to_factor=2, momentum=0.9))
    assert axes["0/v_row/wide/kernel"] == P("mlp")  # the larger dimension, "embed", is reduced
    assert axes["0/v_col/wide/kernel"] == P("embed")
    assert axes["0/v/wide/kernel"] == axes["0/v_row/wide/bias"] == P(None)  # placeholders
    assert axes["0/v/wide/bias"] == P("mlp")
    assert axes["4/ema/wide/kernel"] == P("embed", "mlp")


@pytest.mark.parametrize("shape", [(6, 6), (6, 4, 6), (5, 5, 5), (6, 6, 1)])
def test_equal_dimensions_are_told_apart_as_the_optimizer_does(shape):
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=1)
    names = ("a", "b", "c")[: len(shape)]
    variables = {"params": {"w": jnp.ones(shape)}, "params_axes": {"w": P(*names)}}
    state = ff.TrainState.create(optimizer, variables)
    # Each dimension is scaled in its own way: what the rows and the columns hold tells which
    # dimensions are left in them.
    grad = 1.0
    for axis, size in enumerate(shape):
        scale = np.arange(1, size + 1, dtype=np.float32) ** (axis + 1)
        grad = grad * scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    update = jax.jit(lambda state, grad: state.apply_gradient(optimizer, {"w": grad}))
    factors = update(state, grad).opt_state[0]
    found = state.as_logical_axes().opt_state[0]
    for factor in ("v_row", "v_col"):
        spec, values = getattr(found, factor)["w"], getattr(factors, factor)["w"]
        assert len(spec) == values.ndim == len(shape) - 1
        for axis, name in enumerate(spec):
            if name is None:
                assert values.shape[axis] == 1
                continue
            one, *_, last = np.moveaxis(np.asarray(values), axis, 0).reshape(values.shape[axis], -1)
            power = 2 * (names.index(name) + 1)
            np.testing.assert_allclose(last / one, values.shape[axis] ** power, rtol=1e-4)


def test_stacks_and_means_keep_the_names_of_their_dimensions():
    axes = opt_axes(optax.lbfgs(memory_size=3))
    assert axes["0/diff_params_memory/wide/kernel"] == P(None, "embed", "mlp")
    assert axes["0/weights_memory"] == P(None)
    sm3 = opt_axes(optax.sm3(1e-3))
    assert sm3["0/mu/wide/kernel/0"] == P("embed") and sm3["0/mu/wide/kernel/1"] == P("mlp")
    assert sm3["0/mu/square/kernel/0"] == P(None)  # nothing tells which it is


def test_an_optimizer_that_flattens_the_parameters_leaves_no_names():
    assert opt_axes(optax.flatten(optax.adam(1e-3)))["0/mu"] == P(None)


def test_a_parameter_within_another_path_is_not_taken_for_it():
    variables = {
        "params": {"kernel": jnp.ones((4, 5)), "in": {"kernel": jnp.ones((4, 5))}},
        "params_axes": {"kernel": P("a", "b"), "in": {"kernel": P("c", "d")}},
    }
    state = ff.TrainState.create(optax.sgd(0.1, momentum=0.9), variables)
    trace = state.as_logical_axes().opt_state[0].trace
    assert trace == {"kernel": P("a", "b"), "in": {"kernel": P("c", "d")}}
