"""Attributes: which changes of an nnx instance are found, and which do not count."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

from flaxfit.modules._nnx_attributes import Attributes


@dataclasses.dataclass
class Config:
    rate: float = 0.1
    sizes: tuple[int, ...] = (1, 2)


@struct.dataclass
class Tables:
    table: jax.Array
    name: str = struct.field(pytree_node=False)


class Settings:
    def __init__(self):
        self.scale, self.table, self.inner = 1, np.arange(3), Config()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.config, self.settings, self.space = Config(), Settings(), types.SimpleNamespace(a=1)
        self.options, self.act, self.training = {"a": [1, 2]}, nnx.relu, False
        self.table, self.tables = jnp.ones(3), nnx.data(Tables(jnp.ones(3), "a"))
        self.scale = self.zero = 0.0

    def __call__(self, x):
        self.seen = nnx.Intermediate((x,))  # As `sow` does.
        return self.layers[1](self.norm(self.layers[0](x)))


def set_(path, value):
    """Sets an attribute or an item of the parts at a path."""

    def change(net):
        *parents, name = path.split(".")
        for each in parents:
            net = net[int(each)] if each.isdigit() else getattr(net, each)
        setattr(net, name, value)

    change.__name__ = f"{path}={value!r:.20}"
    return change


def replace_layer(net):
    net.layers[0] = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def share(net):
    net.other = net.norm


COUNT = [
    set_("layers.1.rate", 0.4),
    set_("layers.0.dtype", jnp.bfloat16),
    lambda net: net.layers[0].kernel.set_metadata(tag="frozen"),
    set_("act", nnx.gelu),
    set_("act", lambda x: x),
    set_("scale", 0),
    set_("scale", False),
    set_("scale", -0.0),
    set_("scale", None),
    set_("training", "yes"),
    set_("new", 1),
    set_("table", 1.0),
    set_("config.rate", 0.2),
    set_("config", Config(sizes=(1, 3))),
    set_("config", Config(sizes=(True, 2))),
    set_("settings.scale", 1.0),
    set_("settings.table", np.ones(3, int)),
    set_("settings.inner.rate", 1),
    set_("space.a", 2),
    set_("tables", Tables(jnp.ones(3), "b")),
    lambda net: net.options["a"].append(3),
    lambda net: net.options.update(a=[1, 2.0]),
    lambda net: net.options.pop("a"),
    lambda net: delattr(net, "zero"),
    lambda net: net.layers.append(nnx.Dropout(0.1)),
    replace_layer,
    share,
]


@pytest.mark.parametrize("change", COUNT, ids=lambda change: change.__name__)
def test_changes_count_once(change):
    net = Net(nnx.Rngs(0))
    attributes = Attributes(net)
    change(net)
    assert [attributes.were_changed() for _ in range(2)] == [True, False]


def update_weights(net):
    nnx.update(net, jax.tree.map(lambda x: x + 1, nnx.state(net, nnx.Param)))


def call(net):
    net.train()
    net(jnp.ones((4, 2)))
    net(jnp.ones((4, 2)))


def new_layer(net):
    net.layers[0] = nnx.Linear(2, 2, rngs=nnx.Rngs(7))


DO_NOT_COUNT = [
    set_("layers.1.rate", float("0.5")),
    set_("layers.1.rngs", nnx.Dropout(0.5, rngs=nnx.Rngs(9)).rngs),
    set_("training", True),
    set_("table", jnp.zeros(3)),
    set_("attention", jnp.zeros(7)),
    set_("tables", Tables(jnp.zeros(3), "a")),
    set_("config", Config()),
    set_("settings.table", np.arange(3)),
    lambda net: net.options.update(a=[1, 2]),
    lambda net: net.eval(),
    update_weights,
    call,
    new_layer,
]


@pytest.mark.parametrize("change", DO_NOT_COUNT, ids=lambda change: change.__name__)
def test_weights_switches_and_what_calls_leave_do_not_count(change):
    net = Net(nnx.Rngs(0))
    attributes = Attributes(net)
    change(net)
    assert not attributes.were_changed()
    arrays = jax.tree.leaves(nnx.state(net, nnx.Not(nnx.RngState)))
    assert {*map(id, attributes.arrays())} >= {*map(id, arrays)}


def test_an_unchanged_module_is_compared_without_splitting_it(monkeypatch):
    net = Net(nnx.Rngs(0))
    attributes = Attributes(net)
    for name in ("split", "state", "iter_graph", "to_flat_state"):
        monkeypatch.setattr(nnx, name, None)
    monkeypatch.setattr("flaxfit.modules._nnx_attributes._walk", None)
    assert not attributes.were_changed()
