import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxfit.checkpoints._digest import digest

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "int4", "complex64"]


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "int64"])
def test_the_digest_of_an_array_is_the_same_on_the_host_and_on_a_device(dtype):
    array = np.arange(24).reshape(4, 6).astype(jnp.dtype(dtype))
    with jax.enable_x64(True):
        placed = jnp.asarray(array)
        assert placed.dtype == array.dtype
        assert digest(placed) == digest(array)
    assert digest(array) == digest(np.asfortranarray(array))


def test_the_digest_does_not_depend_on_the_sharding():
    array = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    specs = [(), ("a",), (None, "b"), ("b", "a"), (("a", "b"),)]
    placed = [jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))) for spec in specs]
    assert {digest(each) for each in placed} == {digest(array)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_every_single_bit_counts(dtype):
    array = np.zeros(6, jnp.dtype(dtype))
    seen = {digest(array)}
    for bit in range(8 * array.nbytes):
        changed = array.copy()
        changed.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        seen.add(digest(changed))
    assert len(seen) == 1 + 8 * array.nbytes


def test_random_damage_is_never_missed():
    rng = np.random.default_rng(0)
    array = rng.normal(size=(16, 16)).astype(np.float32)
    sound = digest(array)
    for _ in range(500):
        damaged = array.copy()
        for position in rng.choice(damaged.nbytes, size=rng.integers(1, 4), replace=False):
            damaged.reshape(-1).view(np.uint8)[position] ^= 1 << rng.integers(8)
        assert digest(damaged) != sound


def test_moved_elements_are_noticed():
    array = np.arange(9, dtype=np.float32).reshape(3, 3)
    others = [array.T, array[::-1], array[[1, 0, 2]], np.roll(array, 1)]
    assert digest(array) not in {digest(np.ascontiguousarray(other)) for other in others}


def test_signed_zeros_and_kinds_of_nan_are_told_apart():
    assert digest(np.float32(0.0)) != digest(np.float32(-0.0))
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert digest(nans[:1]) != digest(nans[1:])


def test_scalars_and_empty_arrays_have_digests():
    assert digest(np.float32(3)) == digest(jnp.float32(3))
    assert len(digest(np.zeros((0, 3), np.float32))) == 16
