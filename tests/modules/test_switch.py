import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from flaxfit.modules import from_function, from_nnx, train_and_eval
from flaxfit.modules._switch import inputs_of

X = np.ones((4, 3), np.float32)
NAMES = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


def modes(model, **options):
    """What the model of each mode says that it was told."""
    return [functions.apply({}, X, **options) for functions in train_and_eval(model)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("default", [True, False, None])
def test_a_field_is_set(name, default):
    def told(self, x):
        return getattr(self, name)

    members = {"__annotations__": {name: bool | None}, name: default, "__call__": told}
    module = type("Told", (nn.Module,), members)()
    assert modes(module) == [NAMES[name], not NAMES[name]]
    assert getattr(module, name) is default


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["x, {}", "x, {}=None", "x, *, {}", "x, *, {}=True"])
def test_an_argument_of_the_call_is_set(name, form):
    call = eval(f"lambda self, {form.format(name)}: {name}")
    for base in nn.Module, nnx.Module:
        told = modes(type("Told", (base,), {"__call__": call})())
        assert told == [NAMES[name], not NAMES[name]]


@pytest.mark.parametrize("field", [None, True, False])
def test_a_switch_that_is_field_and_argument_is_set_once(field):
    training, evaluation = train_and_eval(nn.Dropout(0.5, deterministic=field))
    dropped = training.apply({}, X, rngs={"dropout": jax.random.key(0)})
    assert set(np.unique(dropped)) == {0, 2}
    np.testing.assert_array_equal(evaluation.apply({}, X), X)


def test_several_switches_are_all_set():
    class Both(nn.Module):
        train: bool = False

        @nn.compact
        def __call__(self, x, deterministic=None):
            return self.train, deterministic

    assert modes(Both()) == [(True, False), (False, True)]


def test_a_field_or_argument_of_another_kind_is_no_switch():
    class Settings(nn.Module):
        training: Any = "fast"

        def __call__(self, x, train=0.5):
            return self.training, train

    assert modes(Settings()) == [("fast", 0.5)] * 2


def test_an_argument_that_the_caller_gives_wins():
    class Told(nn.Module):
        def __call__(self, x, train):
            return train

    assert modes(Told(), train=True) == [True, True]


def test_batch_norm_and_dropout_of_linen_follow_the_switch_without_a_key_in_evaluation():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x))
            return nn.Dropout(0.5, deterministic=not train)(x)

    training, evaluation = train_and_eval(Net())
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = training.init(rngs, x)
    y, updates = training.apply(variables, x, rngs=rngs, mutable=["batch_stats"])
    assert (np.asarray(y) == 0).any()
    means = [tree["batch_stats"]["BatchNorm_0"]["mean"] for tree in (variables, updates)]
    assert np.abs(means[0] - means[1]).max() > 1e-4
    expected = Net().apply(variables, x, train=False)
    np.testing.assert_array_equal(evaluation.apply(variables, x), expected)


def test_a_module_without_a_switch_is_the_same_in_both():
    training, evaluation = train_and_eval(nn.Dense(2))
    variables = training.init(jax.random.key(0), X)
    np.testing.assert_array_equal(training.apply(variables, X), nn.Dense(2).apply(variables, X))
    np.testing.assert_array_equal(training.apply(variables, X), evaluation.apply(variables, X))


def test_a_pair_serves_both_and_a_keyword_of_its_own_is_set():
    def init(rngs, x):
        return {}

    def apply(variables, x, rngs=None, mutable=False):
        return x

    assert train_and_eval((init, apply)) == ((init, apply), (init, apply))

    def switching(variables, x, *, is_training, rngs=None, mutable=False):
        return is_training

    assert modes((init, switching)) == [True, False]


def test_the_bound_methods_of_a_linen_module_are_that_module():
    module = nn.Dropout(0.5)
    training, evaluation = train_and_eval((module.init, module.apply))
    np.testing.assert_array_equal(evaluation.apply({}, X), X)
    assert (np.asarray(training.apply({}, X, rngs={"dropout": jax.random.key(0)})) == 0).any()


class Linear(nnx.Module):
    """Is built of rngs alone, by keyword."""

    def __init__(self, features: int = 2, *, rngs: nnx.Rngs):
        self.layer = nnx.Linear(3, features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.layer(x))


@pytest.mark.parametrize(
    "model",
    [
        Linear,
        Linear(rngs=nnx.Rngs(0)),
        lambda rngs: Linear(rngs=rngs),
        lambda rngs, features=2: Linear(features, rngs=rngs),
        functools.partial(Linear, features=2),
        from_nnx(Linear, train=False),
    ],
    ids=["class", "instance", "function", "function with defaults", "partial", "functions"],
)
def test_every_form_of_an_nnx_model_is_known(model):
    training, evaluation = train_and_eval(model)
    variables = training.init(jax.random.key(0), X)
    kernel, bias = (variables["params"]["layer"][name] for name in ("kernel", "bias"))
    np.testing.assert_allclose(evaluation.apply(variables, X), X @ kernel + bias, rtol=1e-5)
    assert training.apply(variables, X, rngs={"dropout": jax.random.key(0)}).shape == (4, 2)


class Mlp(nn.Module):
    """Has a field and can yet be made without."""

    features: int = 3
    activation: Callable[..., Any] = nn.relu


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (Mlp, r"Make an instance: Mlp\(\.\.\.\)"),
        (nnx.Linear, r"pass Linear\(\.\.\., rngs=nnx.Rngs\(0\)\), or the factory"),
        (lambda params, x: x, "from_function"),
        (jax.tree_util.Partial(jnp.add), "from_function"),
        (nn.Dense(1).apply, "pass the module itself"),
        ({"params": 1}, r"pair; got \{'params': 1\}. These are variables: pass the module"),
        ((nn.Dense(1).init,), "pair"),
        (None, "got None"),
    ],
)
def test_anything_else_is_a_worded_error(model, advice):
    with pytest.raises(TypeError, match=f"(?s)A model must be a Linen module.*{advice}"):
        train_and_eval(model)


class Told(nnx.Module):
    """Says what an attribute of a part of it was set to."""

    def __init__(self, **attributes):
        self.part = nnx.Dropout(0.5)
        self.part.own = nnx.Module()
        for name, value in attributes.items():
            setattr(self.part.own, name, value)

    def __call__(self, x):
        return vars(self.part.own)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("default", [True, False, None])
def test_an_attribute_of_an_nnx_module_is_set_wherever_it_is(name, default):
    module = Told(**{name: default})
    assert [told[name] for told in modes(module)] == [NAMES[name], not NAMES[name]]
    assert getattr(module.part.own, name) is default


def test_an_attribute_of_an_nnx_class_is_set_and_a_property_or_another_kind_is_no_switch():
    class Both(nnx.Module):
        training = True

        def __init__(self):
            self.train = 0.5

        @property
        def deterministic(self):
            return True

        def __call__(self, x):
            return self.training, self.train, self.deterministic

    assert modes(Both()) == [(True, 0.5, True), (False, 0.5, True)]


def test_a_mode_is_set_in_the_layers_that_have_it_or_is_an_error():
    assert from_nnx(Told(decode=False), decode=True).apply({}, X)["decode"] is True
    with pytest.raises(ValueError, match="No layer of the model has trainig:"):
        from_nnx(Told(training=True), trainig=False)


@pytest.mark.parametrize("default", ["", "=None", "=False"])
@pytest.mark.parametrize("base", [nn.Module, nnx.Module])
def test_a_switch_of_another_name_is_an_error_that_lists_the_names(base, default):
    call = eval(f"lambda self, x, is_train{default}: x")
    module = type("Odd", (base,), {"__call__": call})()
    with pytest.raises(ValueError, match="Odd has a flag named is_train.*training, is_training"):
        train_and_eval(module)
    if base is nnx.Module:
        assert from_nnx(module, train=False, call=lambda m, x: x).apply({}, X) is X


def test_a_pair_whose_switch_has_another_name_is_an_error():
    with pytest.raises(ValueError, match="A function of the pair has a flag named is_train"):
        train_and_eval((lambda key, x: {}, lambda variables, x, is_train, **_: x))


def test_a_field_or_an_attribute_of_another_name_is_an_error():
    members = {"__annotations__": {"inference": bool}, "inference": False, "__call__": len}
    with pytest.raises(ValueError, match="named inference, which flaxfit does not set"):
        train_and_eval(type("Odd", (nn.Module,), members)())
    with pytest.raises(ValueError, match="named is_train, which flaxfit does not set"):
        train_and_eval(Told(is_train=True))
    told = from_nnx(Told(is_train=True), train=False, is_train=False).apply({}, X)
    assert told["is_train"] is False


class Sowing(nn.Module):
    """Leaves a term of the loss in a collection of its own."""

    @nn.compact
    def __call__(self, x):
        self.sow("kl", "term", x.sum())
        self.sow("losses", "term", 2 * x.sum())
        return nn.Dense(1)(x)


@pytest.mark.parametrize(
    "model", [Sowing(), (Sowing().init, lambda *a, **k: Sowing().apply(*a, **k))]
)
def test_collections_that_are_named_are_terms_of_the_loss(model):
    training, evaluation = train_and_eval(model, losses="kl")
    variables = training.init(jax.random.key(0), X)
    assert variables.keys() == {"params", "losses"}
    variables = {"params": variables["params"]}
    _, updates = training.apply(variables, X, mutable=["losses", "kl"])
    terms = jax.tree.map(float, updates)
    assert terms == {"losses": {"term": (24.0,), "kl": {"term": (12.0,)}}}
    assert evaluation.apply(variables, X).shape == (4, 1)
    by_type, _ = train_and_eval(model, losses=type("kl", (), {}))
    assert "losses" in by_type.apply(variables, X, mutable=["losses", "kl"])[1]
    with pytest.raises(ValueError, match="losses contains kll.* only in kl, losses"):
        train_and_eval(model, losses="kll")[0].apply(variables, X, mutable=["losses", "kl"])


class TwoInputs(nn.Module):
    def __call__(self, tokens, mask=None, *, train: bool = False):
        return tokens


class TwoOfNnx(nnx.Module):
    def __call__(self, tokens, mask=None, *, deterministic=False, rngs=None):
        return tokens


class AnyInputs(nn.Module):
    def __call__(self, *inputs, **named):
        return inputs


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (TwoInputs(), ("tokens", "mask")),
        (nn.Sequential([TwoInputs(), nn.Dense(1)]), ("tokens", "mask")),
        (nn.Sequential([nn.relu]), ("x",)),
        (TwoOfNnx(), ("tokens", "mask")),
        (lambda rngs: TwoOfNnx(), ("tokens", "mask")),
        (nnx.Sequential(TwoOfNnx()), ("tokens", "mask")),
        (from_nnx(TwoOfNnx(), call=lambda module, ids: module(ids)), ("ids",)),
        (from_function(lambda params, x, train: x, {}), ("x",)),
        ((TwoInputs().init, TwoInputs().apply), ("tokens", "mask")),
        ((lambda rngs, x: {}, lambda variables, x, rngs, mutable: x), ("x",)),
        ((lambda rngs, x: {}, lambda variables, x, **options: x), None),
        (AnyInputs(), None),
    ],
)
def test_the_names_of_the_inputs_are_those_of_the_call(model, names):
    for functions in train_and_eval(model):
        assert inputs_of(functions.apply) == names
    assert inputs_of(None) is None
