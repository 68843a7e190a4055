"""Memory that is free is given back to the system once a program was compiled, and not later."""

import ctypes

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.strategies import _data_parallel, _free_memory, _sharded
from flaxfit.strategies._free_memory import give_back_free_memory

PIECE, N_PIECES = 4096, 16384


def is_glibc() -> bool:
    """Whether memory is allocated by glibc, and not by what was loaded before it."""
    if _free_memory._trim() is None:
        return False
    own, that = (ctypes.CDLL(name).malloc for name in (None, "libc.so.6"))
    return ctypes.cast(own, ctypes.c_void_p).value == ctypes.cast(that, ctypes.c_void_p).value


@pytest.fixture
def _looked_up_anew():
    _free_memory._trim.cache_clear()
    yield
    _free_memory._trim.cache_clear()


def resident() -> int:
    """The bytes of memory that this process takes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not is_glibc(), reason="memory is not allocated by glibc")
def test_memory_that_is_free_below_what_is_in_use_is_given_back():
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    pieces = [library.malloc(PIECE) for _ in range(N_PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    # Each hundredth stays, so that the heap cannot shrink by itself.
    for i, piece in enumerate(pieces):
        if i % 100:
            library.free(piece)
    before = resident()
    give_back_free_memory()
    given_back = before - resident()
    for piece in pieces[::100]:
        library.free(piece)
    assert given_back > PIECE * N_PIECES / 2


def no_library(name):
    raise TypeError("a name is asked for")


def no_linker(name):
    raise OSError("nothing is linked while a program runs")


@pytest.mark.parametrize("find", [lambda name: object(), no_library, no_linker])
def test_nothing_is_done_where_the_library_knows_no_way(find, monkeypatch, _looked_up_anew):
    monkeypatch.setattr(ctypes, "CDLL", find)
    give_back_free_memory()
    assert _free_memory._trim() is None


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: ff.DataParallel(jax.devices()[:1]),
        lambda: ff.DataParallel(jax.devices()[:2], virtual_replicas=2),
        lambda: ff.Sharded(devices=jax.devices()[:2]),
    ],
)
def test_it_is_given_back_after_compiling_and_not_in_each_step(strategy, monkeypatch):
    times = []
    for module in (_data_parallel, _sharded):
        monkeypatch.setattr(module, "give_back_free_memory", lambda: times.append(1))
    x = np.ones((8, 3), np.float32)
    module = nn.Dense(1)
    task = ff.TrainTask(module.apply, optax.sgd(0.1), "mse", [(x, x[:, :1])] * 4)
    loop = ff.TrainLoop(module.init, task, 0, strategy=strategy(), stdout=False)
    loop.next_step()
    assert times == [1]
    loop.next_step()
    loop.next_step()
    assert times == [1]
