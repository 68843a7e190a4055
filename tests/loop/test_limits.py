"""What a step may cost: the host's work, the memory, and the dispatches that wait."""

import gc
import sys
from collections import Counter

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from internals import totals_of
from marks import thorough

import flaxfit as ff
from flaxfit.step._cost import memory_of

ONE = jax.devices()[:1]


def many_arrays(n):
    """A model with that many parameter arrays, and next to no work."""

    def init(rngs, x):
        return {"params": {f"{i:03}": np.ones(3, np.float32) for i in range(n)}}

    def apply(variables, x, **_):
        return x * sum(variables["params"].values()), {}

    return init, apply


def watched(watch, apply, init, data, optimizer, n_steps, **options):
    task = ff.TrainTask(apply, optimizer, "mse", data)
    options |= {"n_steps_per_checkpoint": n_steps, "first_checkpoint": n_steps}
    loop = ff.TrainLoop(init, task, 0, grad_norm=False, stdout=False, **options)
    loop.watchers.append(lambda step: watch(loop, step))
    return loop


@pytest.mark.slow
@pytest.mark.parametrize("resident", [True, False])
def test_the_host_makes_no_more_calls_for_more_arrays(resident):
    def calls_of_a_step(n):
        calls = Counter()

        def count(frame, event, argument):
            if event in ("call", "c_call"):
                calls[getattr(argument, "__qualname__", frame.f_code.co_qualname)] += 1

        def watch(loop, step):
            sys.setprofile(count if 8 <= step < 16 else None)

        init, apply = many_arrays(n)
        x = np.ones((8, 3), np.float32)
        x.flags.writeable = False  # Else batches that happen to be aligned are copied.
        data = ff.ArrayStream(x, x, batch_size=4, resident=resident)
        loop = watched(watch, apply, init, data, optax.adam(0.1), 20, devices=ONE)
        profile = sys.getprofile()
        gc.disable()  # JAX has it call functions, whenever it comes.
        try:
            loop.next_checkpoint()
        finally:
            gc.enable()
            sys.setprofile(profile)
        return calls

    few = calls_of_a_step(2)
    assert few["Stepper.advance"] == 8
    assert calls_of_a_step(40) == few


class Wide(nn.Module):
    """Takes some milliseconds a step, so that dispatches would pile up."""

    width: int = 512

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.tanh(nn.Dense(self.width, kernel_init=nn.initializers.constant(0.01))(x))
        return nn.Dense(1)(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_devices", "resident", "most"),
    [(1, True, 24), thorough(1, False, 24), thorough(2, True, 2), (2, False, 2)],
)
def test_no_more_dispatches_wait_than_that(n_devices, resident, most):
    totals, in_flight = [], []

    def watch(loop, step):
        totals.append(totals_of(loop)["float32"])
        in_flight.append(sum(not each.is_ready() for each in totals))

    x = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)
    data = ff.ArrayStream(x, x[:, :1], batch_size=256, resident=resident)
    options = {"devices": jax.devices()[:n_devices]}
    module = Wide()
    watched(watch, module.apply, module.init, data, optax.sgd(0.1), 48, **options).next_checkpoint()
    assert 1 <= max(in_flight) <= most


def n_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_a_step_needs_the_memory_of_a_hand_written_one():
    x = np.ones((32, 64), np.float32)
    module, optimizer = Wide(), optax.adam(0.1)
    task = ff.TrainTask(module.apply, optimizer, "mse", (x, x[:, :1]))
    loop = ff.TrainLoop(module.init, task, 0, devices=ONE, grad_norm=False, stdout=False)

    def update(state, x, y):
        params, opt_state = state

        def loss(params):
            return optax.losses.squared_error(module.apply({"params": params}, x), y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    state = loop.state.params, loop.state.opt_state
    program = jax.jit(update, donate_argnums=0).lower(state, x, x[:, :1]).compile()
    assert n_bytes(state) < loop.step_memory(32) <= 1.05 * memory_of(program)


def wide_data():
    x = np.ones((64, 64), np.float32)
    return ff.ArrayStream(x, x[:, :1], batch_size=32, resident=False)


def memory_of_arrays():
    """A function that tells how many bytes the arrays take that are made from now on."""
    gc.collect()
    others = {id(x): x for x in jax.live_arrays()}  # Held, so that no other array gets their ids.
    return lambda: sum(x.nbytes for x in jax.live_arrays() if id(x) not in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("holds", "snapshot", "n_states"), [(0, "device", 1), (1, "device", 2), (1, "host", 1)]
)
def test_training_holds_one_state_and_another_where_a_checkpoint_is_held(holds, snapshot, n_states):
    kept, n_bytes_more = [], memory_of_arrays()

    def watch(loop, step):
        if step > 2:
            kept.append(n_bytes_more())

    module, data = Wide(768), wide_data()  # Small states are copied on the host.
    options = {"devices": ONE, "snapshot": snapshot}
    loop = watched(watch, module.apply, module.init, data, optax.adam(0.1), 2, **options)
    size = n_bytes(loop.state.params) * 3  # Two moments besides.
    for checkpoint in loop.run(6):
        if not holds:
            del checkpoint
    assert len(kept) == 4
    assert (n_states - 0.05) * size < max(kept) <= n_states * 1.05 * size


@pytest.mark.slow
def test_fit_lets_go_of_the_copy_that_a_callback_was_given():
    kept, n_bytes_more = [], memory_of_arrays()

    class Watch:
        def attach(self, loop):
            loop.watchers.append(self.watch)

        def watch(self, step):
            if step > 2:  # Behind the first epoch, whose checkpoint it was given.
                kept.append(n_bytes_more())

        def __call__(self, checkpoint):
            assert not checkpoint.is_borrowed

    model = ff.Model(Wide(768), optax.adam(0.1), "mse", strategy=ff.DataParallel(ONE))
    model.fit(wide_data(), epochs=3, verbose=0, callbacks=[Watch()])
    size = n_bytes(model.state.params) * 3
    assert len(kept) == 4 and max(kept) <= 1.05 * size
