"""What TrainLoop promises: when it yields, what it counts, and that nothing is ever lost."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops import (
    Regressor,
    X,
    Y,
    assert_close,
    assert_equal,
    make_loop,
    make_weight_loop,
)
from redex import combinator

import flaxfit as ff

one_weight = functools.partial(make_weight_loop, devices=jax.devices()[:1])

# When it yields.


@pytest.mark.parametrize(
    ("first", "every", "last", "expected"),
    [
        (1, 5, 10, [1, 6, 10]),
        (4, 4, 11, [4, 8, 11]),
        (1, 5, 6, [1, 6]),  # A last step on the grid is yielded once.
        (2, 5, 12, [2, 7, 12]),
        (9, 5, 8, [8]),
    ],
)
def test_checkpoints_come_at_the_first_step_then_every_n_and_at_the_last(
    first, every, last, expected
):
    options = {"first_checkpoint": first, "n_steps_per_checkpoint": every, "n_steps": last}
    checkpoints = list(one_weight(**options))
    assert [c.step for c in checkpoints] == expected
    assert [c.n_completed_steps for c in checkpoints] == np.diff([0, *expected]).tolist()


@pytest.mark.slow
def test_a_run_that_begins_in_the_middle_keeps_the_grid():
    first = one_weight()
    options = {"n_steps": 12, "n_steps_per_checkpoint": 5, "stdout": False}
    loop = ff.TrainLoop(first.state.replace_step(7), first.task, **options)
    assert [(c.step, c.n_completed_steps) for c in loop] == [(11, 4), (12, 1)]


def test_next_next_checkpoint_and_next_step_never_rewrite_n_steps():
    loop = one_weight(n_steps=7, n_steps_per_checkpoint=5)
    steps = [next(loop).step, loop.next_step().step, loop.next_checkpoint().step]
    assert steps == [1, 2, 6]
    assert loop.next_checkpoint().step == 7  # It lies ahead, so it is not passed over.
    assert [loop.next_checkpoint().step, loop.next_step().step] == [11, 12]
    assert loop.n_steps == 7
    with pytest.raises(StopIteration):
        next(loop)
    assert one_weight(n_steps=0).next_checkpoint().step == 1


def test_run_trains_so_many_steps_more_and_run_until_up_to_a_step():
    loop = one_weight(n_steps=5, n_steps_per_checkpoint=4)
    assert [c.step for c in loop.run(7)] == [1, 5, 7]
    assert [c.step for c in loop.run_until(10)] == [9, 10]
    assert [c.step for c in loop.run(2)] == [12]
    assert loop.n_steps == 5


def test_steps_that_are_reached_already_are_said_to_be(capsys):
    loop = one_weight(n_steps=3, n_steps_per_checkpoint=3, stdout=True)
    assert [c.step for c in loop] == [1, 3]
    assert list(loop.run_until(2)) == []
    assert "step 2 is already reached (at step 3)" in capsys.readouterr().err
    again = ff.TrainLoop(loop.state, loop.task, n_steps=3)
    assert list(again) == []
    assert "step 3 is already reached (at step 3)" in capsys.readouterr().err


def test_a_loop_at_its_end_says_so_with_other_data_too(capsys):
    loop = one_weight(n_steps=0, stdout=True)
    loop.data = ff.ArrayStream(X, X, batch_size=16)
    assert list(loop) == [] and "step 0 is already reached" in capsys.readouterr().err


def test_the_first_line_names_parameters_and_devices_once_or_nothing_is_said(capsys):
    list(one_weight(n_steps=2))
    assert capsys.readouterr() == ("", "")
    loop = one_weight(n_steps=2, stdout=True)
    assert [c.step for c in loop] == [1, 2]
    first, *others = capsys.readouterr().err.splitlines()
    n_params = sum(leaf.size for leaf in jax.tree.leaves(loop.state.params))
    devices = loop.strategy.devices
    kind = f"{devices[0].platform} device{'s' * (len(devices) > 1)}"
    assert first == f"flaxfit  training · {n_params} params · {len(devices)} {kind}"
    assert not [line for line in others if "params" in line]


def test_n_steps_and_the_spacing_can_be_set_while_iterating():
    loop, steps = one_weight(n_steps=100, n_steps_per_checkpoint=10), []
    for checkpoint in loop:
        steps.append(checkpoint.step)
        if checkpoint.step == 11:
            loop.n_steps_per_checkpoint = 2
        if checkpoint.step == 15:
            loop.n_steps = 16
    assert steps == [1, 11, 13, 15, 16]


def test_a_setting_changed_by_a_watcher_takes_effect_at_that_step():
    loop = one_weight(n_steps=100, n_steps_per_checkpoint=50, first_checkpoint=50)

    def stop_early(step):
        if step == 7:
            loop.n_steps = 7

    loop.watchers.append(stop_early)
    assert [c.step for c in loop] == [7]


def test_a_second_iterator_continues_the_same_run():
    loop = one_weight(n_steps=4)
    first, second = iter(loop), iter(loop)
    assert [next(each).step for each in (first, second, first, second)] == [1, 2, 3, 4]
    assert loop.step == int(loop.state.step) == 4


# What a checkpoint holds.


def test_the_loss_is_the_mean_over_the_examples_since_the_previous_checkpoint():
    frozen = optax.adam(0.0)
    data = [(X[:16], Y[:16]), (X[16:32], Y[16:32]), (X[32:37], Y[32:37])]
    loop = make_loop(data=data, optimizer=frozen, n_steps_per_checkpoint=2)
    first, second = loop
    outputs = np.asarray(jax.jit(Regressor().apply)({"params": first.state.params}, X))
    errors = outputs - Y
    assert first.loss == pytest.approx(np.mean(errors[:16] ** 2), rel=1e-6)
    assert second.loss == pytest.approx(np.mean(errors[16:37] ** 2), rel=1e-6)
    assert second.metrics["mae"] == pytest.approx(np.mean(np.abs(errors[16:37])), rel=1e-6)
    assert all(type(value) is float for value in second.metrics.values())


def test_every_kept_checkpoint_stays_readable():
    checkpoints = list(make_loop(n_steps=5, devices=jax.devices()))
    kernels = [c.model_params["Dense_0"]["kernel"] for c in checkpoints]
    assert len({float(kernel.sum()) for kernel in kernels}) == 5
    assert {kernel.shape for kernel in kernels} == {(5, 8)}
    assert [int(c.optimizer_state[0].count) for c in checkpoints] == [1, 2, 3, 4, 5]


def test_the_users_own_state_survives_training():
    loop = one_weight()
    state, before = loop.state, loop.state
    list(ff.TrainLoop(state, loop.task, n_steps=3, stdout=False))
    assert_equal(state, before)


@pytest.mark.slow
def test_gradients_are_kept_on_request():
    loop = make_loop(data=[(X, Y)], keep_grads=True)
    params = loop.state.params

    def loss(params):
        outputs: Any = Regressor().apply({"params": params}, X)
        return jnp.mean((outputs - Y) ** 2)

    checkpoint = loop.next_step()
    expected = jax.device_get(jax.jit(jax.grad(loss))(params))
    assert_close(checkpoint.grads, expected, rtol=1e-5, atol=1e-6)
    assert "grad_norm" not in checkpoint.metrics
    with pytest.raises(ValueError, match="keep_grads=True"):
        _ = make_loop().next_step().grads


def test_the_norm_of_the_gradients_is_reported_on_request():
    checkpoint = make_loop(grad_norm=True, keep_grads=True).next_step()
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(checkpoint.grads)))
    assert checkpoint.metrics["grad_norm"] == pytest.approx(norm, 1e-5)


def test_compile_time_is_told_apart_from_training_time():
    first, second = one_weight(n_steps=2)
    assert first.compile_time > 0 and first.elapsed_time > 0
    assert second.compile_time == 0 and second.elapsed_time > 0


# Callbacks.


def test_a_callback_can_stop_the_loop():
    loop = one_weight(n_steps=100, callbacks=lambda c: c.replace(stop=c.step == 3))
    assert [c.step for c in loop] == [1, 2, 3]
    assert list(loop) == []


def test_callbacks_compose_with_redex():
    def add(checkpoint: ff.Checkpoint) -> ff.Checkpoint:
        return checkpoint.with_metrics({"extra": 1.0})

    def double(checkpoint: ff.Checkpoint) -> ff.Checkpoint:
        return checkpoint.with_metrics({"twice": 2 * checkpoint.metrics["extra"]})

    assert one_weight(callbacks=combinator.serial(add, double)).next_step().metrics["twice"] == 2.0


def test_callbacks_are_attached_once_and_closed_when_training_ends():
    class Watcher:
        def __init__(self):
            self.events = []

        def attach(self, loop):
            self.events.append("attach")

        def __call__(self, checkpoint):
            self.events.append(checkpoint.step)

        def close(self):
            self.events.append("close")

    watcher = Watcher()
    list(one_weight(n_steps=2, callbacks=[watcher]))
    assert watcher.events == ["attach", 1, 2, "close"]
    watcher = Watcher()
    with pytest.raises(KeyError), one_weight(callbacks=[watcher]) as loop:
        next(loop)
        raise KeyError
    assert watcher.events == ["attach", 1, "close"]
