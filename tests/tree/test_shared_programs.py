"""Equal programs are compiled once in a process; whatever differs is never shared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.tree import _shared_programs
from flaxfit.tree._shared_programs import key_of, shared

pytestmark = pytest.mark.optimized  # For both versions of JAX, whose private names are read.
X = np.ones((2, 3), np.float32)


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """The programs that are kept: none yet."""
    kept = type(_shared_programs._programs)()
    monkeypatch.setattr(_shared_programs, "_programs", kept)
    return kept


def lowered(function, *arguments, **options):
    return jax.jit(function, **options).lower(*(arguments or (X,)))


def scaled(constant):
    return lambda x: x * constant


def program_of(function):
    it = lowered(function)
    return shared(it, None, it.compile)


def test_functions_that_lower_to_the_same_share_a_program():
    array = np.arange(3, dtype=np.float32)
    first, second = program_of(scaled(array)), program_of(scaled(array.copy()))
    assert first is second
    np.testing.assert_array_equal(second(X), X * array)


def test_closed_over_arrays_that_differ_in_one_bit_do_not():
    array = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    other = array.copy()
    other[500, 1] = np.nextafter(other[500, 1], np.float32(9999))
    functions = [lambda x, a=a: x.sum(0) + a for a in (array, other)]
    assert program_of(functions[0]) is not program_of(functions[1])
    for function, expected in zip(functions, (array, other), strict=True):
        np.testing.assert_array_equal(program_of(function)(X), expected + 2)


TWO = np.float32(2)
BASE = lowered(scaled(2.0))
DIFFERENT = {
    "the last bit of a constant": lambda: lowered(scaled(float(np.nextafter(TWO, TWO + 1)))),
    "nan": lambda: lowered(scaled(float("nan"))),
    "operation": lambda: lowered(lambda x: x / 2.0),
    "shape": lambda: lowered(scaled(2.0), X[:1]),
    "dtype": lambda: lowered(scaled(2), X.astype(np.int32)),
    "donated": lambda: lowered(scaled(2.0), donate_argnums=0),
    "names of inputs": lambda: lowered(lambda x: x["a"] * 2.0, {"a": X}),
    "names of outputs": lambda: lowered(lambda x: {"a": x * 2.0}),
    "device": lambda: lowered(scaled(2.0), jax.device_put(X, jax.devices()[1])),
    "a committed device": lambda: lowered(scaled(2.0), jax.device_put(X, jax.devices()[0])),
    "options of the compiler": lambda: lowered(
        scaled(2.0), compiler_options={"xla_backend_optimization_level": 1}
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_what_differs_is_not_shared(difference):
    assert key_of(BASE, None) is not None
    assert key_of(BASE, None) == key_of(lowered(scaled(2.0)), None)
    assert key_of(BASE, None) != key_of(DIFFERENT[difference](), None)


def test_the_types_of_results_are_told_apart_where_the_text_is_the_same():
    weak, strong = lowered(lambda x: 1.0), lowered(lambda x: jnp.float32(1))
    assert weak.as_text() == strong.as_text()
    assert key_of(weak, None) != key_of(strong, None)


def test_options_and_settings_count():
    assert key_of(BASE, {"xla_backend_optimization_level": 1}) != key_of(BASE, None)
    before = key_of(BASE, None)
    with_nans = not jax.config.jax_debug_nans
    jax.config.update("jax_debug_nans", with_nans)
    try:
        assert key_of(BASE, None) != before
    finally:
        jax.config.update("jax_debug_nans", not with_nans)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((2, 3), "float32"), x),
        lambda x: (jax.debug.print("{}", x), x)[1],
        lambda x: (jax.debug.callback(print, x, ordered=True), x)[1],
        lambda x: jax.ffi.ffi_call("unknown", jax.ShapeDtypeStruct((2, 3), "float32"))(x),
    ],
)
def test_calls_of_what_the_text_does_not_hold_are_never_shared(function):
    assert key_of(lowered(function), None) is None


def test_equal_programs_call_back_functions_of_their_own():
    def result_of(number):
        shape = jax.ShapeDtypeStruct((2, 3), "float32")
        function = lowered(lambda x: jax.pure_callback(lambda x: np.full_like(x, number), shape, x))
        return shared(function, None, function.compile)(np.zeros((2, 3), np.float32))

    for number in (1, 2, 1):
        np.testing.assert_array_equal(result_of(number), number)


def test_arguments_that_are_not_used_count_with_their_shapes():
    def key_with(*shapes):
        arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        return key_of(jax.jit(lambda x, unused: x + 1).lower(1.0, arrays), None)

    assert key_with((2,), (3,)) == key_with((2,), (3,)) is not None
    assert key_with((2,), (3,)) != key_with((3,), (2,))


def test_linear_algebra_and_random_bits_are_shared():
    def function(x):
        return jnp.linalg.qr(x)[0] + jax.random.normal(jax.random.key(0), (2, 1))

    assert key_of(lowered(function), None) is not None


def test_a_jax_that_names_its_parts_otherwise_shares_nothing():
    class Unknown:
        def compile(self):
            return "a program"

    assert key_of(Unknown(), None) is None  # pyright: ignore[reportArgumentType]
    assert shared(Unknown(), None, Unknown().compile) == "a program"  # pyright: ignore[reportArgumentType]


def test_the_least_recently_used_programs_go(programs, monkeypatch):
    monkeypatch.setattr(_shared_programs, "_MOST", 2)
    first = program_of(scaled(1.5))
    program_of(scaled(2.5))
    assert program_of(scaled(1.5)) is first
    program_of(scaled(3.5))
    assert program_of(scaled(1.5)) is first and len(programs) == 2


def test_large_constants_are_not_kept(programs, monkeypatch):
    monkeypatch.setattr(_shared_programs, "_LONGEST", 1000)
    program_of(scaled(np.random.default_rng(0).normal(size=(2000, 1)).astype(np.float32)[:, None]))
    assert not programs
