"""Steps that stand out from recent ones, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.optim._spikes import ENOUGH, LENGTH, no_recent, stands_out

rng = np.random.default_rng(0)
judge = jax.jit(stands_out, static_argnums=3)


def after(losses, norms=None, n_deviations=4.0):
    """The judgements of a series of steps, and the ring after them."""
    recent, found = no_recent(), []
    for loss, norm in zip(losses, losses if norms is None else norms, strict=True):
        is_spike, recent = judge(recent, jnp.float32(loss), jnp.float32(norm), n_deviations)
        found.append(bool(is_spike))
    return found, recent


def test_a_step_is_compared_with_the_mean_and_the_deviation_of_the_ring():
    losses = rng.normal(5, 1, LENGTH + 30)
    _, recent = after(losses, n_deviations=100.0)
    last = losses[-LENGTH:]
    limit = last.mean() + 4 * last.std()
    for factor, expected in ((0.999, False), (1.001, True)):
        is_spike, _ = judge(recent, jnp.float32(factor * limit), jnp.float32(0), 4.0)
        assert bool(is_spike) is expected
        is_spike, _ = judge(recent, jnp.float32(0), jnp.float32(factor * limit), 4.0)
        assert bool(is_spike) is expected


def test_no_step_stands_out_before_half_the_ring_is_known():
    losses = rng.uniform(1, 2, ENOUGH + 1)
    losses[ENOUGH - 1] = 100
    assert not any(after(losses)[0])
    losses[ENOUGH - 1], losses[ENOUGH] = 1, 100
    assert after(losses)[0] == [False] * ENOUGH + [True]


def test_a_low_loss_never_stands_out():
    losses = np.append(rng.uniform(1, 2, LENGTH), -1e6)
    assert not any(after(losses, np.ones(len(losses)))[0])


def test_a_spike_does_not_hide_the_next_one():
    losses = np.append(rng.uniform(1, 2, LENGTH), [1e30, 1e30, 1.5, 10.0])
    assert after(losses)[0][-4:] == [True, True, False, True]


def test_a_level_that_stays_is_learned():
    losses = np.concatenate([rng.uniform(1, 2, LENGTH), rng.uniform(4, 5, LENGTH)])
    found, _ = after(losses)
    assert found[LENGTH] and not any(found[-LENGTH // 2 :])


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
def test_a_constant_does_not_stand_out_by_its_rounding(value):
    assert not any(after([value] * (LENGTH + 5))[0])
