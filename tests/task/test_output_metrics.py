"""Metrics of single outputs beside one loss for all, by name or in order, in lists."""

import jax
import numpy as np
import optax
import pytest
from marks import thorough

import flaxfit as ff
from flaxfit.task._multi_output import as_loss
from flaxfit.task._output_metrics import as_metrics

X = np.random.default_rng(0).normal(size=(22, 3)).astype("f4")
WEIGHTS = np.arange(22.0)
ERRORS = X.sum(1, keepdims=True) - X


def model_of(form, metrics, **options):
    def apply(v, x, **_):
        outputs = x @ v["params"]["w"], x @ v["params"]["w"]
        return outputs if form is tuple else dict(zip("ab", outputs, strict=True))

    def init(rngs, x):
        return {"params": {"w": np.ones((3, 1), "f4")}}

    return ff.Model((init, apply), optax.sgd(0.1), "mse", metrics, **options)


TARGETS = {tuple: (X[:, :1], X[:, 1:2]), dict: {"a": X[:, :1], "b": X[:, 1:2]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "metrics", "names"),
    [
        (dict, {"b": ["mae", "rmse"]}, {"b_mae": 1, "b_rmse": 1}),
        (
            tuple,
            [["mae"], ["mse", "mae"]],
            {"output_0_mae": 0, "output_1_mse": 1, "output_1_mae": 1},
        ),
        thorough(tuple, [None, "mae"], {"output_1_mae": 1}),
        thorough(tuple, {"x": ["mae"], "y": []}, {"x_mae": 0}),
        thorough(dict, {"a": ["mae"], "b": ("mse",)}, {"a_mae": 0, "b_mse": 1}),
    ],
)
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
def test_lists_of_metrics_are_of_single_outputs(form, metrics, names, n_devices):
    strategy = ff.DataParallel(jax.devices()[:n_devices])
    model = model_of(form, metrics, strategy=strategy)
    assert model.metrics_names == ["loss", *names]
    found = model.evaluate(X, TARGETS[form], sample_weight=WEIGHTS)
    errors = {"mae": np.abs(ERRORS), "mse": ERRORS**2, "rmse": ERRORS**2}
    for name, column in names.items():
        metric = name.rsplit("_", 1)[1]
        expected = np.average(errors[metric][:, column], weights=WEIGHTS)
        expected = np.sqrt(expected) if metric == "rmse" else expected
        assert found[name] == pytest.approx(expected, rel=1e-5)
    history = model.fit(X, TARGETS[form], batch_size=22, sample_weight=WEIGHTS, verbose=0)
    for name in names:
        assert history[name][0] == pytest.approx(found[name], rel=1e-5)


def test_a_list_in_a_list_of_one_is_of_the_only_output():
    assert as_metrics([["mae"]], None).keys() == {"mae"}
    assert as_metrics([None], None) == {}


@pytest.mark.parametrize(
    "metrics", [["mae", "rmse"], [["mae", "rmse"]], {"output_0": ["mae", "rmse"]}]
)
def test_a_loss_in_a_list_of_one_has_several_metrics(metrics):
    found = as_metrics(metrics, as_loss(["mse"]))
    assert list(found) == ["output_0_loss", "output_0_mae", "output_0_rmse"]
    sums = found["output_0_mae"].measure(X[:, :1], X[:, 1:2], weights=np.ones(22))
    assert found["output_0_mae"].compute(sums) == pytest.approx(np.abs(X[:, 0] - X[:, 1]).mean())


def test_none_beside_lists_is_an_output_without_metrics():
    assert as_metrics({"a": ["mae"], "b": None}, None).keys() == {"a_mae"}


@pytest.mark.parametrize(
    ("form", "metrics", "message"),
    [
        (dict, {"c": ["mae"]}, "a loss for 'c', but no such output: there are 'a', 'b'"),
        (dict, ["mae"], "into lists by name: metrics={'a': ..mae..}"),
        (tuple, {"a": ["mae"]}, "by the names a expect the outputs .* as a tuple of 1"),
        (tuple, {"output_1": ["mae"]}, "Name all outputs: .* a list of metrics may be empty"),
        (tuple, [["mae"], [], []], "expect the outputs .* as a tuple of 3"),
    ],
)
def test_metrics_that_are_of_no_output_are_refused(form, metrics, message):
    with pytest.raises(ValueError, match=message):
        model_of(form, metrics).evaluate(X, TARGETS[form])


def test_a_metric_of_two_outputs_names_the_lists():
    with pytest.raises(TypeError, match=r"into a list for each: metrics=\[\['mae'\], \[\]\]"):
        model_of(tuple, ["mae"]).evaluate(X, TARGETS[tuple])
