"""Logical axes: where a state finds them, and how they are used."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, meta
from flax.linen import spmd
from jax.sharding import PartitionSpec as P
from named_models import Annotated, Boxed, X, abstract_state, boxed_state

import flaxfit as ff


def test_boxes_are_taken_off_and_their_names_kept():
    state = boxed_state(optax.adam(0.1))
    leaves = jax.tree.leaves(state, is_leaf=meta.is_axis_metadata)
    assert not any(map(meta.is_axis_metadata, leaves))
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
        assert logical.params == state.params_axes
        assert logical.model_state["cache"]["seen"] == P("mlp")


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
    assert fresh.replace_optimizer(other).axes is None


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


@pytest.mark.slow
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
