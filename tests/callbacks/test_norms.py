"""Norms by group, measured inside the step."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from loops import init_of
from marks import thorough

import flaxfit as ff
from flaxfit.callbacks import Norms

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="head")(nn.tanh(nn.Dense(4, name="stem")(x)))


def make_loop(callbacks=(), n_devices=1, *, stdout=False, **options):
    task = ff.TrainTask(MLP().apply, optax.sgd(0.1), "mse", [(X, X[:, :1])] * 6, **options)
    options = {"n_steps": 5, "n_steps_per_checkpoint": 2, "grad_norm": True, "stdout": stdout}
    options["devices"] = jax.devices()[:n_devices]
    return ff.TrainLoop(init_of(MLP(), X.shape[1]), task, 0, callbacks=callbacks, **options)


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 2])
def test_the_norms_of_groups_are_means_over_steps(n_devices):
    loop = make_loop(Norms("stem/.*", "head/kernel"), n_devices)
    norms = {"params": [], "grads": []}
    params = loop.state.params

    def loss(params):
        outputs: Any = MLP().apply({"params": params}, X)
        return ((outputs - X[:, :1]) ** 2).mean()

    grad = jax.jit(jax.grad(loss))
    for _ in range(3):
        grads = grad(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        norms["grads"].append(float(optax.tree.norm(grads["stem"])))
        norms["params"].append(float(np.linalg.norm(params["head"]["kernel"])))
    first, second = next(loop).metrics, next(loop).metrics
    grads, params = np.mean(norms["grads"][1:]), np.mean(norms["params"][1:])
    assert first["grad_norm/stem/.*"] == pytest.approx(norms["grads"][0], rel=1e-5)
    assert second["grad_norm/stem/.*"] == pytest.approx(grads, rel=1e-5)
    assert second["param_norm/head/kernel"] == pytest.approx(params, rel=1e-5)


@pytest.mark.slow
def test_the_gradients_of_frozen_parameters_count_as_nothing():
    checkpoint = next(make_loop(Norms("stem/.*", ".*"), freeze="stem/.*"))
    assert checkpoint.metrics["grad_norm/stem/.*"] == 0
    assert checkpoint.metrics["grad_norm/.*"] == pytest.approx(checkpoint.metrics["grad_norm"])
    assert checkpoint.metrics["param_norm/stem/.*"] > 0


def test_a_pattern_that_matches_nothing_lists_the_parameters():
    words = r"(?s)'body/.\*' matches no parameter.*stem/kernel"
    for options in {"callbacks": Norms("body/.*")}, {"norms": "body/.*"}:
        with pytest.raises(ValueError, match=words):
            make_loop(**options)


@pytest.mark.slow
def test_setting_them_within_a_span_restarts_its_count(capsys):
    loop = make_loop(stdout=True)
    next(loop)
    loop.norms = [".*"]
    assert "grad_norm/.*" in next(loop).metrics
    loop.watchers.append(lambda step: setattr(loop, "norms", ()))
    last = next(loop)
    assert "grad_norm/.*" not in last.metrics and last.n_completed_steps == 1
    assert "counting starts over" in capsys.readouterr().err


@pytest.mark.slow
def test_fit_reports_them_in_its_history():
    model = ff.Model(MLP(), optax.sgd(0.1), "mse")
    history = model.fit(X, X[:, :1], epochs=2, callbacks=[Norms("head/.*")], verbose=0)
    assert len(history["param_norm/head/.*"]) == 2


def test_those_of_callbacks_and_of_the_task_add_up():
    loop = make_loop([Norms("stem/.*"), Norms("head/.*")], norms=".*")
    assert {f"grad_norm/{name}.*" for name in ("stem/", "head/", "")} <= next(loop).metrics.keys()
