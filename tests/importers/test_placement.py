"""Imports put each array straight into its sharding: no device ever holds all of it."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from whole_arrays import WholeArrays

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileReader
from flaxfit.importers import fill, load, restore_from_t5

SHAPE = (512, 128)  # Large enough for `fsdp` to split it.
KERNEL = np.arange(512 * 128, dtype=np.float32).reshape(SHAPE)
SIZE = KERNEL.size


@pytest.fixture
def rows():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return NamedSharding(mesh, PartitionSpec("data"))


def zeros(sharding, dtype=np.float32):
    return jax.device_put(np.zeros(SHAPE, dtype), sharding)


def write(path):
    if path.suffix == ".msgpack":
        path.write_bytes(serialization.to_bytes({"kernel": KERNEL}))
    elif path.suffix == ".npz":
        np.savez(path, kernel=KERNEL.astype(np.float64))
    else:
        ff.checkpoints.save_weights(path, {"kernel": KERNEL})
    return path


def assert_placed(array, sharding, spy):
    assert spy.n_placed and not spy.found
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, KERNEL)


@pytest.mark.parametrize("suffix", [".safetensors", ".msgpack", ".npz"])
@pytest.mark.parametrize("is_described", [False, True], ids=["array", "description"])
def test_fill_puts_arrays_straight_into_their_sharding(
    suffix, is_described, rows, tmp_path, monkeypatch
):
    source = load(write(tmp_path / f"weights{suffix}"))
    target = zeros(rows)
    if is_described:
        target = jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=rows)
    spy = WholeArrays(monkeypatch, SIZE)
    assert_placed(fill({"kernel": target}, source)["kernel"], rows, spy)


def test_load_weights_puts_arrays_straight_into_their_sharding(rows, tmp_path, monkeypatch):
    path, target = write(tmp_path / "weights.safetensors"), {"kernel": zeros(rows)}
    spy = WholeArrays(monkeypatch, SIZE)
    assert_placed(ff.checkpoints.load_weights(path, target)["kernel"], rows, spy)


def test_a_t5_checkpoint_goes_straight_into_its_sharding(rows, tmp_path, monkeypatch):
    path = tmp_path / "t5.npz"
    np.savez(path, **{"shared/embedding": KERNEL, "global_step": np.int64(7)})
    params = {"token_embedder": {"embedding": zeros(rows)}}
    state = ff.TrainState.create(optax.sgd(0.1), {"params": params})
    spy = WholeArrays(monkeypatch, SIZE)
    restored = restore_from_t5(state, path)
    assert_placed(restored.params["token_embedder"]["embedding"], rows, spy)


def test_a_plain_dict_goes_straight_into_its_sharding(rows, monkeypatch):
    state = ff.TrainState.create(optax.sgd(0.1), {"params": {"kernel": zeros(rows)}})
    plain = jax.tree.map(np.asarray, state.state_dict())
    plain["target"]["kernel"] = KERNEL
    spy = WholeArrays(monkeypatch, SIZE)
    assert_placed(state.restore_state(plain).params["kernel"], rows, spy)


def test_a_checkpoint_is_restored_straight_into_its_sharding(rows, tmp_path, monkeypatch):
    def make(kernel):
        return ff.TrainState.create(optax.sgd(0.1), {"params": {"kernel": kernel}})

    ff.checkpoints.save(tmp_path, make(KERNEL))
    target = make(zeros(rows))
    spy = WholeArrays(monkeypatch, SIZE)
    found = CheckpointFileReader(tmp_path).read(target)
    spy.look()
    assert not spy.found and found.state.params["kernel"].sharding == rows
    np.testing.assert_array_equal(found.state.params["kernel"], KERNEL)


@pytest.mark.slow
@pytest.mark.parametrize("has_state", [False, True], ids=["fresh", "trained"])
def test_the_weights_of_a_sharded_model_go_straight_into_place(has_state, tmp_path, monkeypatch):
    x = np.ones((8, 512), np.float32)

    def make():
        strategy = ff.Sharded(fsdp=True)
        return ff.Model(nn.Dense(128), optax.adam(0.1), "mse", strategy=strategy)

    variables = {"params": {"kernel": KERNEL, "bias": np.zeros(128, np.float32)}}
    path = tmp_path / "weights.npz"
    np.savez(path, **{name: np.asarray(leaf) for name, leaf in variables["params"].items()})
    model = make()
    if has_state:
        model.build(x)
    spy = WholeArrays(monkeypatch, SIZE)
    model.load_weights(path)
    model.build(x)
    params, sharding = model.state.params, model.state.params["kernel"].sharding
    assert_placed(params["kernel"], sharding, spy)
    assert not sharding.is_fully_replicated
    assert model.state.opt_state[0].mu["kernel"].sharding == sharding
    model.set_weights([np.zeros(128), KERNEL.astype(float)])
    assert_placed(model.state.params["kernel"], sharding, spy)
