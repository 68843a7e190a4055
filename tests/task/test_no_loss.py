"""Models that add all of their loss themselves, or terms besides another loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from marks import thorough
from strategies import one_device

import flaxfit as ff

X = np.random.default_rng(0).normal(size=(22, 3)).astype("f4")
Y = 2 * X.sum(1, keepdims=True)


class Kl(nnx.Variable):
    """A term of the loss."""


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((3, 1)))

    def __call__(self, x):
        y = x @ self.w[...]
        self.kl = Kl(jnp.square(y).mean())
        return y


class Linen(nn.Module):
    collection: str = "losses"

    @nn.compact
    def __call__(self, x):
        y = x @ self.param("w", nn.initializers.ones, (3, 1))
        self.sow(self.collection, "size", jnp.square(y).mean())
        return y


class Quiet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        y = x @ self.param("w", nn.initializers.ones, (3, 1))
        if train:
            self.sow("losses", "size", jnp.square(y).mean())
        return y


MODELS = [(Linen(), ()), (Linen("kl"), "kl"), (Nnx, Kl)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "losses", "n_devices"),
    [(*MODELS[0], 2), (*MODELS[1], 1), (*MODELS[2], 2), thorough(*MODELS[0], 1)],
    ids=["linen", "name", "nnx", "linen alone"],
)
def test_what_the_model_adds_is_the_loss(module, losses, n_devices):
    """Without targets; the last batch is not padded, so that the means are those of its rows."""
    strategy = ff.DataParallel(jax.devices()[:n_devices])
    model = ff.Model(module, optax.sgd(0.1), losses=losses, strategy=strategy)
    w, expected, n = np.ones((3, 1)), [], 8

    def loss(w, x):
        return np.mean((x @ w) ** 2)

    for i in range(0, 22, n):
        x = X[i : i + n]
        expected.append(loss(w, x))
        w -= 0.1 * 2 * x.T @ (x @ w) / len(x)
    history = model.fit(X, batch_size=n, shuffle=False, verbose=0)
    sizes = [8, 8, 6]
    assert history["loss"][0] == pytest.approx(np.average(expected, weights=sizes), rel=1e-5)
    found = model.evaluate(X, batch_size=n)
    (kernel,) = jax.tree.leaves(model.state.params)
    np.testing.assert_allclose(kernel, w, rtol=1e-5)
    assert found == pytest.approx(dict.fromkeys(["loss", "penalty"], loss(w, X)), rel=1e-5)


def test_the_loss_of_a_model_is_measured_beside_another():
    y = np.ones((22, 1), "f4")
    found = ff.Model(Linen("kl"), None, "mse", losses="kl").evaluate(X, y, batch_size=8)
    outputs = X.sum(1, keepdims=True)
    assert found["penalty"] == pytest.approx(np.mean(outputs**2), rel=1e-5)
    assert found["loss"] == pytest.approx(np.mean((outputs - y) ** 2), rel=1e-5)
    assert ff.Model(Quiet(), None, "mse").evaluate(X, y).keys() == {"loss"}


def test_evaluation_refuses_a_loss_that_is_added_in_training_alone():
    """Instead of reporting a loss of 0."""
    with pytest.raises(TypeError, match="the model adds none in evaluation"):
        ff.Model(Quiet(), optax.sgd(0.1)).evaluate(X)


class Regular(nn.Module):
    """A linear model of one output or two, with an L2 penalty on its weights."""

    n_outputs: int = 1

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (3, self.n_outputs))
        self.sow("losses", "l2", 0.1 * jnp.sum(w**2))
        y = x @ w
        return y if self.n_outputs == 1 else {"a": y[:, :1], "b": y[:, 1:]}


ONES = np.ones((22, 1), "f4")
WEIGHTS = np.linspace(0, 2, 22, dtype="f4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_outputs", "options"),
    [
        (2, {"accumulate": 2}),
        (1, {"strategy": ff.Sharded()}),
        thorough(2, {"strategy": one_device(), "skip_nonfinite": True}),
    ],
)
def test_the_reported_loss_includes_the_penalty_on_request(n_outputs, options):
    y, loss = ONES, "mse"
    if n_outputs == 2:
        y, loss = {"a": ONES, "b": -ONES}, {"a": "mse", "b": "mae"}

    def run(**more):
        model = ff.Model(Regular(n_outputs), optax.sgd(0.01), loss, **options, **more)
        fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        held_out = {"validation_data": (X, y), "sample_weight": WEIGHTS}
        history = model.fit(X, y, **fit, **held_out)
        return model, history, model.evaluate(X, y, 8, sample_weight=WEIGHTS)

    (_, apart, found), (model, joined, measured) = run(), run(penalty_in_loss=True)
    names = ["loss", "val_loss"]
    for name in apart.keys() - {*names}:
        assert joined[name] == pytest.approx(apart[name], rel=1e-6)
    for name in names:
        penalty = apart[name.replace("loss", "penalty")]
        assert joined[name] == pytest.approx(np.add(apart[name], penalty), rel=1e-6)
        assert min(penalty) > 0.1
    assert measured["loss"] == pytest.approx(found["loss"] + found["penalty"], rel=1e-6)
    assert measured["penalty"] == pytest.approx(found["penalty"], rel=1e-6)
    nothing = model.evaluate(X, y, 8, sample_weight=0 * WEIGHTS)
    assert nothing["loss"] == pytest.approx(nothing["penalty"])
    model.compile(penalty_in_loss=False)
    assert model.evaluate(X, y, 8, sample_weight=WEIGHTS) == pytest.approx(found, rel=1e-6)


@pytest.mark.slow
def test_the_penalty_counts_in_the_loss_of_functions_and_of_losses_with_one():
    def penalized(outputs, targets):
        return jnp.square(outputs - targets), 0.1 * jnp.mean(outputs**2)

    module = Regular()
    pair = (lambda k, x: module.init(k, x), lambda v, x, **options: module.apply(v, x, **options))
    parts = (pair, optax.sgd(0.01), penalized)
    models = [ff.Model(*parts, penalty_in_loss=each) for each in (False, True)]
    apart, joined = (each.fit(X, ONES, verbose=0) for each in models)
    assert joined["loss"][0] == pytest.approx(apart["loss"][0] + apart["penalty"][0], rel=1e-6)
    own, measured = (each.evaluate(X, ONES) for each in models)
    assert measured["loss"] == pytest.approx(own["loss"] + measured["penalty"], rel=1e-6)


def test_a_penalty_that_is_the_loss_counts_once():
    found = ff.Model(Linen(), optax.sgd(0.1), penalty_in_loss=True).evaluate(X)
    assert found["loss"] == pytest.approx(found["penalty"]) and found["loss"] > 0.1


@pytest.mark.slow
def test_the_loss_with_the_penalty_is_that_of_keras(keras):
    options = {"use_bias": False, "kernel_initializer": "ones"}
    regularizer = keras.regularizers.L2(0.1)
    theirs = keras.Sequential([keras.layers.Dense(1, kernel_regularizer=regularizer, **options)])
    theirs.compile(keras.optimizers.SGD(0.1), "mse")
    ours = ff.Model(Regular(), optax.sgd(0.1), "mse", penalty_in_loss=True)
    given = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
    held_out = {"validation_data": (X[:16], ONES[:16])}
    expected = theirs.fit(X[:16], ONES[:16], **given, **held_out).history
    found = ours.fit(X[:16], ONES[:16], **given, **held_out)
    for name in "loss", "val_loss":
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"penalty_in_loss": 0.5}, TypeError, "must be True or False, got 0.5"),
        ({"mutable": ["stats"]}, ValueError, r"cannot be combined with mutable=\['stats'\]"),
        ({"loss": None, "objective": lambda *_: 0}, ValueError, "add the penalty to its values"),
        ({"loss": None, "step": lambda *_: 0}, ValueError, "penalty_in_loss would have no effect"),
    ],
)
def test_what_does_not_go_with_the_penalty_in_the_loss_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        ff.Model(Regular(), optax.sgd(0.1), **{"loss": "mse", "penalty_in_loss": True, **options})


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, "mse"])
def test_a_penalty_is_the_mean_over_examples_where_batches_differ_in_size(loss):
    """As in evaluation, and in the loss: the last of these batches has 6 rows, not 8."""
    options = {"penalty_in_loss": True, "strategy": one_device()}
    model = ff.Model(Linen(), optax.sgd(0.0), loss, **options)
    zeros = None if loss is None else np.zeros((22, 1), "f4")
    history = model.fit(X, zeros, 8, shuffle=False, verbose=0)
    size = np.mean(X.sum(1) ** 2)
    np.testing.assert_allclose(history["penalty"], [size], rtol=1e-5)
    np.testing.assert_allclose(history["loss"], [size if loss is None else 2 * size], rtol=1e-5)


def fitted(module, **options):
    """A model of a loss besides the terms that its module adds, and its history."""
    verbose = options.pop("verbose", 0)
    model = ff.Model(module, optax.sgd(0.1), "mse", **{"strategy": one_device(), **options})
    return model, model.fit(X[:16], Y[:16], 16, shuffle=False, verbose=verbose)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "losses"), MODELS[1:], ids=["linen", "nnx"])
def test_terms_of_the_loss_under_a_name_of_their_own_are_trained(module, losses):
    model, history = fitted(module, losses=losses, strategy=ff.DataParallel())
    x, y, start = X[:16], Y[:16], np.ones((3, 1))
    slope = 2 * x.T @ ((x @ start - y) + x @ start) / len(x)  # Of both mean squares.
    (kernel,) = jax.tree.leaves(model.state.params)
    np.testing.assert_allclose(kernel, start - 0.1 * slope, rtol=1e-5)
    assert history["penalty"] == [pytest.approx(np.mean((x @ start) ** 2), rel=1e-5)]
    assert model.state.model_state == {}


def test_terms_of_the_loss_need_to_be_mutable():
    with pytest.raises(ValueError, match="losses='kl' cannot be combined with mutable="):
        fitted(Linen("kl"), losses="kl", mutable=["batch_stats"])
    fitted(Linen("kl"), losses="kl", mutable=["losses", "kl"])


def test_what_is_not_trained_is_said(capsys):
    class Shifted(Nnx):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.shift, self.rows = jnp.zeros(3), jnp.arange(3)

    fitted(Shifted, losses=Kl, verbose=2)
    said = capsys.readouterr().err
    assert "plain arrays in attributes are constants: self.shift [3]. To train one, wrap it" in said


def test_values_that_are_not_added_to_the_loss_are_said_once(capsys):
    model, _ = fitted(Nnx, verbose=2)
    model.fit(X[:8], Y[:8], batch_size=4, verbose=2)
    said = capsys.readouterr().err
    assert said.count("leaves values in Kl, which are not added to the loss") == 1
    assert "Model(..., losses=['Kl'])" in said


def test_a_collection_that_grows_at_each_step_is_an_error_that_names_losses():
    with pytest.raises(ValueError, match=r"'kl' does not keep its structure.*losses=\['kl'\]"):
        fitted(Linen("kl"))


def test_a_pair_of_outputs_that_is_taken_for_updates_is_said(capsys):
    def apply(variables, x, **_):
        return x @ variables["params"], {"attention": x}

    fitted((lambda *_: {"params": jnp.ones((3, 1))}, apply), verbose=2)
    assert "leaves values in attention" in capsys.readouterr().err
