"""One loss for all outputs: bound to them by name or in order."""

import jax
import numpy as np
import optax
import pytest
from marks import thorough

import flaxfit as ff
from flaxfit import losses

X = np.random.default_rng(0).normal(size=(22, 3)).astype("f4")
NAMES = ("a", "b")
TARGETS = (X[:, :1], X[:, 1:])


def model_of(form, loss, **options):
    def named(v, x, **_):
        outputs = (x @ v["params"]["a"], x @ v["params"]["b"])
        return outputs if form is tuple else dict(zip(NAMES, outputs, strict=True))

    def init(rngs, x):
        return {"params": {"a": np.ones((3, 1), "f4"), "b": np.ones((3, 2), "f4")}}

    return ff.Model((init, named), optax.sgd(0.1), loss, **options)


def squares(output, target):
    return (output - target) ** 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "loss", "n_devices"),
    [(tuple, "mse", 2), thorough(dict, losses.mse, 1), thorough(tuple, squares, 1)],
)
def test_one_loss_is_that_of_each_output(form, loss, n_devices):
    strategy = ff.DataParallel(jax.devices()[:n_devices])
    targets = TARGETS if form is tuple else dict(zip(NAMES, TARGETS, strict=True))
    weights = np.arange(22.0)
    both = ["mse", "mse"] if form is tuple else dict.fromkeys(NAMES, "mse")
    found = []
    for each in loss, both:
        model = model_of(form, each, loss_weights=0.5, strategy=strategy)
        fit = model.fit(X, targets, batch_size=8, epochs=2, sample_weight=weights, verbose=0)
        measured = model.evaluate(X, targets, batch_size=5, sample_weight=weights)
        found.append((*fit["loss"], measured["loss"]))
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize(
    ("form", "loss", "targets", "weights", "message"),
    [
        (tuple, "mse", TARGETS, np.ones((22, 1)), "shape .* there is one loss for the outputs"),
        (tuple, "mse", TARGETS, {"a": np.ones(22)}, "weights for 'a', but losses by name for no"),
        (dict, "mse", {"a": TARGETS[0]}, None, "a loss for 'b', but no such target"),
        (dict, "mse", {"a": TARGETS[0], "b": X}, None, "output 'b': loss 'mse' expects targets"),
        (
            tuple,
            losses.binary_crossentropy(ignore_label=-1),
            tuple(each > 0 for each in TARGETS),
            None,
            "One loss for all outputs returns weights",
        ),
    ],
)
def test_what_needs_losses_by_name_is_refused(form, loss, targets, weights, message):
    with pytest.raises(ValueError, match=message):
        model_of(form, loss).fit(X, targets, batch_size=22, sample_weight=weights, verbose=0)


@pytest.mark.parametrize("metric", ["mae", thorough("r2")])
def test_a_metric_of_one_output_is_refused(metric):
    model = model_of(dict, "mse", metrics=[metric])
    with pytest.raises(ValueError, match=f"into lists by name: .*'a': .'{metric}'."):
        model.evaluate(X, dict(zip(NAMES, TARGETS, strict=True)))


def test_a_function_that_takes_all_outputs_gets_them():
    def loss(a, b, x, y):
        return ((a - x) ** 2).mean(-1)

    model = model_of(tuple, loss)
    found = model.evaluate(X, TARGETS)["loss"]
    assert found == pytest.approx(np.mean((X.sum(1, keepdims=True) - TARGETS[0]) ** 2), rel=1e-5)
