"""Losses and metrics whose arguments are the other way round are refused in words."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import flaxfit as ff
from flaxfit import losses, metrics
from flaxfit.tree._argument_order import check_order


def quantile(q, y_true, y_pred):
    return jnp.maximum(q * (y_true - y_pred), (q - 1) * (y_true - y_pred))


def targets_first(targets, outputs):
    return outputs - targets


def labels_first(labels, logits, weight=1):
    return logits[..., 0] * labels * weight


class Loss:
    def __call__(self, y, y_hat):
        return y_hat - y


SWAPPED = [functools.partial(quantile, 0.9), targets_first, jax.jit(labels_first), Loss()]


@pytest.mark.parametrize("function", SWAPPED, ids=["partial", "function", "jit", "object"])
def test_targets_first_are_refused_by_their_names(function):
    with pytest.raises(
        TypeError, match=r"calls loss\(outputs, targets\), .* takes \(.*Wrap it: la"
    ):
        losses.resolve(function)
    with pytest.raises(TypeError, match=r"calls metric\(outputs, targets\)"):
        metrics.as_metrics([function])
    apply: Any = lambda v, x, **_: x  # noqa: E731
    with pytest.raises(TypeError, match=r"calls loss\(outputs, targets\)"):
        ff.TrainTask(apply, optax.sgd(0.1), {"a": "mse", "b": function})
    with pytest.raises(TypeError, match=r"calls metric\(outputs, targets\)"):
        ff.EvalTask(apply, {"shift": function})


@pytest.mark.parametrize(
    "function",
    [
        lambda outputs, targets: outputs,
        lambda y_pred, y_true: y_pred,
        lambda o, t: o,
        lambda *both: both[0],
        lambda first, second, targets, mask: first,
        lambda y: y,
        lambda target_outputs, targets: targets,
        lambda y, labels: y,
        optax.l2_loss,
        optax.losses.sigmoid_focal_loss,
        functools.partial(optax.huber_loss, delta=2.0),
        jnp.subtract,
    ],
)
def test_other_functions_pass(function):
    check_order("loss", function)
    assert losses.resolve(function) is function


def of(library, **attributes):
    """An object such as that library has."""
    attributes = {"__module__": library, "__call__": lambda self, *both: both[0], **attributes}
    return type("Squared", (), attributes)()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (of("keras.src.losses"), r"takes \(y_true, y_pred\). Wrap it"),
        (of("keras.src.metrics", update_state=None), "cannot look into Squared of keras: use one"),
        (of("torch.nn.modules.loss"), "cannot look into Squared of torch"),
        (functools.partial(of("sklearn.metrics")), "cannot look into Squared of sklearn"),
    ],
    ids=["keras", "keras metric", "torch", "sklearn"],
)
def test_those_of_other_libraries_are_refused(function, message):
    for refuse in (losses.resolve, lambda metric: metrics.as_metrics([metric])):
        with pytest.raises(TypeError, match=message):
            refuse(function)


@pytest.mark.slow
def test_other_libraries_call_theirs_so(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras, torch = pytest.importorskip("keras"), pytest.importorskip("torch")
    sklearn = pytest.importorskip("sklearn.metrics")
    for function in (
        *(keras.losses.MeanSquaredError(), keras.losses.mean_squared_error),
        *(keras.metrics.MeanSquaredError(), torch.nn.MSELoss(), torch.nn.functional.mse_loss),
        sklearn.f1_score,
    ):
        with pytest.raises(TypeError, match="Wrap it|traced by JAX"):
            check_order("loss", function)
