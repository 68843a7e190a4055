"""Programs: calls of a model after changes of the attributes of its nnx instance."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import slow, thorough
from strategies import one_device

import flaxfit as ff

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = X[:, :2] * 2
STRATEGIES = {
    "one device": one_device,
    "data parallel": ff.DataParallel,
    "sharded": ff.Sharded.fsdp,
}
strategies = pytest.mark.parametrize(
    "strategy", [thorough("one device"), "data parallel", slow("sharded")]
)
CALLS = []


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.by, self.act, self.config = 1.0, nnx.tanh, {"shift": 0.0}
        self.freezes, self.kind = False, "plain"

    def __call__(self, x):
        CALLS.append(self.by)
        x = self.layer(x)
        x = jax.lax.stop_gradient(x) if self.freezes else x
        x = x if self.kind == "plain" else self.norm(x)
        return self.act(self.dropout(x)) * self.by + self.config["shift"]


def make(strategy="one device", net=None, **options):
    net = net or Net(nnx.Rngs(0))
    options = {"metrics": ["mae"], "strategy": STRATEGIES[strategy](), **options}
    return net, ff.Model(net, optax.adam(0.05), "mse", **options)


def fit(model, epochs=1, **options):
    return model.fit(X, Y, epochs=epochs, batch_size=8, verbose=0, **options)["loss"]


def set_dropout(net):
    net.dropout.rate = 0.5


def set_all(net):
    net.by, net.act, net.freezes, net.kind = 2, nnx.sigmoid, True, "norm"
    net.config["shift"] = 1.0


@strategies
@pytest.mark.parametrize("change", [slow(set_dropout), set_all])
def test_a_later_fit_is_that_of_a_new_model_from_the_same_state(strategy, change):
    net, model = make(strategy)
    fit(model)
    other_net, other = make(strategy)
    change(net)
    change(other_net)
    other.state = model.state
    options = {"epochs": 2, "batch_size": 8, "validation_data": (X, Y), "shuffle": False}
    found, expected = (each.fit(X, Y, **options, verbose=0) for each in (model, other))
    assert model.step == 6
    assert found["loss"] == expected["loss"]
    assert found["val_loss"] == expected["val_loss"]
    assert model.evaluate(X, Y) == other.evaluate(X, Y)


@pytest.mark.slow
@strategies
def test_each_call_follows_changes(strategy, tmp_path):
    net, model = make(strategy)
    plain = model.predict(X)
    net.by = 2.0
    np.testing.assert_allclose(model.predict(X), 2 * plain, rtol=1e-5)
    fit(model)

    def mean():
        net.eval()
        return float(np.mean(np.abs(np.asarray(net(X)) - Y)))

    calls = [
        lambda: model.evaluate(X, Y)["mae"],
        lambda: np.mean(np.abs(model.predict(X) - Y)),
        lambda: np.mean(np.abs(next(model.predictions(X, 16))[1] - Y)),
        lambda: np.mean(np.abs(model.trained()(X) - Y)),
        lambda: model.test_on_batch(X, Y, return_dict=True)["mae"],
        lambda: np.mean(np.abs(model.predict_on_batch(X) - Y)),
        lambda: model.train_on_batch(X, Y, return_dict=True)["mae"],
    ]
    for n, call in enumerate(calls):
        net.config["shift"] = float(n)
        assert call() == pytest.approx(mean(), rel=1e-4)


def test_a_loss_and_a_rate_that_were_set_stay():
    net, model = make()
    model.freeze = "layer/bias"
    fit(model)
    model.compile(loss="mae")
    set_dropout(net)
    before = model.state
    fit(model)
    np.testing.assert_array_equal(
        before.params["layer"]["bias"], model.state.params["layer"]["bias"]
    )
    assert model.freeze == ("layer/bias",)


def test_what_counts_for_nothing_makes_no_program(capsys):
    net, model = make()
    fit(model)
    model.predict(X)
    model.evaluate(X, Y)
    CALLS.clear()
    net.eval()
    net.dropout = nnx.Dropout(0.0, rngs=nnx.Rngs(3))
    net.by = float("1.0")
    fit(model)
    model.predict(X)
    model.evaluate(X, Y)
    assert not CALLS and "were changed" not in capsys.readouterr().err
    net.by = 1
    fit(model)
    assert CALLS == [1, 1]


def swap(net):
    net.layer = nnx.Linear(4, 2, use_bias=False, rngs=nnx.Rngs(0))


def share(net):
    net.layer = net.other


class Pair(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.other = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return super().__call__(x) + self.other(x)


@strategies
@pytest.mark.parametrize(
    ("change", "words"),
    [(swap, r"params/layer/bias: \(2,\), now none"), (share, r"params/other/.*now none")],
)
def test_other_variables_are_refused_until_the_change_is_undone(strategy, change, words):
    net, model = make(strategy, Pair(nnx.Rngs(0)))
    fit(model)
    layer, expected = net.layer, model.predict(X)
    change(net)
    for call in (lambda: fit(model), lambda: model.predict(X), lambda: model.evaluate(X, Y)):
        with pytest.raises(ValueError, match=f"of this Pair no longer match the Model.*{words}"):
            call()
    net.layer = layer
    np.testing.assert_array_equal(model.predict(X), expected)
    fit(model)


def test_before_there_are_weights_other_variables_are_taken():
    net, model = make()
    net.layer = nnx.Linear(4, 2, use_bias=False, rngs=nnx.Rngs(5))
    fit(model)
    assert {*model.state.params["layer"]} == {"kernel"}


def replace_layer(net):
    net.layer = nnx.Linear(4, 2, rngs=nnx.Rngs(5))


def update_weights(net):
    nnx.update(net, jax.tree.map(jnp.zeros_like, nnx.state(net, nnx.Param)))


@pytest.mark.parametrize("change", [replace_layer, update_weights])
def test_other_weights_are_told_of_once(change, capsys):
    net, model = make()
    fit(model)
    fit(model)
    assert "were changed" not in capsys.readouterr().err
    change(net)
    expected = model.predict(X)
    assert capsys.readouterr().err.count("the weights of this Net were changed") == 1
    np.testing.assert_array_equal(model.predict(X), expected)
    assert not capsys.readouterr().err


def test_a_change_during_fit_is_told_of_or_refused(capsys):
    net, model = make()

    def change(checkpoint):
        net.by = net.by + 1

    fit(model, callbacks=[change])
    assert "attributes of this Net were changed during fit" in capsys.readouterr().err
    CALLS.clear()
    model.predict(X)
    assert CALLS == [2.0] * 5

    def change_and_measure(checkpoint):
        net.by = net.by + 1
        model.evaluate(X, Y)

    with pytest.raises(ValueError, match="attributes of this Net were changed during fit"):
        fit(model, callbacks=[change_and_measure])
    assert np.isfinite(model.evaluate(X, Y)["loss"])


def test_plain_arrays_that_fit_writes_back_are_no_change():
    class Scaled(nnx.Module):
        def __init__(self, rngs):
            self.layer, self.scale = nnx.Linear(4, 2, rngs=rngs), jnp.ones(2)

        def __call__(self, x):
            CALLS.append("scaled")
            return self.layer(x) * self.scale

    net, model = make(net=Scaled(nnx.Rngs(0)))
    fit(model)
    CALLS.clear()
    fit(model)
    assert not CALLS
