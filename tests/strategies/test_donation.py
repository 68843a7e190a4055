"""Every strategy donates the state to the step, one or several at once, and keeps the user's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import diagonal

import flaxfit as ff

X = np.arange(32, dtype=np.float32).reshape(8, 4)
STRATEGIES = {
    "data": lambda: ff.DataParallel(jax.devices()[:2]),
    "virtual": lambda: ff.DataParallel(jax.devices()[:2], virtual_replicas=4),
    "whole": lambda: ff.Sharded(devices=jax.devices()[:2]),
    "fsdp": lambda: ff.Sharded.fsdp(jax.devices()[:2]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("n_steps", "name"), diagonal([1, 2], STRATEGIES))
def test_a_step_uses_up_the_state_of_the_loop_but_not_that_of_the_user(name, n_steps):
    given = ff.init_state(
        lambda rngs, x: {"params": jnp.ones((1024, 4))}, optax.sgd(0.1), 0, (X[:1],)
    )
    task = ff.TrainTask(
        lambda v, x, **_: (x * v["params"].mean(0), {}), optax.sgd(0.1), "mse", [(X, X)] * n_steps
    )
    loop = ff.TrainLoop(
        given,
        task,
        steps_per_call=n_steps,
        first_checkpoint=n_steps,
        strategy=STRATEGIES[name](),
        stdout=False,
    )
    held, kept = loop.state_in_place.params, loop.state.params
    assert next(loop).step == n_steps
    assert held.is_deleted()
    for params in (given.params, kept):
        np.testing.assert_array_equal(params, np.ones((1024, 4)))
