"""The tasks of a model: collected metrics are measured in evaluation alone."""

import jax
import numpy as np
import optax
import pytest
import scipy.stats
from flax import linen as nn
from loops import waves

import flaxfit as ff
from flaxfit.callbacks import EarlyStopping
from flaxfit.metrics import collected

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]]) + RNG.normal(size=(90, 1))).astype(np.float32)


def rho(outputs, targets):
    return scipy.stats.spearmanr(outputs, targets).statistic


def make_model(metrics, **options):
    options = {"strategy": ff.DataParallel(jax.devices()[:1]), **options}
    return ff.Model(nn.Dense(1, kernel_init=waves), optax.sgd(0.05), "mse", metrics, **options)


def fit(model, **options):
    options = {"batch_size": 16, "verbose": 0, "validation_data": (X[:37], Y[:37]), **options}
    return model.fit(X, Y, **options)


@pytest.mark.slow
def test_a_collected_metric_is_measured_on_validation_data_and_by_evaluate():
    model = make_model(["mae", collected(rho, mode="max")])
    history = fit(model, epochs=2)
    assert {*history} == {"loss", "mae", "val_loss", "val_mae", "val_rho"}
    expected = rho(model.predict(X[:37]), Y[:37])
    assert history["val_rho"][-1] == pytest.approx(expected, rel=1e-12)
    assert model.evaluate(X[:37], Y[:37])["rho"] == history["val_rho"][-1]


def test_that_it_is_measured_in_evaluation_only_is_said_once(capsys):
    def told(outputs, targets):  # No other test has a metric of this name.
        return 0.0

    metric = collected(told)
    for _ in range(2):
        make_model(["mae", metric])
    assert capsys.readouterr().err.count("told: measured on validation data and by evaluate") == 1


@pytest.mark.slow
def test_values_by_name_are_reported_as_those_of_compute_metrics():
    def compute_metrics(outputs, targets):
        return {"rho": rho(outputs, targets), "size": len(outputs)}

    history = fit(make_model([collected(compute_metrics)]))
    assert history["val_size"] == [37] and {*history} == {"loss", "val_loss", "val_rho", "val_size"}
    assert "val_all_rho" in fit(make_model({"all": collected(compute_metrics)}))


@pytest.mark.slow
def test_early_stopping_and_the_best_checkpoint_see_it(tmp_path):
    values = iter([0.1, 0.5, 0.3, 0.2, 0.4])

    def drawn(outputs, targets):
        return next(values)

    writer = ff.checkpoints.CheckpointFileWriter(tmp_path, monitor="val_drawn")
    stop = EarlyStopping("val_drawn", patience=2)
    model = make_model([collected(drawn, mode="max")])
    history = fit(model, epochs=5, callbacks=[stop], checkpoint_dir=writer)
    assert history["val_drawn"] == [0.1, 0.5, 0.3, 0.2]
    best = ff.checkpoints.CheckpointFileReader(tmp_path, None, which="best").read(None)
    assert best.metrics["val_drawn"] == 0.5


@pytest.mark.slow
def test_it_works_over_a_mesh():
    strategy = ff.Sharded.fsdp(jax.devices()[:4])
    model = make_model([collected(rho)], strategy=strategy)
    fit(model)
    assert model.evaluate(X, Y)["rho"] == pytest.approx(rho(model.predict(X), Y), rel=1e-12)
