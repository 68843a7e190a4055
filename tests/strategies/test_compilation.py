"""Programs are compiled with arguments they can take, and the compiler's memory is given back."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from marks import thorough

import flaxfit as ff
from flaxfit.strategies import _compilation
from flaxfit.strategies._compilation import give_back_free_memory

PIECE, N_PIECES = 4096, 16384
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
Y = X[:, :1]
TABLE = np.arange(-8, 8).reshape(4, 4)


def is_glibc() -> bool:
    """Whether memory is allocated by glibc, and not by what was loaded before it."""
    if _compilation._malloc_trim() is None:
        return False
    own, that = (ctypes.CDLL(name).malloc for name in (None, "libc.so.6"))
    return ctypes.cast(own, ctypes.c_void_p).value == ctypes.cast(that, ctypes.c_void_p).value


@pytest.fixture
def _looked_up_anew():
    _compilation._malloc_trim.cache_clear()
    yield
    _compilation._malloc_trim.cache_clear()


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
    assert _compilation._malloc_trim() is None


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: ff.DataParallel(jax.devices()[:1]),
        thorough(lambda: ff.DataParallel(jax.devices()[:2], virtual_replicas=2)),
        lambda: ff.Sharded(devices=jax.devices()[:2]),
    ],
)
def test_it_is_given_back_after_compiling_and_not_in_each_step(strategy, monkeypatch):
    times = []
    monkeypatch.setattr(_compilation, "give_back_free_memory", lambda: times.append(1))
    monkeypatch.setattr(_compilation, "shared", lambda lowered, options, compile_it: compile_it())
    x = np.ones((8, 3), np.float32)
    module = nn.Dense(1)
    task = ff.TrainTask(module.apply, optax.sgd(0.1), "mse", [(x, x[:, :1])] * 4)
    loop = ff.TrainLoop(module.init, task, 0, strategy=strategy(), stdout=False)
    loop.next_step()
    assert times == [1]
    loop.next_step()
    loop.next_step()
    assert times == [1]


class Quantized(nn.Module):
    dtype: str
    is_param: bool = True

    @nn.compact
    def __call__(self, x):
        def init(*_):
            return jnp.asarray(TABLE, self.dtype)

        table = self.param("q", init) if self.is_param else self.variable("quant", "q", init).value
        return nn.Dense(1)(x @ table.astype(jnp.float32))


STRATEGIES = {
    "one": lambda: ff.DataParallel(jax.devices()[:1]),
    "data": lambda: ff.DataParallel(jax.devices()[:4]),
    "virtual": lambda: ff.DataParallel(virtual_replicas=4),
    "fsdp": lambda: ff.Sharded.fsdp(jax.devices()[:4]),
}


def result(module, strategy, **options):
    freeze = "q" if module.is_param else ()
    model = ff.Model(module, optax.adam(0.1), "mse", strategy=strategy, freeze=freeze, **options)
    model.fit(X, Y, epochs=2, batch_size=8, verbose=0)
    return model.predict(X), model.evaluate(X, Y)["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "is_param"),
    [
        ("virtual", True),
        ("fsdp", False),
        *(thorough(name, is_param) for name in ("data", "one") for is_param in (False, True)),
        thorough("virtual", False),
        thorough("fsdp", True),
    ],
)
def test_four_bits_train_as_floats_do(strategy, is_param):
    make = STRATEGIES[strategy]
    if strategy == "virtual" and not _compilation._takes_sub_byte("int4"):
        with pytest.raises(NotImplementedError, match="leave virtual_replicas out, or upgrade"):
            result(Quantized("int4", is_param), make())
        return
    found = result(Quantized("int4", is_param), make())
    expected = result(Quantized("float32", is_param), make())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_virtual_replicas_need_a_jax_that_calls_programs_with_them(monkeypatch):
    monkeypatch.setattr(_compilation, "_takes_sub_byte", lambda dtype: False)
    strategy = ff.DataParallel(jax.devices()[:2], virtual_replicas=2)
    with pytest.raises(NotImplementedError, match=r"arrays of int4, .* keep them as int8"):
        result(Quantized("int4"), strategy)


def test_integers_that_are_not_frozen_are_refused():
    model = ff.Model(Quantized("int8"), optax.adam(0.1), "mse")
    with pytest.raises(ValueError, match=r"Cannot train q \(int8\).*Name their paths in freeze="):
        model.fit(X, Y, verbose=0)
