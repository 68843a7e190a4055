"""Replicas: what they find on the devices is summed, averaged, or taken of the first."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from internals import programs_of
from marks import thorough

import flaxfit as ff
from flaxfit.step._replicas import Replicas, VirtualReplicas


def states_of(i):
    """The model state of replica number `i`."""
    return {
        "mean": i.astype(jnp.float32),
        "half": i.astype(jnp.bfloat16),
        "count": 10 + i,
        "large": jnp.int32(2**30) + i,
        "flag": i == 0,
        "key": jax.random.key(i),
    }


def check_average(state):
    assert float(state["mean"]) == 1.5 and state["half"].dtype == jnp.bfloat16
    assert int(state["count"]) == 10 and state["count"].dtype == jnp.int32
    assert int(state["large"]) == 2**30
    assert bool(state["flag"]) is True and state["flag"].dtype == jnp.bool_
    assert np.array_equal(jax.random.key_data(state["key"]), jax.random.key_data(jax.random.key(0)))


@pytest.fixture(params=["cpu", "gpu"])
def backend(request, monkeypatch):
    """What the replicas take the backend for: elsewhere than on the CPU they trust XLA with more.

    The program runs on the CPU in any case.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)


def run(strategy, step, x):
    """What a step makes of a batch."""
    parts = strategy.split(x)
    return strategy.compile(step, (np.int32(0), parts))(np.int32(0), parts)


def test_float_state_is_averaged_and_everything_else_is_that_of_replica_0():
    def step(_, x):
        return Replicas("replica").average_state(states_of(x[0]))

    check_average(run(ff.DataParallel(jax.devices()), step, np.arange(4, dtype=np.int32)))


@pytest.mark.parametrize("n", [thorough(1), 2, thorough(4)])
def test_so_is_that_of_virtual_replicas(n, backend):
    strategy = ff.DataParallel(jax.devices()[:n], virtual_replicas=4)

    def step(count, x):
        replicas = VirtualReplicas(4, strategy.axis_name, count)
        states = replicas.each(lambda i, part: states_of(i))(x)
        return replicas.average_state(states)

    check_average(run(strategy, step, np.arange(8, dtype=np.int32)))


@pytest.mark.parametrize("n", [thorough(1), 2, thorough(4)])
def test_virtual_replicas_have_their_rows_and_are_summed_in_pairs(n, backend):
    strategy = ff.DataParallel(jax.devices()[:n], virtual_replicas=4)
    x = np.array([1e8, 1, 3, -1e8, 5, 7, -11, 13], np.float32)

    def step(count, x):
        replicas = VirtualReplicas(4, strategy.axis_name, count)
        found = replicas.each(lambda i, part: {"i": i, "rows": part})(x)
        return replicas.sum(found), replicas.mean(found["rows"]), replicas.least(found)

    total, mean, least = run(strategy, step, x)
    a, b, c, d = x.reshape(4, 2)
    expected = (a + b) + (c + d)
    assert not np.array_equal(expected, a + (b + (c + d)))
    assert np.array_equal(total["rows"], expected) and int(total["i"]) == 6
    assert np.array_equal(mean, expected / 4)
    assert np.array_equal(least["rows"], x.reshape(4, 2).min(0)) and int(least["i"]) == 0


@pytest.mark.slow
def test_one_device_reduces_nothing():
    x = np.ones((8, 2), np.float32)
    task = ff.TrainTask(lambda v, x, **_: (x @ v["params"], {}), optax.sgd(0.1), "mse", (x, x))
    for n, has_any in ((1, False), (2, True)):
        loop = ff.TrainLoop(
            lambda rngs, x: {"params": np.eye(2, dtype=np.float32)},
            task,
            0,
            devices=jax.devices()[:n],
            stdout=False,
        )
        next(loop)
        programs: list[Any] = [*programs_of(loop).values()]
        assert ["all-reduce" in program.as_text() for program in programs] == [has_any]
