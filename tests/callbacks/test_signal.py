"""SaveOnSignal: a run that must end saves within a step, and resumes as if uninterrupted."""

import gc
import hashlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from loops import init_of, small_waves
from marks import slow, thorough

import flaxfit as ff
from flaxfit.callbacks import EarlyStopping, ExitCode, Rollback, SaveOnSignal, every
from flaxfit.checkpoints import (
    CheckpointFileReader,
    CheckpointFileWriter,
    latest,
    list_steps,
    restore,
    save,
)
from flaxfit.model._resume import guards

rng = np.random.default_rng(0)
X = rng.normal(size=(50, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8, kernel_init=small_waves)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(1, kernel_init=small_waves)(
            nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
        )


class Loader:
    """Batches of unknown number, which are read ahead."""

    def __iter__(self):
        return iter([(X[i : i + 16], Y[i : i + 16]) for i in (0, 16, 32)])


class SignalAt:
    """Sends a signal to this process, or raises, after a step."""

    def __init__(self, step, number=signal.SIGTERM, error=None):
        self.step, self.number, self.error = step, number, error

    def attach(self, loop):
        loop.watchers.insert(0, self.watch)

    def watch(self, step):
        if step == self.step:
            if self.error is not None:
                raise self.error
            os.kill(os.getpid(), self.number)

    def __call__(self, checkpoint):
        pass


def guard(**options):
    # No time of grace: it would end the process of the tests.
    return SaveOnSignal(grace_seconds=None, **options)


def train(folder, data, callbacks, module=None, **options):
    model = ff.Model(module or Net(), optax.adam(1e-2), "mse", ["mae"])
    # A loader has batches of its own.
    given = {"x": data} if data is not None else {"x": X, "y": Y, "batch_size": 16}
    stopping = EarlyStopping("val_loss", patience=3, restore_best=False)
    options |= {"callbacks": [*callbacks, stopping, Rollback()], "validation_data": (X, Y)}
    return model, model.fit(**given, checkpoint_dir=folder, epochs=4, verbose=0, **options)


def digest(state):
    leaves = jax.tree.leaves(state.replace(key=jax.random.key_data(state.key)))
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


@pytest.mark.parametrize(
    ("data", "options", "steps"),
    [
        slow(None, {}, (11,)),
        thorough(None, {}, (2, 4, 11, 16)),
        thorough(None, {"steps_per_execution": 2}, (6,)),
        thorough(Loader(), {}, (4, 6)),
    ],
    ids=["arrays", "arrays, often", "several steps", "loader"],
)
def test_a_run_that_was_told_to_end_ends_as_the_whole_one(tmp_path, data, options, steps):
    model, history = train(tmp_path / "whole", data, [guard()], **options)
    whole = digest(model.state), history.steps, dict(history)
    for step in steps:
        with pytest.raises(SystemExit) as end:
            train(tmp_path / "run", data, [SignalAt(step), guard()], **options)
        assert end.value.code == ExitCode.PREEMPTED == 85
        assert list_steps(tmp_path / "run")[-1] == step
    model, history = train(tmp_path / "run", data, [guard()], **options)
    assert (digest(model.state), history.steps, dict(history)) == whole
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def make_loop(init, callbacks):
    module = nn.Dense(1)
    data = ff.ArrayStream(X, Y, batch_size=16, shuffle=True)
    task = ff.TrainTask(module.apply, optax.adam(1e-2), "mse", data, ["mae"])
    options = {"n_steps_per_checkpoint": 5, "n_steps": 12, "callbacks": callbacks}
    return ff.TrainLoop(init or init_of(module, X.shape[1]), task, 0, stdout=False, **options)


def reader(folder):
    return CheckpointFileReader(folder, init_of(nn.Dense(1), X.shape[1]))


def results(loop):
    with loop:
        return {checkpoint.step: checkpoint.metrics for checkpoint in loop}


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_from_between_two_checkpoints(tmp_path):
    loop = make_loop(None, ())
    whole = results(loop)
    assert list(whole) == [1, 6, 11, 12]
    for step in (3, 6, 12):
        # The writer is called rarely; the signal has it save all the same.
        writer = every(1000, CheckpointFileWriter(tmp_path))
        with pytest.raises(SystemExit):
            results(make_loop(reader(tmp_path), [SignalAt(step), guard(), writer]))
        assert list_steps(tmp_path)[-1] == step
    again = make_loop(reader(tmp_path), ())
    assert results(again) == {12: whole[12]}
    assert digest(again.state) == digest(loop.state)


@pytest.mark.slow
def test_a_signal_that_comes_after_the_last_step_is_not_lost(tmp_path):
    loop = make_loop(None, [guard(), CheckpointFileWriter(tmp_path)])
    with pytest.raises(SystemExit):
        for checkpoint in loop:
            if checkpoint.step == 12:
                os.kill(os.getpid(), signal.SIGTERM)
    assert list_steps(tmp_path)[-1] == 12


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_with_its_code_and_nothing_is_lost(tmp_path, capfd):
    for step in (0, 3):
        loop = make_loop(reader(tmp_path), [guard(), CheckpointFileWriter(tmp_path)])
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as end:
            loop.close()
        assert end.value.code == ExitCode.PREEMPTED
        assert f"no step was completed since step {step}" in capfd.readouterr().err
        assert latest(tmp_path) == (step or None)
        save(tmp_path, loop.state.replace_step(3))


@pytest.mark.slow
def test_other_signals_and_a_writer_of_its_own(tmp_path):
    save = guard(writer=CheckpointFileWriter(tmp_path), signals=(signal.SIGUSR1,))
    loop = make_loop(None, [SignalAt(4, signal.SIGUSR1), save])
    with pytest.raises(SystemExit):
        results(loop)
    loop.close()
    assert list_steps(tmp_path) == [4]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


ERRORS = [slow(ValueError("mine")), KeyboardInterrupt(), slow(SystemExit(3))]


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_saves_where_that_is_asked_for(tmp_path, error):
    whole = results(make_loop(None, ()))
    callbacks = [guard(on_exception=True), CheckpointFileWriter(tmp_path)]
    with pytest.raises(type(error)):
        results(make_loop(None, [SignalAt(9, error=error), *callbacks]))
    assert list_steps(tmp_path) == [6, 9]
    assert results(make_loop(reader(tmp_path), ())) == {step: whole[step] for step in (11, 12)}


@pytest.mark.parametrize("error", ERRORS)
def test_saves_in_the_background_are_finished_whatever_happens(tmp_path, error):
    writer = CheckpointFileWriter(tmp_path)
    with pytest.raises(type(error)), make_loop(None, [writer]) as loop:
        for _checkpoint in loop:
            raise error
    assert not [name for name in os.listdir(tmp_path) if name.startswith("saving")]
    assert list_steps(tmp_path) == [1]


def test_a_callback_that_fails_to_close_keeps_no_other_from_it(tmp_path):
    class Failing:
        def __call__(self, checkpoint):
            pass

        def close(self):
            raise ValueError("cannot close")

    with pytest.raises(ValueError, match="cannot close"):
        results(make_loop(None, [Failing(), CheckpointFileWriter(tmp_path)]))
    assert not [name for name in os.listdir(tmp_path) if name.startswith("saving")]
    assert list_steps(tmp_path) == [11, 12]


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to save with"):
        make_loop(None, [guard()])
    with pytest.raises(ValueError, match="grace_seconds must be positive"):
        SaveOnSignal(grace_seconds=0)


@pytest.mark.slow
def test_a_handler_of_the_program_stays(tmp_path):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        train(tmp_path, None, [SignalAt(6)], nn.Dense(1))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM] and list_steps(tmp_path)[-1] == 16


@pytest.mark.slow
def test_a_run_is_guarded_though_a_loop_was_given_up_without_being_closed(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    loop = make_loop(None, [guard(), CheckpointFileWriter(tmp_path / "first")])
    next(loop)
    assert guards([]) == []  # The loop may continue, and handles the signal.
    loop.callbacks[1].close()
    del loop
    gc.collect()
    try:
        assert [type(each) for each in guards([])] == [SaveOnSignal]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loop_that_another_thread_closes_does_not_keep_the_handler(tmp_path):
    signals, before = [], signal.signal(signal.SIGTERM, lambda *arguments: signals.append(1))
    try:
        loop = make_loop(None, [guard(), CheckpointFileWriter(tmp_path)])
        ours = signal.getsignal(signal.SIGTERM)
        with ThreadPoolExecutor(1) as other:
            other.submit(loop.close).result()
        signal.raise_signal(signal.SIGTERM)
        assert signals == [1] and signal.getsignal(signal.SIGTERM) != ours
    finally:
        signal.signal(signal.SIGTERM, before)


def fail_to_complete(monkeypatch, times):
    """Has the n-th saves of this process fail as on a full disk."""
    from flaxfit.checkpoints import _folder

    complete, calls = _folder.complete, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) in times:
            raise OSError(28, "No space left on device")
        return complete(*arguments)

    monkeypatch.setattr(_folder, "complete", failing)


@pytest.mark.parametrize("on_error", ["raise", slow("warn")])
def test_a_save_that_fails_is_not_said_to_be_saved(tmp_path, monkeypatch, capfd, on_error):
    fail_to_complete(monkeypatch, {2})
    writer = CheckpointFileWriter(tmp_path, on_error=on_error)
    with pytest.raises(SystemExit) as end:
        results(make_loop(None, [SignalAt(3), guard(), writer]))
    assert end.value.code == ExitCode.UNSAVED == 86
    assert list_steps(tmp_path) == [1]
    assert "step 3 could not be saved" in capfd.readouterr().err


def test_an_earlier_save_that_failed_does_not_prevent_the_last_one(tmp_path, monkeypatch, capfd):
    fail_to_complete(monkeypatch, {2})
    writer = CheckpointFileWriter(tmp_path)
    writer.asynchronous = True  # Also with a Python that cannot do so while it exits.
    with pytest.raises(SystemExit) as end:
        results(make_loop(None, [SignalAt(7), guard(), writer]))
    assert end.value.code == ExitCode.PREEMPTED
    assert list_steps(tmp_path) == [1, 7]
    assert "Cannot save the checkpoint of step 6" in capfd.readouterr().err


def ask(writer, save):
    """Why nothing would be lost if the run ended now, or None."""
    writer.wait()
    return save._why_nothing_is_lost()


def test_it_is_known_whether_the_present_state_is_on_disk(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    save, writer = guard(), CheckpointFileWriter(tmp_path)
    loop = make_loop(None, [save, writer])

    def set_params(function):
        loop.restore(loop.state.replace(params=jax.tree.map(function, loop.state.params)))

    assert "no step was completed since step 0" in str(ask(writer, save))
    set_params(np.ones_like)  # Step 0 is no longer where it began.
    assert ask(writer, save) is None
    next(loop)
    assert ask(writer, save) == "step 1 is saved"
    set_params(lambda x: x + 1)
    assert ask(writer, save) is None
    next(loop)
    assert ask(writer, save) == "step 6 is saved"
    loop.data = ff.ArrayStream(X, Y, batch_size=16)
    assert ask(writer, save) is None
    loop.callbacks = [save, lambda checkpoint: None, every(100, writer)]
    next(loop)
    assert ask(writer, save) is None
    loop.close()
    assert signal.getsignal(signal.SIGTERM) == before  # Though it was attached twice.


def test_what_was_saved_at_a_signal_stays_saved_when_the_best_weights_are_restored(tmp_path):
    save = guard()
    loop = make_loop(None, [save, every(100, CheckpointFileWriter(tmp_path))])
    first = next(loop)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        next(loop)
    loop.restore(loop.state.replace(params=first.state.params))
    assert save._why_nothing_is_lost() == "step 2 is saved"
    save._received = None
    next(loop)
    assert save._why_nothing_is_lost() is None
    loop.close()


def test_a_step_that_is_trained_again_is_not_said_to_be_saved_before_it_is(tmp_path):
    writer, is_asked = CheckpointFileWriter(tmp_path), [True]
    save = guard(writer=writer)
    loop = make_loop(None, [save, lambda checkpoint: writer(checkpoint) if is_asked else None])
    first, second = next(loop), next(loop)
    assert second.step == 6 and ask(writer, save) == "step 6 is saved"
    loop.restore(first)
    is_asked.clear()
    assert next(loop).step == 6 and ask(writer, save) is None
    loop.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_after_a_change_of_the_saved_step_saves_it_again(
    tmp_path, monkeypatch, capfd, fails
):
    fail_to_complete(monkeypatch, {2} if fails else set())
    loop = make_loop(None, [guard(), CheckpointFileWriter(tmp_path)])
    checkpoint = next(loop)
    changed = checkpoint.state.replace(params=jax.tree.map(np.zeros_like, checkpoint.state.params))
    loop.restore(checkpoint.replace(state=changed))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        loop.close()
    assert end.value.code == (ExitCode.UNSAVED if fails else ExitCode.PREEMPTED)
    if fails:
        assert "step 1 could not be saved" in capfd.readouterr().err
    else:
        assert list_steps(tmp_path) == [1]
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(restore(tmp_path).params))
