import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxfit.tree import _digest
from flaxfit.tree._digest import digests

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "int4", "complex64"]


def digest(array):
    return digests({"": array})[""]


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
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("a", "b"))
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


def test_moved_elements_signed_zeros_and_kinds_of_nan_are_told_apart():
    array = np.arange(9, dtype=np.float32).reshape(3, 3)
    others = [array.T, array[::-1], array[[1, 0, 2]], np.roll(array, 1)]
    assert digest(array) not in {digest(np.ascontiguousarray(other)) for other in others}
    assert digest(np.float32(3)) == digest(jnp.float32(3))
    assert digest(np.float32(0.0)) != digest(np.float32(-0.0))
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert digest(nans[:1]) != digest(nans[1:])


def test_digests_of_existing_files_stay_valid():
    arrays = {
        "8ec8bcee133bc4d5": np.arange(24, dtype=np.float32).reshape(4, 6),
        "9c85eb8933f9604f": np.arange(24).reshape(4, 6),
        "e0b296a8fe3ae8e3": np.arange(5).astype(jnp.bfloat16),
        "e001efbe69e505a6": np.array([True, False]),
        "92dc8e0c7fd958e1": np.complex64([1j, 2]),
        "0000000000000000": np.zeros((0, 3), np.int8),
    }
    assert digests(arrays) == {name: name for name in arrays}


class Programs:
    """Records the arrays of each program that is run, and how many were unfinished before it."""

    def __init__(self, monkeypatch):
        self.chunks, self.unfinished = [], []
        self._results, self._run = [], _digest._lanes
        monkeypatch.setattr(_digest, "_lanes", self)

    def __call__(self, arrays):
        self.unfinished.append(sum(not each.is_ready() for each in self._results))
        self.chunks.append(arrays)
        self._results.append(self._run(arrays))
        return self._results[-1]


@pytest.mark.slow
def test_1000_small_sharded_arrays_take_a_few_programs(monkeypatch):
    programs = Programs(monkeypatch)
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    host = {
        str(i): np.full((8 * (i % 2 + 1),), i, np.float32 if i % 3 else np.int32)
        for i in range(1000)
    }
    placed = dict(zip(host, jax.device_put(list(host.values()), rows), strict=True))
    found = digests(placed)
    assert len(programs.chunks) <= 6 and list(found) == list(placed)
    assert max(programs.unfinished) < 2
    assert found == digests(host)
    assert [found[name] for name in ("0", "999")] == [digest(host[n]) for n in ("0", "999")]


def test_the_arrays_of_a_program_are_bounded_in_bytes(monkeypatch):
    programs = Programs(monkeypatch)
    monkeypatch.setattr(_digest, "_MOST_BYTES", 100)
    digests({str(n): np.zeros(10, np.float32) for n in range(5)} | {"large": np.zeros(50)})
    assert [len(chunk) for chunk in programs.chunks] == [2, 2, 1, 1]
