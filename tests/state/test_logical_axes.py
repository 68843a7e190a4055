"""Logical axes: where a state finds them, and what they are for any optimizer's state."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, meta
from flax.linen import partitioning, spmd
from jax.sharding import PartitionSpec as P

import flaxfit as ff
from flaxfit.tree._paths import flat

X = np.ones((4, 8), np.float32)


def dense(width, names, name=None, boxed=nn.with_logical_partitioning):
    return nn.Dense(
        width,
        kernel_init=boxed(nn.initializers.ones, names),
        bias_init=boxed(nn.initializers.zeros, names[-1:]),
        name=name,
    )


class Boxed(nn.Module):
    """One square kernel, one that is not, statistics without names."""

    @nn.compact
    def __call__(self, x):
        x = dense(8, ("embed", "square"), "square")(x)
        x = nn.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)(x)
        return dense(4, ("embed", "mlp"), "wide", nn.with_partitioning)(x)


class Annotated(nn.Module):
    """The collections of T5X's models."""

    @nn.compact
    def __call__(self, x):
        w = partitioning.param_with_axes("w", nn.initializers.ones, (8, 4), axes=("embed", "mlp"))
        partitioning.variable_with_axes("cache", "seen", jnp.zeros, (4,), axes=("mlp",))
        return x @ w


def boxed_state(optimizer):
    return ff.init_state(Boxed().init, optimizer, 0, (X,))


def abstract_state(optimizer):
    """The same, its arrays as shapes."""
    return jax.eval_shape(lambda: boxed_state(optimizer))


def opt_axes(optimizer):
    """The names of the arrays of an optimizer's state, by path."""
    return flat(abstract_state(optimizer).as_logical_axes().opt_state)


def test_boxes_are_taken_off_and_their_names_kept():
    state = boxed_state(optax.adam(0.1))
    assert not any(
        map(meta.is_axis_metadata, jax.tree.leaves(state, is_leaf=meta.is_axis_metadata))
    )
    assert state.params_axes == {
        "square": {"kernel": P("embed", "square"), "bias": P("square")},
        "wide": {"kernel": P("embed", "mlp"), "bias": P("mlp")},
    }
    assert state.flax_mutables_axes is None


def test_collections_of_names_are_split_off():
    variables = Annotated().init(jax.random.key(0), X)
    assert {"params_axes", "cache_axes"} < variables.keys()
    for state in (
        ff.TrainState.create(optax.sgd(0.1), variables),
        ff.init_state(Annotated().init, optax.sgd(0.1), 0, (X,)),
        ff.InferenceState.create(FrozenDict(variables)),
    ):
        assert state.model_state.keys() == {"cache"}
        assert state.params_axes == {"w": P("embed", "mlp")}
        assert state.flax_mutables_axes == {"cache": {"seen": P("mlp")}}
        logical = state.as_logical_axes()
        assert logical.params == state.params_axes and logical.model_state["cache"]["seen"] == P(
            "mlp"
        )


@pytest.mark.parametrize("is_instance", [True, False])
def test_names_of_nnx_variables_are_found(is_instance):
    def make(rngs):
        kernel_init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
        return nnx.Linear(8, 4, kernel_init=kernel_init, rngs=rngs)

    with nnx.use_eager_sharding(False):  # else nnx itself asks for a mesh
        init, apply = ff.modules.from_nnx(make(nnx.Rngs(0)) if is_instance else make)
        state = ff.init_state(init, optax.sgd(0.1, momentum=0.9), 0, (X,))
        assert apply(state.variables, X).shape == (4, 4)
    assert state.params_axes == {"kernel": P("embed", "mlp"), "bias": None}
    assert dict(state.axes or {})["opt_state/0/trace/kernel"] == P("embed", "mlp")
    assert state.model_state == {}


def test_specs_and_plain_tuples_are_names_too():
    variables = {
        "params": {"a": jnp.ones((2, 3)), "b": jnp.ones(3), "c": jnp.ones(())},
        "params_axes": {"a_axes": P("x", ("y", "z")), "b": ("y",)},
    }
    axes = ff.TrainState.create(optax.sgd(0.1), variables).as_logical_axes().params
    assert axes == {"a": P("x", ("y", "z")), "b": P("y"), "c": P()}


def test_a_collection_of_arrays_may_be_called_axes():
    variables = {"params": {"w": jnp.ones(2)}, "rotation_axes": {"u": jnp.ones(3)}}
    state = ff.TrainState.create(optax.sgd(0.1), variables)
    assert state.model_state.keys() == {"rotation_axes"} and state.axes is None


def test_names_that_fit_no_array_are_all_listed():
    variables = {
        "params": {"w": jnp.ones((2, 3))},
        "params_axes": {"w_axes": P("a", "b", "c"), "v_axes": P("a")},
        "cache_axes": {"k_axes": P("a")},
    }
    with pytest.raises(ValueError) as caught:
        ff.InferenceState.create(variables)
    assert "params/v has names but no array" in str(caught.value)
    assert "model_state/cache/k has names but no array" in str(caught.value)
    assert "params/w has 3 names, ('a', 'b', 'c'), for the shape (2, 3)" in str(caught.value)


def test_missing_names_list_the_parameters():
    state = abstract_state(optax.adam(0.1))
    kept = {p: spec for p, spec in state.axes.items() if "wide/bias" not in p}
    message = "(?i)missing axis names for parameters: params/wide/bias[.]"
    with pytest.raises(ValueError, match=message):
        state.replace(axes=FrozenDict(kept)).as_logical_axes()
    bare = ff.TrainState.create(optax.adam(0.1), {"params": {"w": jnp.ones(2), "c": jnp.ones(())}})
    with pytest.raises(ValueError, match="parameters: params/w[.]"):
        bare.as_logical_axes()


def test_a_partly_named_model_names_the_optimizer_state_of_that_part():
    variables = {"params": {"w": jnp.ones(2), "v": jnp.ones(2)}, "params_axes": {"w": P("a")}}
    state = ff.TrainState.create(optax.sgd(0.1, momentum=0.9), variables)
    assert state.params_axes == {"w": P("a"), "v": None}
    assert state.axes == {"params/w": P("a"), "opt_state/0/trace/w": P("a")}


def test_the_logical_axes_have_the_structure_of_the_state_and_a_name_per_dimension():
    state = abstract_state(optax.adamw(1e-3))
    for one in (state, state.for_inference()):
        logical = one.as_logical_axes()
        fits = jax.tree.map(lambda leaf, spec: len(spec) == leaf.ndim, one, logical)
        assert all(jax.tree.leaves(fits))
    assert logical.step == P()
    assert all(spec == P(None) for spec in jax.tree.leaves(logical.model_state["batch_stats"]))


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


def test_replacing_the_optimizer_recomputes_the_axes():
    state = boxed_state(optax.adam(0.1)).replace_step(5)
    other = optax.adafactor(0.1, min_dim_size_to_factor=2)
    replaced = state.replace_optimizer(other)
    assert replaced.as_logical_axes() == abstract_state(other).as_logical_axes()
    assert int(replaced.step) == 5 and replaced.params is state.params
    stale = state.replace(opt_state=other.init(state.params))
    with pytest.raises(ValueError, match="opt_state/0/v_row.*replace_optimizer"):
        stale.as_logical_axes()
    fresh = ff.init_state(lambda rngs, x: {"params": {"w": x}}, optax.sgd(0.1), 0, (X,))
    fresh = fresh.replace_optimizer(other)
    assert fresh.axes is None


def test_axes_are_a_static_part_of_the_state():
    state, again = boxed_state(optax.adam(0.1)), boxed_state(optax.adam(0.1))
    assert hash(state.axes) == hash(again.axes)
    assert jax.tree.structure(state) == jax.tree.structure(again)
    traces = []

    def update(state):
        traces.append(state)
        grads = jax.tree.map(jnp.ones_like, state.params)
        return state.apply_gradient(optax.adam(0.1), grads)

    step = jax.jit(update, donate_argnums=0)
    after = step(step(again))
    assert len(traces) == 1 and after.axes == state.axes
    mapped = jax.pmap(lambda state, x: update(state), in_axes=(None, 0), out_axes=None)
    assert mapped(state, jnp.ones(2)).axes == state.axes


@pytest.mark.slow
@pytest.mark.parametrize("module", [Boxed(), Annotated()], ids=["boxes", "collections"])
def test_a_state_with_axes_trains_like_one_without(module):
    task = ff.TrainTask(module.apply, optax.adam(0.1), "mse", [(X, X[:, :4])] * 3)
    state = ff.init_state(module.init, task.optimizer, 0, (X,))
    *_, last = ff.TrainLoop(state, task, stdout=False)
    *_, other = ff.TrainLoop(state.replace(axes=None), task, stdout=False)
    jax.tree.map(np.testing.assert_array_equal, last.state.params, other.state.params)
    assert last.state.axes == state.axes and last.state.as_logical_axes().step == P()


def test_axes_survive_checkpoint_files(tmp_path):
    state = boxed_state(optax.adam(0.1))
    ff.checkpoints.save(tmp_path, state)
    assert ff.checkpoints.restore(tmp_path, state).axes == state.axes
    bare = ff.checkpoints.restore(tmp_path)
    assert bare.axes == state.axes
    assert bare.as_logical_axes().opt_state["0"]["mu"]["wide"]["kernel"] == P("embed", "mlp")


def test_logical_axes_with_rules_place_the_state():
    state = boxed_state(optax.adafactor(1e-3, min_dim_size_to_factor=2))
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    rules = (("embed", "data"), ("mlp", "model"))
    shardings = spmd.logical_to_mesh_sharding(state.as_logical_axes(), mesh, rules)
    placed = jax.device_put(state, shardings)
    assert placed.params["wide"]["kernel"].addressable_shards[0].data.shape == (4, 2)
    assert placed.opt_state[0].v_col["wide"]["kernel"].addressable_shards[0].data.shape == (4,)
