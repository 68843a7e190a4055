import jax
import jax.numpy as jnp
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
    lines = summarize(make(), INPUTS).splitlines()
    assert lines[0] in ("Linen · 20 params", "Nnx · 20 params")
    cells = [line.split() for line in lines]
    assert ["(2,", "5)", "20", "trained"] in [row[-4:] for row in cells]
    assert lines[-1] == "20 trained · 0 frozen"
    assert max(map(len, lines)) <= 80


def test_layers_within_layers_are_indented_and_their_parameters_counted_once():
    class Inner(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 4, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Inner(rngs)])
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.out = nnx.Linear(4, 4, rngs=rngs)
            self.scale = nnx.Param(jnp.ones(1))

        def __call__(self, x):
            return self.out(self.norm(self.blocks[0](x)))[:, :2] * self.scale[...]

    text = summarize(Net, INPUTS, freeze=["blocks/.*"], count_flops=lambda *call: 1500.0)
    assert text == (
        "Net · 41 params\n\n"
        "layer                output  params\n"
        "Net                  (2, 2)       1  trained\n"
        "  blocks/0 (Inner)   (2, 4)\n"
        "    linear (Linear)  (2, 4)      12  frozen\n"
        "  norm (BatchNorm)   (2, 4)       8  trained\n"
        "  out (Linear)       (2, 4)      20  trained\n\n"
        "29 trained · 12 frozen · 8 in batch_stats\n"
        "forward pass: 1.5 kFLOP for a batch of 2"
    )


def test_a_layer_is_shown_once_however_often_it_is_called_and_one_that_is_not_called_is_counted():
    class Twice(nn.Module):
        def setup(self):
            self.shared, self.embed = nn.Dense(3), nn.Embed(5, 3)

        def __call__(self, x):
            return self.embed.attend(self.shared(self.shared(x)))

    lines = summarize(Twice(), INPUTS).splitlines()
    assert lines[0] == "Twice · 27 params"
    assert [line.split()[0] for line in lines[3:-2]] == ["Twice", "shared"]
    assert lines[3].endswith("(2, 5)      15  trained") and lines[4].split()[-2] == "12"


def test_long_names_and_shapes_are_cut_to_80_columns():
    class Long(nn.Module):
        @nn.compact
        def __call__(self, x):
            outputs = [nn.Dense(3, name=f"layer_{'x' * 70}_{i}")(x) for i in range(2)]
            return {str(i): outputs[0] for i in range(9)}

    lines = summarize(Long(), INPUTS).splitlines()
    assert max(map(len, lines)) == 80
    assert sum("…" in line for line in lines) == 3


def test_classes_are_as_before_also_after_a_call_that_fails():
    class Wrong(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 5, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    before = vars(nnx.Linear)["__call__"], vars(Wrong)["__call__"]
    with pytest.raises(ValueError, match="its Linear at layer"):
        summarize(Wrong, INPUTS)
    assert (vars(nnx.Linear)["__call__"], vars(Wrong)["__call__"]) == before
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
    assert "· 20 params" in summarize(model, INPUTS)
    assert model.rngs.default.count[...] == count
