"""The axis of replicas, which a model, a loss and a metric may name under every strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from loops import assert_close, small_waves
from marks import thorough

import flaxfit as ff
from flaxfit.strategies import DataParallel, Sharded

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = X.sum(1)


def one(**options):
    return DataParallel(jax.devices()[:1], **options)


class Net(nn.Module):
    """Each of its terms depends on the whole batch, by another function of `jax.lax`."""

    axis: str

    @nn.compact
    def __call__(self, x, train=False):
        axis, n = self.axis, lax.psum(1, self.axis)
        x = nn.Dense(4, kernel_init=small_waves)(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name=axis)(x)
        everyone = lax.all_gather(x, axis, tiled=True)
        own = lax.dynamic_slice_in_dim(everyone, lax.axis_index(axis) * x.shape[0], x.shape[0])
        scattered = lax.psum_scatter(x.sum(0), axis, tiled=True)
        moved = lax.ppermute(x.mean(0), axis, [(i, (i + 1) % n) for i in range(n)])
        terms = [
            own,
            lax.pmean(x.mean(0), axis),
            lax.psum(x.sum(0), axis) / everyone.shape[0],
            lax.all_gather(scattered, axis, tiled=True) / everyone.shape[0],
            lax.pmean(moved, axis),
            (everyone**2).mean(0),
        ]
        total = sum(jnp.sin((i + 1) * term) for i, term in enumerate(terms))
        return nn.Dense(1, kernel_init=small_waves)(total)[:, 0]


def differences(axis):
    def loss(outputs, targets):
        everyone = lax.all_gather(outputs - targets, axis, tiled=True)
        return (outputs - targets - everyone.mean()) ** 2 + (outputs - targets) ** 2

    return loss


def mean_output(outputs, targets):
    return lax.pmean(outputs.mean(), "batch") + 0 * outputs


def fitted(strategy, axis="batch", loss=None, **options):
    loss = differences(axis) if loss is None else loss
    options |= {"strategy": strategy, "seed": 1, "pad": False}  # It looks across the batch.
    model = ff.Model(Net(axis), optax.sgd(0.01), loss, **options)
    return model, model.fit(X, Y, batch_size=16, verbose=0)


@pytest.fixture(scope="module")
def expected():
    return fitted(one(axis_name="batch"), metrics={"mean": mean_output})


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [DataParallel, thorough(Sharded), lambda **options: Sharded(fsdp=True, **options)]
)
def test_a_model_and_a_loss_over_the_axis_give_the_numbers_of_one_device(make, expected):
    model, history = fitted(make(axis_name="batch"), metrics={"mean": mean_output})
    results = []
    for each, numbers in ((model, history), expected):
        state = ff.gather((each.state.params, each.state.model_state))
        measured = each.evaluate(X, Y, batch_size=32)
        outputs = each.predict(X, batch_size=32)
        results.append((numbers["loss"], numbers["mean"], state, dict(measured), outputs))
    assert_close(*results, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_a_model_over_the_axis_can_be_looked_at_and_exported(expected, tmp_path, capsys):
    expected, _ = expected
    assert expected.find_batch_size(X, Y, limit=1e9, largest=4) == 4
    expected.summary()
    assert "BatchNorm" in capsys.readouterr().out
    spec = ff.export.InputSpec((8, 4))
    expected.export(tmp_path / "model.stablehlo", input_spec=spec)
    outputs = ff.export.load(tmp_path / "model.stablehlo")(X[:8])
    np.testing.assert_allclose(outputs, expected.predict(X[:8], batch_size=8), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_axis_is_called_replica_unless_it_is_named():
    assert np.isfinite(fitted(one(), "replica", "mse")[1]["loss"][0])
    with pytest.raises(ValueError, match="Use accumulate=1"):
        fitted(one(), "replica", "mse", accumulate=2)
    assert repr(DataParallel(axis_name="batch")) == "DataParallel(4 cpu devices, axis_name='batch')"
    assert repr(Sharded(axis_name="batch")) == "Sharded(data=4, axis_name='batch')"
    assert DataParallel(axis_name="batch").narrow(6).axis_name == "batch"


@pytest.mark.parametrize("make", [one, DataParallel, Sharded])
@pytest.mark.parametrize("collective", [lax.axis_index, lambda axis: lax.psum(1, axis)])
def test_another_axis_is_refused_and_the_one_that_there_is_named(make, collective):
    strategy = make(axis_name="rows")

    def apply(variables, x, **_):
        return variables["params"] * x[:, 0] + collective("batch"), {}

    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", (X, Y))
    state = ff.TrainState.create(task.optimizer, {"params": jnp.ones(())})
    loop = ff.TrainLoop(state, task, n_steps=1, strategy=strategy, stdout=False)
    expected = (
        f'the axis "batch" in the model.*calls its replicas "rows".*{type(strategy).__name__}'
        r"\(axis_name='batch'\)"
    )
    with pytest.raises(ValueError, match=expected):
        next(loop)


def test_an_axis_has_a_name_and_virtual_replicas_have_none():
    with pytest.raises(TypeError, match="axis_name must be the name"):
        DataParallel(axis_name=1)
    with pytest.raises(ValueError, match="axis_name='batch'. with virtual_replicas"):
        DataParallel(virtual_replicas=4, axis_name="batch")


def test_a_loss_over_the_axis_that_broadcasts_is_refused_as_others_are():
    def loss(outputs, targets):
        return ((outputs - targets) ** 2).mean(-1) + 0 * lax.axis_index("replica")

    model = ff.Model(nn.Dense(1), optax.sgd(0.1), loss, strategy=one())
    with pytest.raises(ValueError, match="broadcasts outputs against targets"):
        model.fit(X, Y, verbose=0)


@pytest.mark.slow
def test_a_batch_size_is_found_for_a_model_that_keeps_statistics():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.BatchNorm(use_running_average=not train)(x)[:, 0]

    model = ff.Model(Normed(), optax.sgd(0.1), "mse")
    assert model.find_batch_size(X, Y, limit=1e9, largest=8) == 8
