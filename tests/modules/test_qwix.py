"""Adapters over weights that Qwix has quantized: nnx modules whose base weights have four bits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from loops import assert_close
from marks import thorough

import flaxfit as ff

X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
Y = X.sum(1, keepdims=True)
STRATEGIES = {
    "one": lambda: ff.DataParallel(jax.devices()[:1]),
    "four": lambda: ff.DataParallel(jax.devices()[:4]),
    "fsdp": lambda: ff.Sharded.fsdp(jax.devices()[:4]),
}

# Qwix calls parts of flax that are deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def adapted(kind):
    qwix = pytest.importorskip("qwix")
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=1.0, weight_qtype=kind)
    net = Net(nnx.Rngs(0))
    return qwix.apply_lora_to_model(net, provider, jnp.zeros((1, 8)), rngs=nnx.Rngs(1))


def by_hand(net, n_steps):
    """The adapters after steps of a plain loop over the whole data."""
    graph, adapters, rest = nnx.split(net, nnx.LoRAParam, ...)
    optimizer = optax.sgd(0.1)
    state = optimizer.init(adapters)

    @jax.jit
    def step(adapters, rest, state):
        def loss(adapters):
            return ((nnx.merge(graph, adapters, rest)(X) - Y) ** 2).mean()

        updates, state = optimizer.update(jax.grad(loss)(adapters), state)
        return optax.apply_updates(adapters, updates), state

    for _ in range(n_steps):
        adapters, state = step(adapters, rest, state)
    return nnx.to_pure_dict(adapters)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        case if case in {("four", "nf4"), ("fsdp", "int4")} else thorough(*case)
        for case in itertools.product(STRATEGIES, ["int4", "nf4"])
    ],
)
def test_adapters_are_trained_as_in_a_plain_loop(strategy, kind):
    expected = by_hand(adapted(kind), n_steps=3)
    net = adapted(kind)
    before = nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.Any(nnx.LoRAParam, nnx.RngState))))
    model = ff.Model(
        net, optax.sgd(0.1), "mse", strategy=STRATEGIES[strategy](), freeze=nnx.Not(nnx.LoRAParam)
    )
    model.fit(X, Y, batch_size=32, epochs=3, verbose=0)
    trained = nnx.to_pure_dict(nnx.state(net, nnx.LoRAParam))
    assert_close(trained, expected, atol=1e-5)
    after = nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.Any(nnx.LoRAParam, nnx.RngState))))
    jax.tree.map(np.testing.assert_array_equal, before, after)
