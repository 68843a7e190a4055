"""The networks in Linen; the other rivals use their parameter names."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.workloads import Workload


class MLP(nn.Module):
    n_classes: int
    width: int

    @nn.compact
    def __call__(self, x):
        # One at a time: layers are numbered as they are made.
        x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.n_classes)(x)


class CNN(nn.Module):
    n_classes: int
    first: int
    second: int
    width: int

    @nn.compact
    def __call__(self, x):
        for features in (self.first, self.second):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1)))
        return nn.Dense(self.n_classes)(x)


class ResNet(nn.Module):
    n_classes: int
    width: int
    blocks: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(self.norm(nn.Conv(self.width, (7, 7), 2)(x))), (3, 3), (2, 2))
        for stage, n in enumerate(self.blocks):
            for i in range(n):
                x = self.block(x, self.width << stage, 2 if stage and not i else 1)
        return nn.Dense(self.n_classes)(x.mean((1, 2)))

    def block(self, x, width, stride):
        y = nn.relu(self.norm(nn.Conv(width, (1, 1), use_bias=False)(x)))
        y = nn.relu(self.norm(nn.Conv(width, (3, 3), stride, use_bias=False)(y)))
        y = self.norm(nn.Conv(4 * width, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = self.norm(nn.Conv(4 * width, (1, 1), stride, use_bias=False)(x))
        return nn.relu(x + y)

    def norm(self, x):
        return nn.GroupNorm(4)(x)


class Transformer(nn.Module):
    n_classes: int
    width: int
    n_layers: int
    n_heads: int
    length: int

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(self.n_classes, self.width)(x)
        x = x + nn.Embed(self.length, self.width)(jnp.arange(self.length))
        causal = nn.make_causal_mask(jnp.ones((1, self.length)))
        for _ in range(self.n_layers):
            attention = nn.MultiHeadDotProductAttention(self.n_heads)
            x = x + attention(nn.LayerNorm()(x), mask=causal)
            hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(hidden)
        return nn.Dense(self.n_classes)(nn.LayerNorm()(x))


class Recommender(nn.Module):
    n_classes: int
    n_ids: int
    width: int

    @nn.compact
    def __call__(self, x):
        user = nn.Embed(self.n_ids, self.width)(x[:, 0])
        item = nn.Embed(self.n_ids, self.width)(x[:, 1])
        x = jnp.concatenate([user, item, user * item], axis=-1)
        x = nn.relu(nn.Dense(2 * self.width)(x))
        return nn.Dense(self.n_classes)(x)


class Leaves(nn.Module):
    n_classes: int
    n_leaves: int

    @nn.compact
    def __call__(self, x):
        # Not random: thousands of those take minutes to compile, which is not what is measured.
        constant = nn.initializers.constant(0.01)
        shape = (self.n_classes,)
        rows = [self.param(f"leaf_{i}", constant, shape) for i in range(self.n_leaves)]
        return x * jnp.stack(rows).sum(axis=0)


_MODULES = {
    "mlp": MLP,
    "cnn": CNN,
    "resnet": lambda n_classes, width, *blocks: ResNet(n_classes, width, blocks),
    "transformer": Transformer,
    "recommender": Recommender,
    "leaves": Leaves,
}


def build(workload: Workload) -> nn.Module:
    """Returns the network of a workload."""
    return _MODULES[workload.name](workload.n_classes, *workload.sizes)


def initial_params(workload: Workload) -> Any:
    """Returns the initial parameters of every rival, as NumPy arrays."""
    init = jax.jit(build(workload).init)
    return jax.tree.map(np.asarray, init(jax.random.key(0), workload.x[:1])["params"])


def by_path(params: Any) -> dict[str, np.ndarray]:
    """Returns the parameters by path, such as "Dense_0/kernel"."""
    leaves, _ = jax.tree.flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
