"""What is frozen while a model has a loop, a state or a checkpoint to begin with, or nothing."""

import math

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import waves
from marks import diagonal, usual

import flaxfit as ff
from flaxfit.metrics import collected

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 16)
ONE = ff.DataParallel(jax.devices()[:1])


def make_model(**options):
    module, optimizer = nn.Dense(3, kernel_init=waves), optax.adam(1e-2)
    return ff.Model(module, optimizer, "crossentropy", ["accuracy"], strategy=ONE, **options)


def fitted(**options):
    model = make_model(**options)
    model.fit(X, Y, verbose=0)
    return model


def moved(model):
    """The names of the parameters that a fit changes."""
    before = {name: np.array(each) for name, each in model.state.params.items()}
    model.fit(X, Y, verbose=0)
    return {name for name, each in model.state.params.items() if np.any(each != before[name])}


def built(**options):
    model = make_model(**options)
    model.build(X)
    return model


def compiled(**options):
    model = fitted(**options)
    model.compile(optimizer=optax.adam(1e-3))
    return model


@pytest.fixture
def loaded(tmp_path):
    def load(**options):
        fitted(**options).save(tmp_path / "run")
        model = make_model(**options)
        model.load(tmp_path / "run")
        return model

    return load


MADE = ("built", "fitted", "compiled", "loaded")


@pytest.fixture(params=usual("built", "loaded", of=MADE))
def make(request, loaded):
    makers = {"fresh": make_model, "built": built, "fitted": fitted, "compiled": compiled}
    return {**makers, "loaded": loaded}[request.param]


@pytest.mark.parametrize(("make", "before"), diagonal(MADE, ((), ("kernel",))), indirect=["make"])
def test_parameters_are_frozen_and_freed_at_any_time(make, before, capfd):
    model = make(freeze=before)
    capfd.readouterr()
    model.freeze = ["kernel"] if not before else ()
    assert moved(model) == ({"bias"} if not before else {"kernel", "bias"})
    assert not capfd.readouterr().err  # Nothing was compiled.


@pytest.mark.parametrize("make", ["fitted", "compiled"], indirect=True)
def test_the_moments_of_what_stays_trained_are_kept(make):
    model = make()
    adam = model.state.opt_state[0]
    model.freeze = ["kernel"]
    model.freeze = ()
    again = model.state.opt_state[0]
    np.testing.assert_array_equal(again.mu["bias"], adam.mu["bias"])
    assert again.count == adam.count


def test_a_checkpoint_of_another_optimizer_is_frozen_too(loaded, capfd):
    model = loaded()
    model.compile(optimizer=optax.sgd(0.1, momentum=0.9))
    model.freeze = ["kernel"]
    assert moved(model) == {"bias"}
    assert "compiled at step 1" in capfd.readouterr().err


def test_a_model_says_and_keeps_what_callbacks_have_frozen(capsys):
    model = make_model(freeze=["kernel"])
    model.fit(X, Y, verbose=0, callbacks=[ff.callbacks.Unfreeze({1: "kernel"})])
    assert model.freeze == ()
    model.summary(X)
    assert "0 frozen" in capsys.readouterr().out
    model.evaluate(X, Y, verbose=0)
    assert moved(model) == {"kernel", "bias"}

    class Freeze:
        def attach(self, loop):
            self.loop = loop

        def __call__(self, checkpoint):
            self.loop.freeze = ["bias"]

    model.fit(X, Y, verbose=0, callbacks=[Freeze()])
    assert model.freeze == ("bias",)
    model.compile(optimizer=optax.adam(1e-3))
    assert model.freeze == ("bias",)
    assert moved(model) == {"kernel"}


class Steady(nn.Module):
    """A model and a loss whose gradients never change, of which Adam makes steps of its rate."""

    @nn.compact
    def __call__(self, x):
        names = ("head", "stem")
        return x * sum(self.param(name, nn.initializers.zeros, ()) for name in names)


def distance(outputs, targets):
    return abs(outputs - targets).mean(-1)


def steady(**options):
    return ff.Model(Steady(), optax.adam(0.01), distance, strategy=ONE, **options)


ONES = np.ones((4, 1), np.float32)


def first_steps(model, rate=0.01):
    found = []
    for _ in range(3):
        before = model.state.params
        model.fit(ONES, 1e6 * ONES, verbose=0)
        found += [(model.state.params[name] - before[name]) / rate for name in ("head", "stem")]
    return found


@pytest.mark.parametrize(
    "way", ["set", "compiled", "loaded", "set and saved", "saved", "saved and set"]
)
def test_parameters_that_are_unfrozen_later_move_by_the_rate(way, tmp_path):
    model, rate = steady(freeze="stem"), 0.01
    model.fit(ONES, 1e6 * ONES, epochs=40, verbose=0)
    if way in ("loaded", "set and saved"):
        model.save(tmp_path)
        model = steady(freeze="stem")
        model.load(tmp_path)
    if way == "compiled":
        model.compile(freeze=())
        model.compile(optimizer=optax.adam(0.001))
        rate = 0.001
    else:
        model.freeze = ()
    if "saved" in way:
        if way != "set and saved":
            model.fit(ONES, 1e6 * ONES, verbose=0)
        model.save(tmp_path)
        model = steady()
        model.load(tmp_path)
    if way == "saved and set":
        model.freeze = "head"
        model.freeze = ()
    np.testing.assert_allclose(first_steps(model, rate), 1, rtol=2e-3)


def test_a_loaded_state_is_corrected_as_the_saved_one(tmp_path):
    model = steady(freeze="stem")
    model.fit(ONES, 1e6 * ONES, epochs=40, verbose=0)
    model.freeze = ()
    model.fit(ONES, 1e6 * ONES, verbose=0)
    model.save(tmp_path)
    model.fit(ONES, 1e6 * ONES, epochs=3, verbose=0)
    expected = model.state.params
    model.load(tmp_path)
    np.testing.assert_allclose(first_steps(model), 1, rtol=2e-3)
    assert model.state.params == expected


def test_patterns_that_are_refused_change_nothing(make):
    model = make(freeze=["kernel"])
    with pytest.raises(ValueError, match="'nope' matches no parameter"):
        model.freeze = ["nope"]
    with pytest.raises(ValueError, match="nothing to train"):
        model.freeze = ["kernel", "bias"]
    assert model.freeze == ("kernel",)
    assert moved(model) == {"bias"}


@pytest.mark.parametrize("make", usual("fresh", "loaded", of=("fresh", *MADE)), indirect=True)
def test_a_model_that_is_not_trainable_predicts_and_refuses_to_train(make):
    model = make()
    model.trainable = False
    assert not model.trainable
    before = model.predict(X, verbose=0)
    for train in (model.fit, model.train_on_batch, model.find_lr):
        with pytest.raises(ValueError, match=r"nothing to train: model\.trainable is False"):
            train(X, Y)
    np.testing.assert_array_equal(model.predict(X, verbose=0), before)
    assert "loss" in model.evaluate(X, Y, verbose=0)
    model.compile(optimizer=optax.adam(1e-3))
    assert not model.trainable
    model.compile(freeze=["kernel"])
    assert model.trainable
    model.trainable = True
    assert moved(model) == {"kernel", "bias"}


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_a_step_lists_its_numbers_under_the_names_of_evaluate(is_evaluated):
    metrics = [collected(lambda outputs, labels: 1.0, name="rank"), "accuracy"]
    model, other = (
        ff.Model(nn.Dense(3), optax.adam(1e-2), "crossentropy", metrics, strategy=ONE)
        for _ in range(2)
    )
    expected = (model if is_evaluated else other).evaluate(X, Y, verbose=0)
    assert model.metrics_names == list(expected)
    found = dict(zip(model.metrics_names, model.train_on_batch(X, Y), strict=True))
    assert math.isnan(found.pop("rank"))
    assert expected.pop("rank") == 1
    assert found == pytest.approx(expected, rel=1e-5)
