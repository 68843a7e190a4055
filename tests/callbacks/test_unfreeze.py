"""Unfreeze: frozen parameters begin to move when they should, and only then."""

import itertools

import flax.linen as nn
import numpy as np
import optax
import pytest
from loops import assert_equal, init_of
from marks import thorough

import flaxfit as ff
from flaxfit.callbacks import Unfreeze
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter

x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
y = x.sum(1, keepdims=True)
module = nn.Sequential(tuple(nn.Dense(n, kernel_init=nn.initializers.ones) for n in (4, 4, 1)))
FROZEN = ["layers_0/.*", "layers_1/.*"]


def moves(checkpoints, start):
    """The layers that each checkpoint has moved."""
    found, before = [], start
    for checkpoint in checkpoints:
        now = checkpoint.state.params
        kernels = [(now[name]["kernel"], before[name]["kernel"]) for name in sorted(now)]
        found.append("".join(str(i) for i, (a, b) in enumerate(kernels) if (a != b).any()))
        before = now
    return found


def make_loop(callbacks, n_steps=5, init=None, freeze=FROZEN):
    init = init or init_of(module, 4)
    task = ff.TrainTask(module.apply, optax.adam(0.01), "mse", [(x, y)] * 9, freeze=freeze)
    return ff.TrainLoop(init, task, 0, n_steps=n_steps, callbacks=callbacks, stdout=False)


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


class Killed(Exception):
    pass


def fit(folder, *callbacks, unfreezes=True, **options):
    model = ff.Model(module, optax.adam(0.01), "mse", freeze=FROZEN, **options)
    stages = [Unfreeze({1: "layers_1/.*", 3: ".*"})] if unfreezes else []
    options = {"epochs": 5, "batch_size": 4, "verbose": 0, "checkpoint_dir": folder}
    model.fit(x, y, callbacks=[*stages, *callbacks], **options)
    return model


def fit_until(step, folder, *callbacks, borrows=False, **options):
    """Fits until a callback raises at the checkpoint of a step."""

    def kill(checkpoint):
        if checkpoint.step == step:
            raise Killed

    vars(kill)["borrows"] = borrows
    with pytest.raises(Killed):
        fit(folder, *callbacks, kill, **options)


MORE = {"clip_norm": 1.0, "ema": 0.9}
CASES = [*itertools.product((4, 8, 12, 16, 20), ({}, MORE))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "options"), [case if case == (12, MORE) else thorough(*case) for case in CASES]
)
def test_a_fit_that_is_killed_in_any_stage_is_resumed_by_the_same_script(tmp_path, step, options):
    whole = fit(tmp_path / "whole", **options)
    fit_until(step, tmp_path / "killed", **options)
    resumed = fit(tmp_path / "killed", **options)
    assert resumed.freeze == whole.freeze == ()
    assert_equal(resumed.state.replace(key=()), whole.state.replace(key=()))
    again = fit(tmp_path / "killed", **options)  # It is complete.
    assert again.step == whole.step


class Slower:
    """Sets the learning rate after each checkpoint."""

    borrows = True

    def attach(self, loop):
        self.loop = loop

    def __call__(self, checkpoint):
        self.loop.set_hyperparams(learning_rate=0.1 / checkpoint.step)


@pytest.mark.slow
@pytest.mark.parametrize("borrows", [thorough(False), True])
def test_a_rate_that_is_set_with_the_stage_is_resumed_with_it(tmp_path, borrows):
    whole = fit(tmp_path / "whole", Slower())
    fit_until(8, tmp_path / "killed", Slower(), borrows=borrows)
    resumed = fit(tmp_path / "killed", Slower())
    assert_equal(resumed.state.params, whole.state.params)


@pytest.mark.slow
def test_a_run_of_another_model_is_told_of_as_such(tmp_path):
    fit_until(8, tmp_path)
    other = ff.Model(nn.Dense(1), optax.adam(0.01), "mse", freeze="bias")
    with pytest.raises(ValueError, match="params/layers_0/bias is on disk, not here"):
        other.fit(x, y, verbose=0, callbacks=[Unfreeze({1: "bias"})], checkpoint_dir=tmp_path)


@pytest.mark.slow
def test_a_loop_with_a_reader_begins_with_what_was_trained(tmp_path):
    def loop(n_steps):
        from_file = CheckpointFileReader(tmp_path, init_of(module, 4))
        callbacks = [Unfreeze({2: "layers_1/.*", 4: ".*"}), CheckpointFileWriter(tmp_path)]
        return make_loop(callbacks, n_steps, init=from_file)

    for n_steps in (3, 5, 7):
        with loop(n_steps) as first:
            list(first)
    whole = make_loop([Unfreeze({2: "layers_1/.*", 4: ".*"})], 7)
    list(whole)
    assert_equal(first.state.params, whole.state.params)


@pytest.mark.slow
def test_without_an_unfreeze_another_freeze_is_an_error_that_names_what_was_frozen(tmp_path):
    fit(tmp_path / "all")
    with pytest.raises(ValueError, match="Frozen in the saved run: nothing"):
        fit(tmp_path / "all", unfreezes=False)
    fit_until(12, tmp_path / "some")
    with pytest.raises(ValueError, match="Frozen in the saved run: layers_0/bias, layers_0/kernel"):
        fit(tmp_path / "some", unfreezes=False)


@pytest.mark.parametrize("schedule", [{}, {0: ".*"}, {"1": ".*"}, {1: []}, {1: ""}])
def test_a_schedule_that_can_never_act_is_refused(schedule):
    with pytest.raises(ValueError, match="Unfreeze needs patterns"):
        Unfreeze(schedule)


def test_a_pattern_that_matches_nothing_and_a_task_that_freezes_nothing_are_refused():
    with pytest.raises(ValueError, match=r"matches no parameter; frozen are: layers_0/bias"):
        make_loop([Unfreeze({1: "layer_1/.*"})])
    with pytest.raises(ValueError, match="the task freezes no parameter"):
        make_loop([Unfreeze({1: ".*"})], freeze=())
