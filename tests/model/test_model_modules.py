"""Model over modules that keep more than parameters: terms of the loss, streams, switches."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from marks import thorough

import flaxfit as ff
from flaxfit.callbacks import Export

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)
STRATEGIES = [
    ff.DataParallel(jax.devices()[:1]),
    ff.DataParallel(jax.devices()[:4]),
    ff.Sharded.fsdp(jax.devices()[:4]),
]


class Kl(nnx.Variable):
    """A term of the loss under a name of its own."""


class Nnx(nnx.Module):
    """Leaves the mean of its squared outputs behind."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 1, kernel_init=nnx.initializers.ones, rngs=rngs)

    def __call__(self, x):
        y = self.layer(x)
        self.kl = Kl((y**2).mean())
        return y


class Linen(nn.Module):
    """The same."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(1, kernel_init=nn.initializers.ones)(x)
        self.sow("kl", "term", (y**2).mean())
        return y


def make_model(module, **options):
    options = {"strategy": STRATEGIES[0], **options}
    return ff.Model(module, optax.sgd(0.1), "mse", **options)


def fit(model, **options):
    return model.fit(X, Y, **{"batch_size": 16, "shuffle": False, "verbose": 0} | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [thorough(STRATEGIES[0]), STRATEGIES[1], thorough(STRATEGIES[2])],
    ids=["1", "4", "fsdp"],
)
@pytest.mark.parametrize(("module", "losses"), [(Nnx, Kl), (Linen(), "kl")], ids=["nnx", "linen"])
def test_terms_of_the_loss_under_a_name_of_their_own_are_trained(module, losses, strategy):
    model = make_model(module, losses=losses, strategy=strategy)
    history = fit(model)
    kernel = jax.tree.leaves(model.state.params)[1]
    start = np.ones((3, 1))
    slope = 2 * X.T @ ((X @ start - Y) + X @ start) / len(X)  # Of both mean squares.
    np.testing.assert_allclose(kernel, start - 0.1 * slope, rtol=1e-5)
    assert history["penalty"] == [pytest.approx(np.mean(Y**2), rel=1e-5)]
    assert model.state.model_state == {}


def test_terms_of_the_loss_need_to_be_mutable():
    with pytest.raises(ValueError, match="losses='kl' cannot be combined with mutable="):
        make_model(Linen(), losses="kl", mutable=["batch_stats"])
    fit(make_model(Linen(), losses="kl", mutable=["losses", "kl"]))


def test_what_is_not_trained_is_said(capsys):
    class Shifted(Nnx):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.shift, self.rows = jnp.zeros(3), jnp.arange(3)

    fit(make_model(Shifted, losses=Kl), verbose=2)
    said = capsys.readouterr().err
    assert "plain arrays in attributes are constants: self.shift [3]. To train one, wrap it" in said


def test_values_that_are_not_added_to_the_loss_are_said_once(capsys):
    model = make_model(Nnx)
    fit(model, verbose=2)
    model.fit(X[:8], Y[:8], batch_size=4, verbose=2)
    said = capsys.readouterr().err
    assert said.count("leaves values in Kl, which are not added to the loss") == 1
    assert "Model(..., losses=['Kl'])" in said


def test_a_collection_that_grows_at_each_step_is_an_error_that_names_losses():
    with pytest.raises(ValueError, match=r"'kl' does not keep its structure.*losses=\['kl'\]"):
        fit(make_model(Linen()))


def test_a_pair_of_outputs_that_is_taken_for_updates_is_said(capsys):
    def apply(variables, x, **_):
        return x @ variables["params"], {"attention": x}

    fit(make_model((lambda *_: {"params": jnp.ones((3, 1))}, apply)), verbose=2)
    assert "leaves values in attention" in capsys.readouterr().err


@pytest.mark.slow
def test_a_class_whose_modules_keep_their_streams_and_have_a_switch_is_trained():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.rngs, self.training = rngs, True
            self.layer = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            noise = self.rngs.normal(x.shape) if self.training else 0
            return self.layer(x + noise)

    model = make_model(Noisy)
    assert fit(model)["loss"][0] != model.evaluate(X, Y)["loss"]
    layer = model.state.params["layer"]
    np.testing.assert_allclose(model.predict(X), X @ layer["kernel"] + layer["bias"], rtol=1e-5)


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_model_is_not_copied_or_pickled(act):
    with pytest.raises(TypeError, match="Cannot copy or pickle a Model.*save_weights"):
        act(make_model(nn.Dense(1)))


def test_a_model_that_draws_in_evaluation_is_not_exported(tmp_path):
    model = make_model(nn.Dense(1), eval_rngs="noise")
    with pytest.raises(ValueError, match="Cannot export a model that draws random numbers"):
        fit(model, callbacks=[Export(tmp_path / "model")])
