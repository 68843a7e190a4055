"""Equal models, such as those of the folds of a cross-validation, are compiled once."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from marks import thorough

import flaxfit as ff
from flaxfit.tree import _shared_programs

rng = np.random.default_rng(0)
X = rng.normal(size=(50, 3)).astype(np.float32)
Y = X @ np.array([1, 2, 3], np.float32)[:, None]
ONE = ff.DataParallel(jax.devices()[:1])


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(x))


@pytest.fixture
def keys(monkeypatch):
    """What was compiled: none yet."""
    kept = type(_shared_programs._programs)()
    monkeypatch.setattr(_shared_programs, "_programs", kept)
    return kept


def trained(module, n=46, seed=0):
    """A model that was trained, and what it measures and predicts."""
    model = ff.Model(module, optax.adam(0.1), "mse", ["mae"], strategy=ONE, seed=seed)
    history = model.fit(
        X[:n], Y[:n], batch_size=8, validation_data=(X, Y), verbose=0, steps_per_execution=1
    )
    return dict(history), model.predict(X).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Net(nnx.Rngs(0)), Linen, thorough(lambda: Net)])
def test_a_fold_after_the_first_compiles_nothing_and_gives_the_same(make, keys):
    first, n = trained(make()), len(keys)
    assert n >= 3  # Steps of training, of validation, of prediction; the first weights of some.
    again = trained(make())
    assert len(keys) == n
    assert again == first
    # Another seed is other numbers, and a fold of a few rows more is the same program.
    trained(make(), n=47, seed=1)
    assert len(keys) == n
    keys.clear()
    assert trained(make()) == first


@pytest.mark.slow
def test_models_that_differ_share_no_step(keys):
    def loss_of(rate=0.1, loss="mse"):
        model = ff.Model(nn.Dense(1), optax.sgd(rate), loss, strategy=ONE)
        return model.fit(X, Y, batch_size=8, verbose=0)["loss"][0]

    targets = [np.full((1,), value, np.float32) for value in (1, 2)]
    losses = [loss_of(), loss_of(rate=0.2)]
    losses += [loss_of(loss=lambda y, t, c=c: (y - t - c) ** 2) for c in targets]
    assert len({*losses}) == 4
