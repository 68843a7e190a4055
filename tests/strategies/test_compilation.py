"""Programs are compiled with arguments that they can take."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import assert_close
from marks import thorough
from strategies import strategies

import flaxfit as ff
from flaxfit.strategies import _compilation

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
Y = X[:, :1]
TABLE = np.arange(-8, 8).reshape(4, 4)


class Quantized(nn.Module):
    dtype: str
    is_param: bool = True

    @nn.compact
    def __call__(self, x):
        def init(*_):
            return jnp.asarray(TABLE, self.dtype)

        table = self.param("q", init) if self.is_param else self.variable("quant", "q", init).value
        return nn.Dense(1)(x @ table.astype(jnp.float32))


def result(module, strategy, **options):
    freeze = "q" if module.is_param else ()
    model = ff.Model(module, optax.adam(0.1), "mse", strategy=strategy, freeze=freeze, **options)
    model.fit(X, Y, epochs=2, batch_size=8, verbose=0)
    return model.predict(X), model.evaluate(X, Y)["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_param"),
    [
        ("virtual replicas", True),
        ("FSDP", False),
        *(thorough(name, True) for name in ("data-parallel", "one device", "FSDP")),
        *(thorough(name, False) for name in ("data-parallel", "one device", "virtual replicas")),
    ],
)
def test_four_bits_train_as_floats_do(name, is_param):
    make = strategies(4)[name]
    if name == "virtual replicas" and not _compilation._takes_sub_byte("int4"):
        with pytest.raises(NotImplementedError, match="leave virtual_replicas out, or upgrade"):
            result(Quantized("int4", is_param), make())
        return
    found = result(Quantized("int4", is_param), make())
    expected = result(Quantized("float32", is_param), make())
    assert_close(found, expected, rtol=1e-5)


def test_virtual_replicas_need_a_jax_that_calls_programs_with_them(monkeypatch):
    monkeypatch.setattr(_compilation, "_takes_sub_byte", lambda dtype: False)
    strategy = ff.DataParallel(jax.devices()[:2], virtual_replicas=2)
    with pytest.raises(NotImplementedError, match=r"arrays of int4, .* keep them as int8"):
        result(Quantized("int4"), strategy)


def test_integers_that_are_not_frozen_are_refused():
    model = ff.Model(Quantized("int8"), optax.adam(0.1), "mse")
    with pytest.raises(ValueError, match=r"Cannot train q \(int8\).*Name their paths in freeze="):
        model.fit(X, Y, verbose=0)
