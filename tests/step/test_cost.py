"""What a step costs: operations and memory, against counts by hand and the compiler's plans."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from internals import programs_of
from loops import init_of
from marks import thorough

import flaxfit as ff
from flaxfit.step._cost import cost_of, memory_of

x = np.zeros((32, 64), np.float32)
y = np.zeros((32, 128), np.float32)
ONE = jax.devices()[:1]
DENSE = nn.Dense(128)


def loop_of(module=DENSE, *, strategy=None, data=None, **options):
    data = ff.ArrayStream(x, y, batch_size=32, epochs=2) if data is None else data
    task = ff.TrainTask(module.apply, optax.sgd(0.1), "mse", data, **options)
    strategy = strategy or ff.DataParallel(ONE)
    return ff.TrainLoop(init_of(module, 64), task, 0, strategy=strategy, stdout=False)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_recomputation_is_found_inside_of_a_scan(remat):
    body = jax.checkpoint(jnp.sin) if remat else jnp.sin

    def loss(x):
        return jax.lax.scan(lambda x, _: (body(x), None), x, None, length=3)[0]

    assert cost_of(jax.grad(loss), jnp.zeros(())).recomputes == remat
    assert not cost_of(loss, jnp.zeros(())).recomputes


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_counts_as_often_as_it_runs(remat):
    weights, x = jnp.zeros((6, 32, 32)), jnp.zeros((8, 32))

    def layer(x, w):
        # A scan in a scan, and a function compiled on its own.
        return jax.lax.scan(lambda x, _: (jax.jit(jnp.dot)(x, w), None), x, None, length=3)[0], None

    body = jax.checkpoint(layer) if remat else layer
    found = cost_of(lambda w, x: jax.lax.scan(body, x, w)[0], weights, x).flops
    products = 6 * 3 * 2 * 8 * 32 * 32
    assert products <= found <= 1.01 * products


def test_a_step_counts_forward_and_both_backward_products():
    loop = loop_of(nn.Dense(128, use_bias=False))
    forward = 2 * 32 * 64 * 128
    # The gradient of the inputs of the first layer is not needed, and not computed.
    assert 2 * forward < loop.step_flops() < 2.2 * forward


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [thorough({"accumulate": 4}), {"accumulate": 2, "skip_nonfinite": True}]
)
def test_accumulation_and_devices_do_not_change_the_count_by_much(options):
    expected = loop_of().step_flops()
    for strategy in None, ff.DataParallel(), ff.Sharded():
        found = loop_of(strategy=strategy, **options).step_flops()
        np.testing.assert_allclose(found, expected, rtol=0.15)


@pytest.mark.slow
def test_operations_and_memory_are_those_of_any_batch_size():
    loop = loop_of()
    np.testing.assert_allclose(loop.step_flops(320), 10 * loop.step_flops(32), rtol=0.1)
    small, large = loop.step_memory(32), loop.step_memory(1 << 20)
    assert large - small > ((1 << 20) - 32) * (64 + 128) * 4  # Inputs and outputs at least.


@pytest.mark.parametrize(
    "strategy", [thorough(ff.DataParallel(ONE)), ff.DataParallel(), thorough(ff.Sharded())]
)
def test_memory_is_that_of_the_program_that_runs(strategy):
    loop = loop_of(strategy=strategy, data=[(x, y)])
    next(loop)
    (compiled,) = programs_of(loop).values()
    assert loop.step_memory() == memory_of(compiled)


@pytest.mark.slow
def test_asking_trains_nothing_and_loses_no_batch():
    seen = []

    def batches():
        for number in range(3):
            seen.append(number)
            yield x[:8] + number, y[:8]

    loop = loop_of(data=batches())
    assert loop.step_memory() > 0 and loop.step_flops() > 0
    assert (loop.step, seen) == (0, [0])
    assert [checkpoint.step for checkpoint in loop] == [1, 2, 3]


def test_memory_that_is_not_known_is_an_error_in_words():
    with pytest.raises(ValueError, match="memory of a step is unknown"):
        memory_of(lambda x: x)
