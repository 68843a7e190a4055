import jax
import pytest
from flax import linen as nn
from flax import nnx

from flaxfit.modules import summarize

INPUTS = (jax.ShapeDtypeStruct((2, 3), "float32"),)


class Linen(nn.Module):
    """Has a switch to be set."""

    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(5)(x))


class Nnx(nnx.Module):
    """Has a switch to be set."""

    def __init__(self, *, rngs):
        self.layer = nnx.Linear(3, 5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, *, train):
        return self.dropout(self.layer(x), deterministic=not train)


@pytest.mark.parametrize(
    "make", [Linen, lambda: Nnx, lambda: Nnx(rngs=nnx.Rngs(0))], ids=["linen", "class", "nnx"]
)
def test_a_summary_counts_the_parameters_of_each_layer(make):
    table = summarize(make(), INPUTS)
    assert "20 (80 B)" in table
    assert "float32[2,5]" in table


def test_functions_have_no_layers_to_show():
    with pytest.raises(TypeError, match="not of functions"):
        summarize((len, len), INPUTS)


def test_a_summary_of_a_module_that_keeps_its_streams_draws_nothing_of_them():
    class Keeping(nnx.Module):
        def __init__(self, rngs):
            self.rngs = rngs
            self.layer = nnx.Linear(3, 5, rngs=rngs)
            self.training = True

        def __call__(self, x):
            return self.layer(x + self.rngs.normal(x.shape) if self.training else x)

    model = Keeping(nnx.Rngs(0))
    count = int(model.rngs.default.count[...])
    assert "20 (80 B)" in summarize(model, INPUTS)
    assert model.rngs.default.count[...] == count
