"""Unfreeze: frozen parameters begin to move when they should, and only then."""

import flax.linen as nn
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit.callbacks import Unfreeze

x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
y = x.sum(1, keepdims=True)
module = nn.Sequential([nn.Dense(n, kernel_init=nn.initializers.ones) for n in (4, 4, 1)])
FROZEN = ["layers_0/.*", "layers_1/.*"]


def moves(checkpoints, start):
    """The layers that each checkpoint has moved."""
    found, before = [], start
    for checkpoint in checkpoints:
        params = checkpoint.state.params
        found.append(
            "".join(
                str(i)
                for i in range(3)
                if (params[f"layers_{i}"]["kernel"] != before[f"layers_{i}"]["kernel"]).any()
            )
        )
        before = params
    return found


def make_loop(callbacks, n_steps=5):
    task = ff.TrainTask(module.apply, optax.adam(0.01), "mse", [(x, y)] * 9, freeze=FROZEN)
    return ff.TrainLoop(module.init, task, 0, n_steps=n_steps, callbacks=callbacks, stdout=False)


@pytest.mark.slow
def test_parameters_begin_to_move_after_their_checkpoint(capsys):
    loop = make_loop([Unfreeze({2: "layers_1/.*", 4: [".*"]})])
    start = loop.state.params
    assert moves(loop, start) == ["2", "2", "12", "12", "012"]
    assert capsys.readouterr().err.count("more parameter arrays are trained") == 2


@pytest.mark.slow
def test_in_a_fit_epochs_are_counted():
    model = ff.Model(module, optax.adam(0.01), "mse", freeze=FROZEN)
    seen = []
    model.fit(x, y, epochs=3, batch_size=4, callbacks=[Unfreeze({2: ".*"}), seen.append], verbose=0)
    assert moves(seen[1:], seen[0].state.params) == ["2", "012"]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_what_was_unfrozen_by_then():
    first = Unfreeze({2: "layers_1/.*", 4: ".*"})
    list(make_loop([first], n_steps=3))
    loop = make_loop([second := Unfreeze({2: "layers_1/.*", 4: ".*"})], n_steps=3)
    second.set_state(first.get_state())
    assert moves(loop, loop.state.params) == ["12", "012", "012"]


@pytest.mark.slow
def test_a_fit_that_is_killed_after_the_first_unfreezing_is_resumed(tmp_path):
    class Killed(Exception):
        pass

    def kill(checkpoint):
        if checkpoint.step == 8:
            raise Killed

    def fit(callbacks):
        model = ff.Model(module, optax.adam(0.01), "mse", freeze=FROZEN)
        model.fit(
            x,
            y,
            epochs=3,
            batch_size=4,
            callbacks=[Unfreeze({1: ".*"}), *callbacks],
            checkpoint_dir=tmp_path,
            verbose=0,
        )
        return model

    with pytest.raises(Killed):
        fit([kill])
    assert fit([]).step == 12


@pytest.mark.parametrize("schedule", [{}, {0: ".*"}, {"1": ".*"}, {1: []}, {1: ""}])
def test_a_schedule_that_can_never_act_is_refused(schedule):
    with pytest.raises(ValueError, match="Unfreeze needs patterns"):
        Unfreeze(schedule)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"matches no parameter; frozen are: layers_0/bias"):
        make_loop([Unfreeze({1: "layer_1/.*"})])


def test_a_task_that_freezes_nothing_is_refused():
    task = ff.TrainTask(module.apply, optax.adam(0.01), "mse", (x, y))
    with pytest.raises(ValueError, match="the task freezes no parameter"):
        ff.TrainLoop(module.init, task, 0, callbacks=[Unfreeze({1: ".*"})], stdout=False)
