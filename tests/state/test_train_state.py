"""TrainState and how it is made."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxfit as ff
from flaxfit.state._train_state import as_key
from flaxfit.tree._plain import as_plain

X = np.ones((2, 3), np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        self.sow("intermediates", "x", x)
        return nn.Dropout(0.5, deterministic=False)(x)


def make_state(optimizer=None):
    return ff.init_state(Net().init, optimizer or optax.adam(0.1), jax.random.key(0), (X,))


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


@pytest.mark.slow
def test_numbers_are_drawn_as_by_the_module_alone():
    state = ff.init_state(Drawn().init, optax.adam(0.1), 0, (X,))
    init_key, _ = jax.random.split(jax.random.key(0))
    keys = dict(zip(("params", "dropout"), jax.random.split(init_key, 2), strict=True))
    alone = jax.jit(Drawn().init)(keys, X)["params"]
    jax.tree.map(np.testing.assert_array_equal, state.params, alone)


def test_a_state_may_be_made_within_another_program():
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
    assert state.apply_gradient(optax.adam(0.1), grads, model_state={"a": 1}).model_state == {
        "a": 1
    }


def test_further_arguments_reach_the_optimizer():
    optimizer = optax.contrib.reduce_on_plateau(patience=1)
    state = ff.TrainState(jnp.int32(0), jnp.ones(2), optimizer.init(jnp.ones(2)), {}, as_key(0))
    after = state.apply_gradient(optimizer, jnp.ones(2), value=jnp.float32(3))
    assert float(after.opt_state.best_value) == 3.0


def test_parts_can_be_replaced():
    state = make_state()
    assert int(state.replace_step(7).step) == 7
    assert state.replace_params({"w": 1}).params == {"w": 1}
    inference = state.for_inference()
    assert inference.params is state.params and not hasattr(inference, "opt_state")
    assert inference.variables.keys() == {"params", "batch_stats"}


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


BF16 = np.dtype(jnp.bfloat16)


def protocol_state(seed=0, shape=(2, 3)):
    """Tuples, int-like keys, bfloat16 and random keys, all in one state."""
    optimizer = optax.chain(optax.adam(0.1), optax.add_noise(0.1, 0.1, jax.random.key(seed)))
    variables = {
        "params": {
            "layers": ({"w": jnp.full(shape, seed, jnp.bfloat16)}, {"w": jnp.full(3, seed)}),
            "0": jnp.full(2, 1.0 + seed),
            "10": jnp.full((), 2.0 + seed),
        },
        "noise": {"key": jax.random.split(jax.random.key(seed), 2), "n": jnp.int32(seed)},
    }
    return ff.TrainState.create(optimizer, variables, key=seed).replace_step(seed)


def words(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same_arrays(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(words(a), words(b))


def is_plain(tree):
    """Whether a tree is of nested dicts with text keys, down to plain arrays."""
    if type(tree) is dict:
        return all(type(key) is str and is_plain(value) for key, value in tree.items())
    return np.asarray(tree).dtype != object


def test_a_state_dict_has_the_layout_of_t5x():
    state = protocol_state(3)
    plain = state.state_dict()
    assert is_plain(plain)
    assert plain.keys() == {"target", "state", "flax_mutables"}
    assert plain["state"].keys() == {"step", "param_states"} and int(plain["state"]["step"]) == 3
    assert plain["target"]["layers"]["1"]["w"] is state.params["layers"][1]["w"]
    adam = plain["state"]["param_states"]["0"]["0"]
    assert adam["mu"]["layers"]["0"]["w"].dtype == BF16
    bare = ff.TrainState.create(optax.sgd(0.1), {"params": {"w": jnp.ones(2)}}).state_dict()
    assert bare.keys() == {"target", "state"} and bare["state"]["param_states"] == {}


@pytest.mark.parametrize("carry", [lambda x: x, np.asarray], ids=["jax", "numpy"])
def test_a_state_dict_restores_the_state(carry):
    state, other = protocol_state(3), protocol_state(5)
    restored = other.restore_state(jax.tree.map(carry, state.state_dict()))
    assert_same_arrays(restored.replace(key=state.key), state)
    assert restored.key is other.key  # as T5X's layout has no place for it


def test_a_state_dict_passes_through_files_of_numpy(tmp_path):
    state = protocol_state(3)
    flat_dict = traverse_util.flatten_dict(state.state_dict(), sep="|")
    np.savez(tmp_path / "state.npz", **flat_dict)
    with np.load(tmp_path / "state.npz") as file:
        assert file["target|layers|0|w"].dtype == "V2"  # NumPy knows no bfloat16
        plain = traverse_util.unflatten_dict(dict(file), sep="|")
    assert_same_arrays(protocol_state(5).restore_state(plain).replace(key=state.key), state)


def test_keys_and_steps_may_be_python_integers_and_wide():
    params = {0: jnp.ones(2), 1: jnp.zeros(2)}
    state = ff.TrainState.create(optax.sgd(0.1), {"params": params})
    assert state.state_dict()["target"].keys() == {"0", "1"}
    ones = np.ones(2, np.float32)
    for step in (4, np.int64(4), np.array(4)):
        restored = state.restore_state({"target": {0: ones, 1: ones}, "state": {"step": step}})
        assert int(restored.step) == 4 and restored.step.dtype == jnp.int32
        np.testing.assert_array_equal(restored.params[1], np.ones(2))


def test_every_difference_is_listed_with_its_path():
    plain = protocol_state(3, shape=(4, 3)).state_dict()
    del plain["target"]["10"], plain["flax_mutables"]["noise"]["key"]
    plain["target"]["extra"] = {"w": np.ones(1)}
    plain["target"]["0"] = np.ones(2, np.int32)
    with pytest.raises(ValueError) as caught:
        protocol_state(5).restore_state(plain)
    for line in (
        "target/10 is missing",
        "flax_mutables/noise/key is missing",
        "target/extra/w is not in the state",
        "target/0 is int32 (2,), not float32 (2,)",
        "target/layers/0/w is bfloat16 (4, 3), not bfloat16 (2, 3)",
    ):
        assert f"\n  {line}" in str(caught.value)


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A node that gives both of its children the same name."""

    def tree_flatten_with_keys(self):
        name = jax.tree_util.GetAttrKey("twin")
        return ((name, 1.0), (name, 2.0)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls()


def test_two_arrays_of_one_name_are_refused():
    with pytest.raises(ValueError, match="these paths occur twice: pair/twin"):
        as_plain({"pair": Twins()})


def test_a_restored_state_stays_where_it_was():
    mesh = jax.make_mesh((4,), ("data",))
    state = ff.TrainState.create(optax.sgd(0.1), {"params": {"w": jnp.ones(8)}})
    sharding = NamedSharding(mesh, P("data"))
    placed = state.replace_params(jax.device_put(state.params, sharding))
    restored = placed.restore_state(state.replace_params({"w": jnp.zeros(8)}).state_dict())
    assert restored.params["w"].sharding == sharding and not np.any(restored.params["w"])


def test_one_state_dict_serves_training_and_inference():
    trained, fresh = protocol_state(3), protocol_state(5)
    inference = fresh.for_inference().restore_state(trained.state_dict())
    assert_same_arrays(inference, trained.for_inference())
    assert inference.state_dict()["state"].keys() == {"step"}
    with pytest.raises(ValueError, match="state/param_states/0/0/count is missing"):
        fresh.restore_state(inference.state_dict())


def test_the_names_of_t5x_read_the_fields():
    state = make_state()
    assert state.param_states is state.opt_state and state.flax_mutables is state.model_state
    assert state.params_axes is None and state.flax_mutables_axes is None
    inference = state.for_inference()
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
    variables = Net().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    state = ff.TrainState.create(optax.adam(0.1), variables, key=7)
    assert state.key == jax.random.key(7) and int(state.step) == 0
    assert state.params is not variables and state.model_state.keys() == {"batch_stats"}
    for create in (ff.InferenceState.create, lambda v: ff.TrainState.create(optax.sgd(1.0), v)):
        with pytest.raises(ValueError, match="without a collection 'params', got the keys .'w'.:"):
            create({"w": jnp.ones(2)})
        with pytest.raises(ValueError, match="got ndarray"):
            create(np.ones(2))


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
        state = ff.init_state(
            Net().init, optax.adam(0.1), jax.random.key(0), (X,), shardings=shardings
        )
        assert state.opt_state[0].mu["Dense_0"]["bias"].sharding == rows
        assert state.step.sharding.is_fully_replicated
        jax.tree.map(np.testing.assert_allclose, state.params, whole.params)
    one = ff.init_state(Net().init, optax.sgd(0.1), 0, (X,), shardings=NamedSharding(mesh, P()))
    assert len(one.params["Dense_0"]["kernel"].devices()) == 4


def test_given_weights_go_where_the_shardings_say():
    weights = jnp.arange(8.0)
    init, _ = ff.modules.from_function(lambda w, x: w * x, weights)
    rows = NamedSharding(jax.make_mesh((4,), ("data",)), P("data"))
    state = ff.init_state(
        init,
        optax.sgd(0.1),
        0,
        (X,),
        shardings=lambda s: jax.tree.map(
            lambda x: rows if x.shape == (8,) else NamedSharding(rows.mesh, P()), s
        ),
    )
    assert state.params.sharding == rows
    jax.tree.map(lambda x: x.delete(), state.params)
    np.testing.assert_array_equal(weights, np.arange(8.0))


def test_a_learning_rate_for_an_optimizer_that_takes_none_is_refused():
    state = ff.TrainState.create(optax.sgd(0.1), {"params": {"w": jnp.ones(2)}})
    with pytest.raises(ValueError, match=r"Cannot set learning_rate(.|\n)*OptimizerDef"):
        state.apply_gradient(optax.sgd(0.1), {"w": jnp.ones(2)}, learning_rate=0.0)
