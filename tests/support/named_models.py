"""Models whose dimensions have names, and their states."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import partitioning

import flaxfit as ff

X = np.ones((4, 8), np.float32)


def dense(width, names, name=None, boxed=nn.with_logical_partitioning):
    return nn.Dense(
        width,
        kernel_init=boxed(nn.initializers.ones, names),
        bias_init=boxed(nn.initializers.zeros, names[-1:]),
        name=name,
    )


class Boxed(nn.Module):
    """One square kernel, one that is not, statistics without names."""

    @nn.compact
    def __call__(self, x):
        x = dense(8, ("embed", "square"), "square")(x)
        x = nn.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)(x)
        return dense(4, ("embed", "mlp"), "wide", nn.with_partitioning)(x)


class Annotated(nn.Module):
    """The collections of T5X's models."""

    @nn.compact
    def __call__(self, x):
        w = partitioning.param_with_axes("w", nn.initializers.ones, (8, 4), axes=("embed", "mlp"))
        partitioning.variable_with_axes("cache", "seen", jnp.zeros, (4,), axes=("mlp",))
        return x @ w


def boxed_state(optimizer):
    return ff.init_state(Boxed().init, optimizer, 0, (X,))


def abstract_state(optimizer):
    """The same, its arrays as shapes."""
    return jax.eval_shape(lambda: boxed_state(optimizer))
