"""Copies of nnx modules that share their variables, and the modes that are set in them."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flaxfit.modules import from_nnx
from flaxfit.modules._handle import attached
from flaxfit.modules._nnx_modes import copied, unknown_modes, viewed


class Layer(nnx.Module):
    training = None

    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)


class Net(nnx.Module):
    """Holds a layer in many ways, one of them twice, and itself."""

    def __init__(self, rngs):
        self.layer = Layer(rngs)
        self.same = self.layer
        self.nested = nnx.data({"a": [(Layer(rngs), None)], "b": Layer(rngs)})
        self.listed = nnx.List([Layer(rngs)])
        self.named = nnx.Dict(one=Layer(rngs))
        self.scale = jnp.ones(2)
        self.settings = ("relu", {"rate": 0.5})
        self.rngs = rngs
        self.whole = self


def layers_of(net):
    (inner, nothing), *_ = net.nested["a"]
    assert nothing is None
    return [net.layer, inner, net.nested["b"], net.listed[0], net.named["one"]]


def test_a_copy_has_modules_of_its_own_and_the_variables_of_the_other():
    net = Net(nnx.Rngs(0))
    copy = copied(net)[-1]

    assert isinstance(copy, Net) and copy is not net
    assert copy.same is copy.layer and copy.whole is copy
    assert copy.rngs is not net.rngs and copy.settings == net.settings
    assert copy.scale is net.scale
    for new, old in zip(layers_of(copy), layers_of(net), strict=True):
        assert isinstance(new, Layer) and new is not old and new.linear is not old.linear
        assert new.linear.kernel is old.linear.kernel
    assert nnx.graphdef(copy) == nnx.graphdef(net)


def test_the_parts_of_a_copy_are_modules_alone_and_come_before_what_holds_them():
    net = Net(nnx.Rngs(0))
    *parts, copy = copied(net)

    found = [id(part) for _, part in nnx.iter_modules(copy)]
    assert sorted(found) == sorted(map(id, [*parts, copy]))
    order = {id(part): number for number, part in enumerate(parts)}
    assert all(order[id(part.linear)] < order[id(part)] for part in layers_of(copy))


def test_a_copy_made_in_a_trace_of_a_module_made_outside_may_be_changed():
    net = Net(nnx.Rngs(0))

    def rate(x):
        view = viewed(net, {"training": True})
        view.settings = ("gelu", {"rate": 0.1})
        return x * view.settings[1]["rate"]

    assert jax.jit(rate)(jnp.ones(())) == pytest.approx(0.1)
    assert net.settings[0] == "relu"


class Doubling(nnx.Module):
    """Takes some modes by `set_view`, and has others as attributes."""

    def __init__(self):
        self.factor, self.training, self.train = 1, None, "by car"

    @property
    def deterministic(self):
        raise AssertionError("Modes are found without calling anything.")

    def set_view(self, double=None):
        self.factor = 2 if double else 1


def test_modes_are_set_in_the_modules_of_a_copy_that_have_them():
    net = nnx.Dict(first=Doubling(), layer=Layer(nnx.Rngs(0)))
    modes = {"double": True, "training": True, "train": True, "deterministic": True}
    view = viewed(net, modes)

    assert (view["first"].factor, view["first"].training) == (2, True)
    assert view["first"].train == "by car" and view["layer"].training is True
    assert (net["first"].factor, net["first"].training, net["layer"].training) == (1, None, None)
    assert unknown_modes(copied(net), [*modes, "decode"]) == ["train", "deterministic", "decode"]


def test_splitting_a_module_and_writing_back_walk_it_once_each(monkeypatch):
    walks = []

    def count(name, function):
        return lambda *args, **options: (walks.append(name), function(*args, **options))[1]

    for name in ("flatten", "clone", "iter_graph"):
        monkeypatch.setattr(nnx.graphlib, name, count(name, getattr(nnx.graphlib, name)))
    stack = nnx.Sequential(*(nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(3)))
    _, apply = from_nnx(stack, train=True)
    assert walks == ["flatten"]
    variables, handle = from_nnx(stack).init(None), attached(apply)
    assert handle is not None and handle.assign is not None
    walks.clear()
    handle.assign(variables)
    assert walks == ["flatten"]
