"""What is read is what was written, bit for bit, with and without a template."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import SMALL, abstract, fill, make_checkpoint, make_state, read, replicated
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loops import assert_identical

from flaxfit.checkpoints import CheckpointFileWriter, list_steps, restore, save


@pytest.mark.parametrize("which", [None, "abstract", "replicated"])
def test_a_state_comes_back_bit_for_bit(tmp_path, which):
    state = make_state(3)
    save(tmp_path, replicated(state))
    template = {None: state, "abstract": abstract(state)}.get(which, replicated(state))
    found = read(tmp_path, template)
    assert_identical(found.state, state)
    assert found.step == 3
    kernel = found.state.params["Dense_0"]["kernel"]
    assert len(kernel.devices()) == (4 if which == "replicated" else 1)


def test_a_restored_state_without_a_place_can_go_to_any_device(tmp_path):
    fill(tmp_path, 1)
    state = restore(tmp_path, abstract(SMALL))
    assert not state.params["w"].committed
    assert not state.key.committed


def test_a_restored_key_draws_the_same_numbers(tmp_path):
    state = SMALL.replace(key=jax.random.key(7, impl="rbg"))
    save(tmp_path, state)
    found = restore(tmp_path, abstract(state))
    np.testing.assert_array_equal(
        jax.random.normal(found.key, (3,)), jax.random.normal(state.key, (3,))
    )
    with pytest.raises(ValueError, match="key is key<rbg> .* on disk, key<fry> .* here"):
        restore(tmp_path, SMALL)


def test_a_restored_state_may_be_donated_and_the_template_stays(tmp_path):
    fill(tmp_path, 1)
    found = restore(tmp_path, SMALL)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(found.params["w"]))
    np.testing.assert_array_equal(SMALL.params["w"], np.arange(4.0))
    np.testing.assert_array_equal(restore(tmp_path, SMALL).params["w"], np.arange(4.0) + 1)


def test_a_sharded_state_is_restored_on_other_devices(tmp_path):
    devices = np.array(jax.devices())
    wide = NamedSharding(Mesh(devices, ("d",)), PartitionSpec("d"))
    narrow = NamedSharding(Mesh(devices[:2], ("d",)), PartitionSpec(None, "d"))
    values = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    save(tmp_path, SMALL.replace(params={"w": jax.device_put(values, wide)}))
    template = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=narrow)
    found = restore(tmp_path, SMALL.replace(params={"w": template})).params["w"]
    assert found.sharding == narrow
    np.testing.assert_array_equal(found, values)


@pytest.mark.slow
def test_unusual_leaves_survive(tmp_path):
    params = {
        "empty": jnp.zeros((0, 3)),
        "int4": jnp.arange(4, dtype=jnp.int4),
        "float8": jnp.ones(3, jnp.float8_e4m3fn),
        "wide": np.arange(3, dtype=np.int64) * 2**40,
        "number": 3,
        "bool": np.array([True, False]),
        "a.b ../../é~": jnp.ones(2),
        "a": {"b": jnp.zeros(2)},
    }
    state = SMALL.replace(params=params)
    save(tmp_path, state)
    found = restore(tmp_path, state).params
    assert found["number"] == 3 and isinstance(found["number"], int)
    assert isinstance(found["wide"], np.ndarray)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype
    plain = restore(tmp_path).params
    np.testing.assert_array_equal(plain["wide"], params["wide"])
    assert plain["empty"].shape == (0, 3)


def test_two_leaves_of_one_path_are_refused(tmp_path):
    state = SMALL.replace(params={"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})
    with pytest.raises(ValueError, match="params/a/b"):
        save(tmp_path, state)


def test_everything_beside_the_state_comes_back(tmp_path):
    confusion = np.array([[3, 1], [0, 4]], np.float32)
    checkpoint = make_checkpoint(2, loss=0.25, val_loss=float("inf"), confusion=confusion)
    with CheckpointFileWriter(tmp_path) as writer:
        writer.save(
            checkpoint.replace(
                data_state={"epoch": 1, "next": [3, None]},
                n_completed_steps=2,
                n_examples=7,
                sums={"float32": np.array([[0.1, 2], [1e-9, np.inf]], np.float32)},
            ),
            history={"loss": [1.0, 0.25]},
            callback_states={"EarlyStopping": {"waited": 2}},
        )
    found = read(tmp_path)
    np.testing.assert_array_equal(found.metrics.pop("confusion"), confusion)
    assert found.metrics == {"loss": 0.25, "val_loss": float("inf")}
    assert found.data_state == {"epoch": 1, "next": [3, None]}
    assert (found.n_completed_steps, found.n_examples) == (2, 7)
    assert_identical(found.sums, {"float32": np.float32([[0.1, 2], [1e-9, np.inf]])})
    assert found.history == {"loss": [1.0, 0.25]}
    assert found.callback_states == {"EarlyStopping": {"waited": 2}}
    assert found.versions["jax"] == jax.__version__
    assert {"flax", "optax", "orbax-checkpoint", "flaxfit"} <= found.versions.keys()
    assert found.path == tmp_path / "2"


def test_without_a_template_the_optimizer_state_is_plain(tmp_path):
    state = make_state(1)
    save(tmp_path, state)
    found = restore(tmp_path)
    assert_identical(found.params, state.params)
    assert_identical(found.model_state, state.model_state)
    assert type(found.opt_state) is dict
    np.testing.assert_array_equal(
        found.opt_state["0"]["mu"]["Dense_1"]["kernel"], state.opt_state[0].mu["Dense_1"]["kernel"]
    )
    inference = restore(tmp_path, abstract(state.for_inference()))  # It reads its own fields only.
    assert_identical(inference, state.for_inference())


def test_a_model_that_differs_is_refused_and_the_checkpoint_stays(tmp_path):
    save(tmp_path, make_state(1))
    with pytest.raises(ValueError) as error:
        restore(tmp_path, make_state(1, width=6, optimizer=optax.sgd(0.1)))
    message = str(error.value)
    assert "params/Dense_0/kernel is bfloat16 (3, 5) on disk, bfloat16 (3, 6) here" in message
    assert "opt_state/0/mu/Dense_0/kernel is on disk, not here" in message
    assert list_steps(tmp_path) == [1]


def test_a_dtype_is_never_cast(tmp_path):
    fill(tmp_path, 1)
    with pytest.raises(ValueError, match=r"params/w is float32 \(4,\) on disk, bfloat16 \(4,\)"):
        restore(tmp_path, SMALL.replace(params={"w": jnp.zeros(4, jnp.bfloat16)}))
