"""The strategies that a step must have the same numbers under."""

import jax

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
