"""Modules where functions are expected, and the module of a trained state."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from flaxfit.modules import _switch, from_nnx, train_and_eval
from flaxfit.modules._handle import is_module
from flaxfit.modules._switch import as_apply, as_init, handle_of

X = np.ones((2, 3), np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.layer(x))


class Linen(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=not self.train)(nn.Dense(2)(x))


def test_modules_and_classes_of_nnx_are_known_from_functions():
    assert is_module(Linen()) and is_module(Net(nnx.Rngs(0))) and is_module(Net)
    assert not any(map(is_module, (Linen, Linen().apply, lambda rngs: Net(rngs), None, 3)))


@pytest.mark.parametrize(
    "make",
    [Net, lambda rngs: Net(rngs), Net(nnx.Rngs(0)), Linen()],
    ids=["class", "factory", "instance", "linen"],
)
def test_the_module_of_a_state_holds_its_weights_in_evaluation_mode(make):
    (init, apply), (_, evaluate) = train_and_eval(make)
    variables = init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, X)
    for function in (apply, make.apply) if isinstance(make, Linen) else (apply,):
        module = handle_of(function).merged(variables)
        assert isinstance(module, Net | Linen) and module is not make
        np.testing.assert_array_equal(module(X), evaluate(variables, X))
    assert handle_of(lambda v, x: x) is None and handle_of(None) is None


def test_weights_are_written_into_an_instance_alone():
    net = Net(nnx.Rngs(0))
    assign = handle_of(from_nnx(net).apply).assign
    assert assign is not None
    assign(jax.tree.map(jnp.ones_like, from_nnx(net).init(None)))
    np.testing.assert_array_equal(net.layer.kernel[...], 1)
    assert handle_of(from_nnx(Net).apply).assign is None


def test_a_module_given_to_a_task_and_a_loop_is_split_once(monkeypatch):
    net = Net(nnx.Rngs(0))
    apply = as_apply("TrainTask", net, train=True)
    n_splits = []
    monkeypatch.setattr(_switch, "functions_of", lambda *_, **__: n_splits.append(1))
    init = as_init("TrainLoop", net, apply)
    np.testing.assert_array_equal(init(None)["params"]["layer"]["kernel"], net.layer.kernel[...])
    assert n_splits == []


def test_what_is_neither_a_module_nor_a_function_is_refused():
    with pytest.raises(TypeError, match="TrainTask needs a module or an apply function, got 3"):
        as_apply("TrainTask", 3, train=True)
    with pytest.raises(
        TypeError, match=r"needs a module or its init, got Linen: pass Linen\(...\)"
    ):
        as_init("TrainLoop", Linen)


@pytest.mark.slow
def test_the_functions_of_an_instance_do_not_keep_it():
    net = Net(nnx.Rngs(0))
    apply, arrays = from_nnx(net, train=True).apply, weakref.ref(net)
    handle = handle_of(apply)
    assert handle.module() is net and handle.paths is not None
    del net
    gc.collect()
    assert arrays() is None and handle.module() is None
    assert handle.assign is not None
    handle.assign({})  # There is nothing left to write into.
    assert set(handle.paths(nnx.Param)) == {"params/layer/bias", "params/layer/kernel"}


@pytest.mark.parametrize(
    "factory", [lambda rngs: Net(rngs), functools.partial(nnx.Linear, 3, 2)], ids=["def", "partial"]
)
def test_factories_are_told_from_functions_of_variables(factory):
    apply = as_apply("TrainTask", factory, train=True)
    variables = as_init("TrainLoop", factory, apply)(jax.random.key(0), X)
    assert apply(variables, X, rngs=jax.random.key(1)).shape == (2, 2)
    for function in (lambda v, x: x, lambda v, *x, rngs=None: x, lambda rngs, x: {}):
        assert as_apply("TrainTask", function, train=True) is function
    init = Linen().init
    assert as_init("TrainLoop", init) is init
