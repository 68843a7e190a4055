from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit import export
from flaxfit.export import InputSpec, JaxModule

pytestmark = pytest.mark.skipif(
    find_spec("flatbuffers") is None, reason="flatbuffers is not installed"
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A method of real numbers, small whole numbers and a pair."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.stablehlo"
    specs = (InputSpec(("n", 2)), InputSpec(("n",), "uint8"), [InputSpec(()), InputSpec(())])
    module = JaxModule({}, lambda p, x, i, ab: x.sum(1) + i + ab[0] - ab[1], input_spec=specs)
    export.save(module, path)
    return export.load(path)


@pytest.mark.slow
def test_inputs_are_cast_to_the_dtypes_of_the_method(mixed):
    assert mixed([[1, 2], [3, 4]], [7, 9], [5, np.float64(3)]).tolist() == [12, 18]
    assert mixed(np.ones((1, 2), bool), jnp.int32([255]), [True, jnp.bfloat16(1)])[0] == 257
    assert jax.grad(lambda a: mixed.apply({}, [[0, 0]], [1], [a, 0]).sum())(1.0) == 1


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (([[1, 2]], [1.0], [0, 0]), TypeError, r"takes uint8, got float64.*astype\('uint8'\)"),
        (([[1, 2]], [256], [0, 0]), ValueError, "takes uint8, which cannot hold .* 256 to 256"),
        (([["a", "b"]], [1], [0, 0]), TypeError, "takes float32, got <U1"),
        ((np.ones((0, 2)), np.ones(0, int), [0, 0]), ValueError, r"1 or more, .* \(0, 2\)"),
        (([[1, 2]], [1]), ValueError, r"takes float32\[n, 2\], uint8\[n\].*, got \("),
        ((np.ones((1, 2)), [1], (0, 0)), ValueError, r"got \('float64\[1, 2\]'"),
        ((np.ones((2, 4)), [1, 1], [0, 0]), ValueError, r"\(n, 2\).*\(2, 4\)"),
    ],
)
def test_inputs_that_a_method_does_not_take_are_named(mixed, inputs, error, message):
    with pytest.raises(error, match=message):
        mixed(*inputs)


@pytest.mark.slow
def test_other_weights_and_methods_can_be_used(path):
    module = JaxModule(
        {"w": np.float32(2)},
        {"double": lambda p, x: p["w"] * x, "both": lambda p, *, x, y: {"sum": x + p["w"] * y}},
        input_spec={"double": InputSpec(("b",)), "both": dict.fromkeys("xy", InputSpec(("b",)))},
    )
    export.save(module, path)
    loaded = export.load(path)
    one = np.ones(2, np.float32)
    assert loaded.methods["both"](x=one, y=one)["sum"].tolist() == [3, 3]
    assert loaded.apply({"w": np.float32(5)}, one, method="double").tolist() == [5, 5]
    with pytest.raises(ValueError, match="Name one of the methods.*double, both"):
        loaded(one)
    with pytest.raises(ValueError, match="no method 'triple', only double, both"):
        loaded.apply({}, one, method="triple")
