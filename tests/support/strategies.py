"""The strategies that a step must have the same numbers under."""

import jax
import jax.numpy as jnp
import numpy as np

import flaxfit as ff


def strategies(n):
    """Functions that make each strategy, on one device or on `n`."""
    devices = jax.devices()[:n]
    return {
        "one device": lambda: ff.DataParallel(devices[:1]),
        "data-parallel": lambda: ff.DataParallel(devices),
        "FSDP": lambda: ff.Sharded.fsdp(devices=devices),
        "virtual replicas": lambda: ff.DataParallel(devices, virtual_replicas=n),
    }


def options_of_loops():
    """The options of loops for each strategy, on up to four devices."""
    devices = jax.devices()[:4]
    return {
        "one": {"devices": devices[:1]},
        "data parallel": {"devices": devices},
        "fsdp": {"strategy": ff.Sharded.fsdp(devices=devices)},
        "virtual": {"strategy": ff.DataParallel(devices[:2], virtual_replicas=4)},
    }


def one_device():
    """Training on one device, whose programs compile in the least time."""
    return ff.DataParallel(jax.devices()[:1])


def assert_same_bits(found, expected):
    """That two trees of arrays and numbers are the same to the bit, wherever they are."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    paths = jax.tree_util.tree_leaves_with_path(found)
    for (path, a), b in zip(paths, jax.tree.leaves(expected), strict=True):
        if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.array_equal(a, b), jax.tree_util.keystr(path)
