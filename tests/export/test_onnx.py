import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from flaxfit.export import InputSpec, JaxModule, save_onnx
from flaxfit.export import _onnx as onnx_format

onnxruntime: Any = None


@pytest.fixture(scope="module", autouse=True)
def _onnx():
    # Where these tests are run, as they take seconds.
    global onnxruntime
    pytest.importorskip("jax2onnx", reason="jax2onnx is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "net.onnx"


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_onnxruntime_computes_the_same(module, path, apply, variables, x, capsys):
    report = save_onnx(module, path)
    run = session(path)
    for n in (1, 4):
        (got,) = run.run(["outputs"], {"inputs": x[:n]})
        np.testing.assert_allclose(got, apply(variables, x[:n]), rtol=1e-4, atol=1e-6)
    assert report.max_error < 1e-5
    assert str(report) in capsys.readouterr().err
    assert run.get_inputs()[0].shape == ["batch", 3]


@pytest.mark.slow
def test_a_convolutional_net_goes_through(path):
    class Conv(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.max_pool(nn.gelu(nn.Conv(4, (3, 3))(x)), window_shape=(2, 2), strides=(2, 2))
            return nn.Dense(2)(x.mean((1, 2)))

    x = np.random.default_rng(0).standard_normal((2, 8, 8, 1)).astype(np.float32)
    variables = jax.jit(Conv().init)(jax.random.key(0), x)
    save_onnx(JaxModule(variables, Conv().apply, input_spec=InputSpec(("batch", 8, 8, 1))), path)
    (got,) = session(path).run(None, {"inputs": x})
    np.testing.assert_allclose(got, jax.jit(Conv().apply)(variables, x), rtol=1e-4, atol=1e-5)


def test_nested_integers_and_several_outputs_have_names(path):
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    module = JaxModule(
        {"table": table},
        {"look_up": lambda p, x: {"rows": p["table"][x["ids"]], "next": x["ids"] + 1}},
        input_spec={"look_up": ({"ids": InputSpec(("b", "t"), "int32")},)},
    )
    save_onnx(module, path)
    rows, following = session(path).run(["rows", "next"], {"ids": np.array([[3, 1]], np.int32)})
    assert rows.tolist() == table[[[3, 1]]].tolist()
    assert following.tolist() == [[4, 2]]


def test_one_of_several_methods_is_chosen(path):
    module = JaxModule(
        2.0,
        {"double": lambda p, x: p * x, "half": lambda p, x: x / p},
        input_spec=InputSpec(("n",)),
    )
    with pytest.raises(ValueError, match="pass method=, one of double, half"):
        save_onnx(module, path)
    save_onnx(module, path, method="half")
    assert session(path).run(None, {"inputs": np.float32([4])})[0].tolist() == [2]


def test_a_file_that_differs_from_its_source_is_removed(module, path, monkeypatch):
    right = onnx_format._as_function

    def wrong(*arguments):
        run = right(*arguments)
        return lambda *inputs: run(*inputs) + 1

    monkeypatch.setattr(onnx_format, "_as_function", wrong)
    with pytest.raises(ValueError, match="Nothing was written"):
        save_onnx(module, path)
    assert list(path.parent.iterdir()) == []


def test_what_onnx_cannot_express_is_said_in_words(path):
    module = JaxModule(1.0, lambda p, x: jnp.linalg.svd(x), input_spec=InputSpec((3, 3)))
    with pytest.raises(ValueError, match="Cannot write .* as ONNX"):
        save_onnx(module, path)


def test_without_jax2onnx_the_extra_is_named(module, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(ImportError, match=r'pip install "flaxfit\[onnx\]"'):
        save_onnx(module, path)
