"""What a model says of itself."""

import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import flaxfit as ff

X = np.full((8, 3), 0.125, np.float32)


@pytest.mark.slow
def test_the_repr_of_a_model_is_one_line_without_data_or_weights():
    model = ff.Model(nn.Dense(2), optax.sgd(0.1), "mse", metrics=["mae"])
    assert repr(model) == "Model(Dense, loss=mse, metrics=[mae], step=0)"
    model.train_on_batch(X, X[:, :2])
    assert repr(model) == "Model(Dense, loss=mse, metrics=[mae], step=1, 8 params)"
    assert repr(ff.Model(nn.Dense(2))) == "Model(Dense, step=0)"


def test_a_module_with_weights_of_its_own_is_summarized_after_build(capsys):
    model = ff.Model(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="needs inputs before the first fit"):
        model.summary()
    model.build([None, 3])
    model.summary()
    assert "8 params" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(8, 3), (None, 3), [8, 3]])
def test_a_shape_in_place_of_inputs_is_refused_with_what_takes_it(shape):
    with pytest.raises(TypeError, match=r"takes inputs, such as x\[:1\], got the shape .*build"):
        ff.Model(nn.Dense(2)).summary(shape)
