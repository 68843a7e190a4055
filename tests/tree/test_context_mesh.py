"""A mesh that the caller has set changes nothing: strategies have devices of their own."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from marks import slow, thorough

import flaxfit as ff

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
KERNEL = (nn.initializers.lecun_normal(), (None, "model"))
ONE, FOUR = (lambda n=n: ff.DataParallel(jax.devices()[:n]) for n in (1, 4))


def sharded():
    return ff.Sharded({"data": 2, "model": 2}, devices=jax.devices()[:4])


def linen():
    return nn.Dense(2, kernel_init=nn.with_partitioning(*KERNEL))


def factory():
    return lambda rngs: nnx.Linear(4, 2, kernel_init=nnx.with_partitioning(*KERNEL), rngs=rngs)


def trained(module, strategy, folder):
    model = ff.Model(module(), optax.sgd(0.1), "mse", strategy=strategy())
    target = np.concatenate((Y, -Y), 1)
    options = {"batch_size": 8, "epochs": 2, "checkpoint_dir": folder, "verbose": 0}
    history = model.fit(X, target, validation_data=(X, target), **options)
    restored = ff.checkpoints.restore(folder).params  # The digests of its arrays are those saved.
    return {**history}, model.evaluate(X, target), model.predict(X), jax.device_get(restored)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, strategy, kind, n",
    [
        (linen, FOUR, AxisType.Auto, 4),
        thorough(factory, ONE, AxisType.Explicit, 2),
        thorough(linen, sharded, AxisType.Auto, 2),
        slow(factory, sharded, AxisType.Explicit, 4),
        thorough(linen, ONE, AxisType.Explicit, 4),
    ],
)
def test_a_model_is_trained_as_it_is_without_a_mesh(tmp_path, module, strategy, kind, n):
    mesh = jax.make_mesh((n,), ("model",), axis_types=(kind,), devices=jax.devices()[:n])
    expected = trained(module, strategy, tmp_path / "expected")
    with jax.set_mesh(mesh):
        found = trained(module, strategy, tmp_path / "found")
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_a_step_goes_on_in_a_mesh_that_is_set_between_steps():
    def loop():
        task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(0.1), "mse", [(X, Y)] * 4)
        return ff.TrainLoop(nn.Dense(1).init, task, 0, strategy=ONE(), stdout=False)

    expected, found = loop(), loop()
    losses = [checkpoint.loss for checkpoint in expected]
    first = found.next_checkpoint().loss
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])):
        assert [first, *(checkpoint.loss for checkpoint in found)] == losses


@pytest.mark.parametrize("strategy", [ONE, slow(FOUR), slow(sharded)])
def test_a_guard_against_transfers_lets_the_library_move_batches(strategy, tmp_path):
    with jax.transfer_guard("disallow"):
        model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", strategy=strategy())
        model.fit(X, Y, batch_size=8, verbose=0, validation_data=(X, Y), checkpoint_dir=tmp_path)
        model.evaluate(X, Y)
        model.predict(X)
        model.train_on_batch(X, Y)
        model.load(tmp_path)
        with pytest.raises(RuntimeError, match="Disallowed host-to-device"):
            _ = jax.numpy.ones(3) + X[:3, 0]


@pytest.mark.slow
def test_a_guard_against_transfers_lets_callbacks_set_and_average():
    optimizer = ff.optim.OptimizerDef(optax.sgd, learning_rate=0.1)

    def model():
        return ff.Model(nnx.Linear(X.shape[1], 1, rngs=nnx.Rngs(0)), optimizer, "mse")

    unfitted, fitted = model(), model()
    plateau = ff.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1e9)
    with jax.transfer_guard("disallow"):
        assert np.isfinite(unfitted.evaluate(X, Y)["loss"])
        callbacks = [plateau, ff.callbacks.AverageWeights(start_from_epoch=2)]
        fitted.fit(X, Y, epochs=3, callbacks=callbacks, verbose=0)
        assert fitted.find_lr(X, Y, batch_size=4)
        task = ff.TrainTask(fitted.module, optimizer, "mse", (X, Y))
        checkpoint = ff.TrainLoop(fitted.module, task, 0, stdout=False).next_step()
        assert isinstance(checkpoint.module(), nnx.Linear)
