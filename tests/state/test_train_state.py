"""TrainState and how it is made."""

import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxfit as ff
from flaxfit.state._train_state import as_key

X = np.ones((2, 3), np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        self.sow("intermediates", "x", x)
        return nn.Dropout(0.5, deterministic=False)(x)


def make_state(optimizer=None):
    return ff.init_state(Net().init, optimizer or optax.adam(0.1), jax.random.key(0), (X,))


def test_the_repr_of_a_state_tells_its_size_and_shows_no_arrays():
    state = ff.TrainState.create(optax.adam(0.1), {"params": {"w": jnp.ones((3, 4))}})
    assert repr(state) == "TrainState(step=0, 12 params)"
    assert repr(state.replace_step(1200).for_inference()) == "InferenceState(step=1200, 12 params)"
    assert repr(jax.eval_shape(lambda: state)) == "TrainState(12 params)"


def test_init_state_splits_parameters_from_other_collections():
    state = make_state()
    assert state.params["Dense_0"]["kernel"].shape == (3, 4)
    assert state.model_state.keys() == {"batch_stats"}
    assert int(state.step) == 0 and state.step.dtype == jnp.int32
    assert jnp.issubdtype(state.key.dtype, jax.dtypes.prng_key)
    assert state.variables.keys() == {"params", "batch_stats"}


def test_init_state_needs_only_shapes():
    shapes = (jax.ShapeDtypeStruct((2, 3), jnp.float32),)
    abstract = jax.eval_shape(lambda: ff.init_state(Net().init, optax.adam(0.1), 0, shapes))
    assert abstract.params["Dense_0"]["kernel"].shape == (3, 4)


def test_the_same_key_gives_the_same_state():
    a, b = make_state(), make_state()
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
    other = ff.init_state(Net().init, optax.adam(0.1), 1, (X,))
    assert not np.array_equal(a.params["Dense_0"]["kernel"], other.params["Dense_0"]["kernel"])


class Drawn(nn.Module):
    @nn.compact
    def __call__(self, x):
        for init in ("lecun_normal", "he_uniform", "xavier_normal", "orthogonal"):
            x = nn.Dense(70, kernel_init=getattr(nn.initializers, init)())(x)
        return nn.Embed(100, 30)(x.argmax(-1))


@pytest.mark.optimized
@pytest.mark.slow
def test_numbers_are_drawn_as_by_the_module_alone():
    state = ff.init_state(Drawn().init, optax.adam(0.1), 0, (X,))
    init_key, _ = jax.random.split(jax.random.key(0))
    keys = dict(zip(("params", "dropout"), jax.random.split(init_key, 2), strict=True))
    alone = jax.jit(Drawn().init)(keys, X)["params"]
    jax.tree.map(np.testing.assert_array_equal, state.params, alone)


@pytest.mark.slow
def test_a_state_may_be_made_within_another_program():
    key = jax.random.key(0)  # Not made within it.
    # Normal numbers would differ in the last bit between programs that XLA optimizes differently.
    init = nn.Dense(4, kernel_init=nn.initializers.uniform(1.0)).init
    inner = jax.jit(lambda: ff.init_state(init, optax.adam(0.1), key, (X,)))()
    outer = ff.init_state(init, optax.adam(0.1), key, (X,))
    jax.tree.map(np.testing.assert_array_equal, inner.params, outer.params)


@pytest.mark.optimized
@pytest.mark.skipif(
    "xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", ""),
    reason="two programs round alike only when compiled as for users",
)
def test_normal_numbers_and_statistics_may_be_made_within_another_program():
    key = jax.random.key(0)  # Not made within it.
    inner = jax.jit(lambda: ff.init_state(Net().init, optax.adam(0.1), key, (X,)))()
    jax.tree.map(np.testing.assert_array_equal, inner.params, make_state().params)


def test_apply_gradient_is_one_update_of_the_optimizer():
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    state = make_state(optimizer)
    grads = jax.tree.map(jnp.ones_like, state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    after = state.apply_gradient(optimizer, grads)
    jax.tree.map(
        np.testing.assert_array_equal, after.params, optax.apply_updates(state.params, updates)
    )
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, opt_state)
    assert int(after.step) == 1 and after.model_state is state.model_state
    assert after.key is state.key


def test_the_model_state_can_be_replaced_by_an_update():
    state = make_state()
    grads = jax.tree.map(jnp.ones_like, state.params)
    for name in "model_state", "flax_mutables":
        after = state.apply_gradient(optax.adam(0.1), grads, **{name: {"a": 1}})
        assert after.model_state == {"a": 1}
    with pytest.raises(TypeError, match="the same"):
        state.apply_gradient(optax.adam(0.1), grads, model_state={}, flax_mutables={})


def test_further_arguments_reach_the_optimizer():
    optimizer = optax.contrib.reduce_on_plateau(patience=1)
    state = ff.TrainState(jnp.int32(0), jnp.ones(2), optimizer.init(jnp.ones(2)), {}, as_key(0))
    after = state.apply_gradient(optimizer, jnp.ones(2), value=jnp.float32(3))
    assert float(after.opt_state.best_value) == 3.0


class Heated:
    def init(self, params):
        return ()

    def update(self, updates, state, params=None, *, heat=1.0):
        return jax.tree.map(lambda g: -heat * g, updates), state


def update_heated(updates, state, params=None, **more):
    return Heated().update(updates, state, **more)


@pytest.mark.parametrize(
    "optimizer",
    [
        Heated(),
        optax.chain(optax.GradientTransformationExtraArgs(tuple, update_heated), optax.scale(1.0)),
        optax.GradientTransformationExtraArgs(tuple, jax.jit(update_heated)),
    ],
)
def test_arguments_of_an_own_update_reach_it(optimizer):
    state = ff.TrainState(jnp.int32(0), jnp.ones(2), optimizer.init({}), {}, as_key(0))
    np.testing.assert_array_equal(state.apply_gradient(optimizer, 1.0, heat=0.5).params, 0.5)


@pytest.mark.parametrize("key", [5, jax.random.key(5), jax.random.PRNGKey(5)])
def test_keys_of_every_kind_become_typed(key):
    assert as_key(key) == jax.random.key(5)


def test_given_weights_are_not_traced():
    class Given:
        gives_weights = True

        def __call__(self, rngs, x):
            assert not isinstance(x, jax.core.Tracer)
            return {"params": jnp.ones(3)}

    state = ff.init_state(Given(), optax.adam(0.1), 0, (X,))
    np.testing.assert_array_equal(state.params, np.ones(3))


def test_the_names_of_t5x_read_the_fields():
    state = make_state()
    assert state.param_states is state.opt_state and state.flax_mutables is state.model_state
    assert state.params_axes is None and state.flax_mutables_axes is None
    inference = state.for_inference()
    assert inference.params is state.params and not hasattr(inference, "opt_state")
    assert inference.variables.keys() == {"params", "batch_stats"}
    assert inference.flax_mutables is state.model_state and inference.params_axes is None
    for one in (state, inference):
        assert one.replace_flax_mutables({"a": 1}).model_state == {"a": 1}
        assert int(one.replace_step(7).step) == 7
        assert one.replace_params({"w": 1}).params == {"w": 1}


def test_an_inference_state_has_no_optimizer():
    state = ff.InferenceState.create({"params": {"w": jnp.ones(2)}})
    assert int(state.step) == 0 and state.step.dtype == jnp.int32
    with pytest.raises(AttributeError, match="InferenceState has no optimizer state"):
        _ = state.param_states
    with pytest.raises(TypeError, match="InferenceState cannot apply a gradient"):
        state.apply_gradient(optax.sgd(0.1), {"w": jnp.ones(2)})


def test_a_state_is_created_from_variables():
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(Net().init)(keys, X)
    state = ff.TrainState.create(optax.adam(0.1), variables, key=7)
    assert state.key == jax.random.key(7) and int(state.step) == 0
    assert state.params is not variables and state.model_state.keys() == {"batch_stats"}
    for create in (ff.InferenceState.create, lambda v: ff.TrainState.create(optax.sgd(1.0), v)):
        with pytest.raises(ValueError, match="without a collection 'params', got the keys .'w'.:"):
            create({"w": jnp.ones(2)})
        with pytest.raises(ValueError, match="got ndarray"):
            create(np.ones(2))


@pytest.mark.slow
def test_a_state_is_born_where_the_shardings_say():
    mesh = jax.make_mesh((4,), ("data",))
    rows = NamedSharding(mesh, P("data"))

    def split_kernels(state):
        assert isinstance(state.params["Dense_0"]["kernel"], jax.ShapeDtypeStruct)
        return jax.tree.map(
            lambda x: rows if x.shape[:1] == (4,) else NamedSharding(mesh, P()), state
        )

    whole = make_state()
    for shardings in (split_kernels, split_kernels(jax.eval_shape(make_state))):
        state = ff.init_state(Net().init, optax.adam(0.1), 0, (X,), shardings=shardings)
        assert state.opt_state[0].mu["Dense_0"]["bias"].sharding == rows
        assert state.step.sharding.is_fully_replicated
        jax.tree.map(np.testing.assert_allclose, state.params, whole.params)
    one = ff.init_state(Net().init, optax.sgd(0.1), 0, (X,), shardings=NamedSharding(mesh, P()))
    assert len(one.params["Dense_0"]["kernel"].devices()) == 4


def test_given_weights_go_where_the_shardings_say():
    weights = jnp.arange(8.0)
    init, _ = ff.modules.from_function(lambda w, x: w * x, weights)
    rows = NamedSharding(jax.make_mesh((4,), ("data",)), P("data"))

    def shardings(state):
        whole = NamedSharding(rows.mesh, P())
        return jax.tree.map(lambda x: rows if x.shape == (8,) else whole, state)

    state = ff.init_state(init, optax.sgd(0.1), 0, (X,), shardings=shardings)
    assert state.params.sharding == rows
    jax.tree.map(lambda x: x.delete(), state.params)
    np.testing.assert_array_equal(weights, np.arange(8.0))


@pytest.mark.parametrize("value", [0.0, jnp.sin], ids=["number", "function"])
@pytest.mark.parametrize("name", ["learning_rate", "flax_mutable"])
@pytest.mark.parametrize(
    "optimizer",
    [optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), optax.MultiSteps(optax.sgd(1.0), 2)]
    + [Heated()],
)
def test_an_argument_that_an_optimizer_does_not_take_is_refused(optimizer, name, value):
    state = ff.TrainState.create(optimizer, {"params": {"w": jnp.ones(2)}})
    with pytest.raises(ValueError, match=rf"Cannot set {name}(.|\n)*OptimizerDef"):
        state.apply_gradient(optimizer, {"w": jnp.ones(2)}, **{name: value})
