"""Trees as plain nested dicts, and back, with every difference listed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from loops import assert_identical

import flaxfit as ff
from flaxfit.tree._plain import as_plain

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
    assert_identical(restored.replace(key=state.key), state)
    assert restored.key is other.key  # as T5X's layout has no place for it


def test_a_state_dict_passes_through_files_of_numpy(tmp_path):
    state = protocol_state(3)
    flat_dict = traverse_util.flatten_dict(state.state_dict(), sep="|")
    np.savez(tmp_path / "state.npz", **flat_dict)
    with np.load(tmp_path / "state.npz") as file:
        assert file["target|layers|0|w"].dtype == "V2"  # NumPy knows no bfloat16
        plain = traverse_util.unflatten_dict(dict(file), sep="|")
    assert_identical(protocol_state(5).restore_state(plain).replace(key=state.key), state)


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
    assert_identical(inference, trained.for_inference())
    assert inference.state_dict()["state"].keys() == {"step"}
    with pytest.raises(ValueError, match="state/param_states/0/0/count is missing"):
        fresh.restore_state(inference.state_dict())
