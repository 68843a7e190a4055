"""Whether a model computes outputs from several rows: found in its program, never by mistake."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import flaxfit as ff
from flaxfit.data._batch import Batch
from flaxfit.step._row_mixing import mixes_rows

ROWS = np.ones((8, 6), np.float32)
TOKENS = np.ones((8, 5, 6), np.float32)
IDS = np.ones((8, 5), np.int32)
IMAGES = np.ones((8, 8, 8, 3), np.float32)
W = np.ones((6, 6), np.float32)


def is_mixed(function, *inputs):
    batch = Batch(inputs)
    program, results = jax.make_jaxpr(lambda b: function(*b.inputs), return_shape=True)(batch)
    return mixes_rows(program, (batch,), results, results)


def linen(module):
    def apply(x):
        return module.init_with_output(jax.random.key(0), x)[0]

    return apply


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(2)(nn.Conv(4, (3, 3))(x)))
        x = nn.max_pool(nn.avg_pool(x, (2, 2), (2, 2)), (2, 2))
        return nn.Dense(3)(nn.LayerNorm()(x.reshape(len(x), -1)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Embed(10, 6)(x) + self.param("place", nn.initializers.zeros, (5, 6))
        h = h + nn.MultiHeadDotProductAttention(2)(h, h, mask=nn.make_causal_mask(x))
        return nn.Dense(6)(nn.gelu(nn.Dense(12)(nn.LayerNorm()(h)))) @ jnp.ones((6, 10))


def seats(x):
    """The router of a mixture of experts whose experts have three seats each."""
    chosen = jax.nn.one_hot((x @ W).argmax(-1), 6)
    return chosen * (jnp.cumsum(chosen, 0) * chosen <= 3)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: x - x.mean(0), ROWS),
        (lambda x: x / jnp.linalg.norm(x), ROWS),
        (lambda x: jnp.where(jnp.any(x > 0), x, 0 * x), ROWS),
        (lambda x: jax.nn.log_softmax(x @ x.T), ROWS),
        (lambda x: jnp.diag(x @ x.T), ROWS),
        (lambda x: ((x[:, None] - x[None]) ** 2).sum(-1), ROWS),
        (lambda x: jnp.cumsum(x, 0), ROWS),
        (seats, ROWS),
        (lambda x: jax.checkpoint(lambda x: x * jnp.tanh(x).sum())(x), ROWS),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c - c.mean(0), x), ROWS),
        (lambda x: (x.reshape(-1, 6) - x.reshape(-1, 6).mean(0)).reshape(x.shape), TOKENS),
        (lambda x: jnp.repeat(x.reshape(2, 4, 6).mean(0), 2, 0), ROWS),
    ],
)
def test_a_model_that_combines_rows_is_found(function, inputs):
    assert is_mixed(function, inputs)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (linen(Convolutions()), IMAGES),
        (linen(Block()), IDS),
        (linen(nn.RNN(nn.GRUCell(4))), TOKENS),
        (linen(nn.Bidirectional(nn.RNN(nn.LSTMCell(4)), nn.RNN(nn.LSTMCell(4)))), TOKENS),
        (linen(nn.BatchNorm(use_running_average=True)), ROWS),
        (lambda x: jax.nn.softmax(x @ W), ROWS),
        (lambda x: (x @ W, (x**2).mean()), ROWS),  # A penalty.
        (lambda x: jax.vmap(jax.grad(lambda row: row @ W @ row))(x), ROWS),
        (lambda x: jax.grad(lambda x: ((x @ W) ** 2).sum())(x), ROWS),
        (lambda x: jax.lax.map(lambda row: row @ W, x), ROWS),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c @ W, x), ROWS),
        (lambda x: x[jnp.arange(8), x.argmax(1)], ROWS),
        (lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1), ROWS),
        (lambda x: jax.lax.top_k(x, 2)[0], ROWS),
        (lambda x: jnp.fft.fft(x).real, ROWS),
        (lambda x: x.reshape(1, -1) @ jnp.ones((6, 3)), ROWS[:1]),
        (lambda x: jnp.concatenate([x, x[:, ::-1]]).reshape(2, -1, 6).mean(0), ROWS),
        (lambda x: jax.lax.reduce(x.swapaxes(0, 1), -jnp.inf, jnp.logaddexp, (0,)), TOKENS),
        (lambda x: jax.lax.fori_loop(0, 4, lambda i, h: h.swapaxes(0, 1), x), IMAGES),
        (lambda x: x[jnp.argsort(x[:, 0])][jnp.argsort(jnp.argsort(x[:, 0]))], ROWS),
        (lambda x: jnp.linalg.norm(x, axis=-1, keepdims=True) * x, ROWS),
        (lambda x: (x.reshape(-1, 6) @ W).reshape(x.shape), TOKENS),
        (lambda x: jnp.einsum("bth,bsh->bts", x, x), TOKENS),
        (lambda x: jnp.einsum("bhwc,bhwd->bcd", x, x), IMAGES),
        (lambda x: jax.image.resize(x, (8, 4, 4, 3), "bilinear"), IMAGES),
    ],
)
def test_a_model_that_treats_rows_alone_is_not(function, inputs):
    assert not is_mixed(function, inputs)


class Centered(nnx.Module):
    """Subtracts the mean of the batch."""

    def __init__(self):
        self.layer = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        h = self.layer(x)
        return h - h.mean(0)


X = np.random.default_rng(0).normal(size=(22, 4)).astype(np.float32)
Y = X[:, :2]
BATCHES = [slice(0, 8), slice(8, 16), slice(16, 22)]


def make_model(**options):
    return ff.Model(Centered(), optax.sgd(0.1), "mse", **options)


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"strategy": ff.DataParallel(jax.devices()[:1])},
        lambda: {"strategy": ff.Sharded(devices=jax.devices()[:2])},
        lambda: {"run_eagerly": True},
    ],
)
def test_its_batches_are_neither_padded_nor_divided(options):
    graph, params = nnx.split(Centered())

    def loss(params, rows):
        return ((nnx.merge(graph, params)(X[rows]) - Y[rows]) ** 2).mean()

    losses = []
    for rows in BATCHES:
        value, grads = jax.value_and_grad(loss)(params, rows)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(value)
    model = make_model(**options())
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    sizes = [8, 8, 6]
    np.testing.assert_allclose(history["loss"], [np.average(losses, weights=sizes)], rtol=1e-6)
    trained = nnx.merge(graph, params)
    expected = np.concatenate([trained(X[rows]) for rows in BATCHES])
    np.testing.assert_allclose(model.predict(X, batch_size=8), expected, atol=1e-6)
    measured = model.evaluate(X, Y, batch_size=8)["loss"]
    np.testing.assert_allclose(measured, ((expected - Y) ** 2).mean(), rtol=1e-6)


def test_it_is_refused_where_a_batch_is_divided():
    one = {"strategy": ff.DataParallel(jax.devices()[:1])}
    for parts in (make_model(accumulate=2, **each) for each in (one, {"run_eagerly": True})):
        with pytest.raises(ValueError, match="from other examples of its batch.*Use accumulate=1"):
            parts.fit(X, Y, batch_size=8, verbose=0)
    devices = make_model(strategy=ff.DataParallel(jax.devices()[:2]))
    for call in (devices.fit, devices.evaluate, lambda x, y, **options: devices.predict(x)):
        with pytest.raises(ValueError, match=r"Use strategy=Sharded\(\), or one device"):
            call(X, Y, verbose=0)


def test_random_masks_are_no_mixing_where_nothing_is_traced():
    module = nn.Sequential([nn.Dense(8), nn.Dropout(0.5, deterministic=False), nn.Dense(2)])
    model = ff.Model(module, optax.sgd(0.1), "mse", run_eagerly=True, accumulate=2)
    model.fit(X, Y, batch_size=8, verbose=0)  # Is not refused.
    assert model.step == 3


def test_pad_false_holds_in_predict_too():
    sizes = []

    def apply(variables, x, **_):
        sizes.append(len(x))
        return x * variables["params"]

    strategy = ff.DataParallel(jax.devices()[:1])
    task = {"optimizer": optax.sgd(0.1), "loss": "mse", "pad": False, "strategy": strategy}
    model = ff.Model((lambda rngs, x: {"params": jnp.ones(())}, apply), **task)
    model.build(X)
    sizes.clear()
    assert len(model.predict(X, batch_size=8)) == 22 and {*sizes} == {8, 6}
