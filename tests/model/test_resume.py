"""fit with a folder: an interrupted call, run again, ends as if it had never been interrupted."""

import hashlib
import signal
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from checkpoint_files import data_files
from internals import loop_of_model, programs_of
from loops import waves
from marks import thorough, usual

import flaxfit as ff
from flaxfit.callbacks import EarlyStopping, SaveOnSignal, StopOnNaN, Timer, every
from flaxfit.callbacks._history import History
from flaxfit.checkpoints import CheckpointFileWriter, latest, list_steps

rng = np.random.default_rng(0)
X = rng.normal(size=(50, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
        return nn.Dense(1)(x)


class Interruption(Exception):
    pass


def interrupt_at(step):
    def callback(checkpoint):
        if checkpoint.step == step:
            raise Interruption

    return callback


def network():
    """A model with every kind of state that a run has to resume, on several devices."""
    return ff.Model(Net(), optax.adam(1e-2), "mse", ["mae"])


def layer():
    module = nn.Dense(1, kernel_init=waves)
    return ff.Model(module, optax.sgd(1e-2), "mse", ["mae"])


def train(folder, data=(X, Y), callbacks=(), *, make=layer, **options):
    model = make()
    x, y = data if isinstance(data, tuple) else (data, None)
    size = {"batch_size": 16} if isinstance(data, tuple) else {}
    options = {"epochs": 5, "verbose": 0, **size, **options}
    history = model.fit(
        x, y, validation_data=(X, Y), callbacks=list(callbacks), checkpoint_dir=folder, **options
    )
    return model, history


def fingerprint(model, history):
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model.state.replace(key=()))]
    return hashlib.sha256(b"".join(leaves)).hexdigest(), history.steps, dict(history)


class Loader:
    """Batches of unknown number, which are read ahead."""

    def __iter__(self):
        return iter([(X[:16], Y[:16]), (X[16:32], Y[16:32]), (X[32:48], Y[32:48])])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "options"),
    [
        ((X, Y), {}),
        thorough((X, Y), {"steps_per_execution": 2}),
        thorough(list(Loader()), {}),
        thorough(list(Loader()), {"steps_per_execution": 2}),
        (Loader(), {"make": layer}),
        thorough(Loader(), {"steps_per_execution": 2}),
    ],
    ids=["arrays", "arrays-several", "list", "list-several", "loader", "loader-several"],
)
def test_an_interrupted_call_ends_as_the_whole_one(tmp_path, data, options):
    options = {"make": network, **options}
    whole = fingerprint(*train(tmp_path / "whole", data, **options))
    folder, n = tmp_path / "run", 4 if isinstance(data, tuple) else 3
    for epoch in (2, 4):
        with pytest.raises(Interruption):
            train(folder, data, [interrupt_at(epoch * n)], **options)
    assert list_steps(folder)[-1] == 3 * n
    assert fingerprint(*train(folder, data, **options)) == whole


class Shuffling:
    """Batches by index of rows that a generator of its own shuffles after each pass."""

    def __init__(self):
        self.rng, self.rows = np.random.default_rng(0), np.arange(len(X))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = self.rows[index * 16 : index * 16 + 16]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.rng.shuffle(self.rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [thorough({"shuffle": True}), {"shuffle": True, "steps_per_epoch": 6}]
)
def test_an_interrupted_call_on_batches_by_index_ends_as_the_whole_one(tmp_path, options):
    whole = fingerprint(*train(tmp_path / "whole", Shuffling(), **options))
    n = options.get("steps_per_epoch", 4)
    with pytest.raises(Interruption):
        train(tmp_path / "run", Shuffling(), [interrupt_at(3 * n)], **options)
    assert fingerprint(*train(tmp_path / "run", Shuffling(), **options)) == whole
    in_order = fingerprint(*train(tmp_path / "other", Shuffling(), **{**options, "shuffle": False}))
    assert in_order != whole


@pytest.mark.slow
def test_a_finished_call_returns_at_once(tmp_path, capsys):
    first = fingerprint(*train(tmp_path, list(Loader()), epochs=3))
    model, history = train(tmp_path, list(Loader()), epochs=2, verbose=2)
    assert fingerprint(model, history) == first
    assert not programs_of(loop_of_model(model))
    assert "this run is complete: 3 epochs are done" in capsys.readouterr().err


def test_more_epochs_go_on(tmp_path):
    whole = fingerprint(*train(tmp_path / "whole", epochs=6))
    train(tmp_path / "run", epochs=4)
    assert fingerprint(*train(tmp_path / "run", epochs=6)) == whole


@pytest.mark.slow
def test_what_callbacks_remember_survives(tmp_path):
    def stop():
        return EarlyStopping("mae", mode="max", patience=3, restore_best=False)

    _, whole = train(tmp_path / "whole", callbacks=[stop()], epochs=20)
    with pytest.raises(Interruption):
        train(tmp_path / "run", callbacks=[stop(), interrupt_at(12)], epochs=20)
    _, history = train(tmp_path / "run", callbacks=[stop()], epochs=20)
    assert history.steps == whole.steps and len(whole.steps) < 20
    model, again = train(tmp_path / "run", callbacks=[stop()], epochs=20)
    assert again.steps == whole.steps and not programs_of(loop_of_model(model))


@pytest.mark.slow
def test_a_later_fit_of_the_same_model_saves_on_in_a_folder_that_a_restart_refuses(tmp_path):
    model, _ = train(tmp_path, epochs=2)
    options = {"batch_size": 16, "verbose": 0, "checkpoint_dir": tmp_path}
    assert model.fit(X, Y, **options).steps == [12] and list_steps(tmp_path) == [8, 12]
    with pytest.raises(ValueError, match=r"began at step 8\. Run the earlier calls first"):
        train(tmp_path, epochs=2)
    with pytest.raises(FileNotFoundError, match="no checkpoint of a call of fit that began at ste"):
        model.fit(X, Y, **options, resume=True)
    with pytest.raises(ValueError, match="is not empty: it holds 12, 8"):
        model.fit(X, Y, **options, resume=False)
    model = layer()
    model.load(tmp_path, which=8)
    assert model.fit(X, Y, **options, resume=True).steps == [12]
    model = layer()
    model.load(tmp_path, which=8)
    for file in data_files(tmp_path / "12"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="newest intact checkpoint, of step 8, is of another call"):
        model.fit(X, Y, **options)


@pytest.mark.slow
def test_a_loaded_model_is_not_resumed_from_the_folder_that_it_was_loaded_from(tmp_path):
    train(tmp_path, epochs=1)
    model = layer()
    model.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="that began at step 4, where the model is"):
        model.fit(X, Y, checkpoint_dir=tmp_path, verbose=0, resume=True)


def stopping():
    return EarlyStopping("mae", mode="max", patience=1)


def lower_rate(model, folder):
    model.compile(ff.optim.OptimizerDef(optax.adam, learning_rate=1e-3), "mae")


def freeze(model, folder):
    model.freeze = [".*/bias"]


def load(model, folder):
    model = network()
    model.load(folder)
    return model


STAGES = {
    "the same model": lambda model, folder: None,
    "another optimizer": lower_rate,
    "frozen parameters": freeze,
    "a loaded model": load,
}


@pytest.mark.slow
@pytest.mark.parametrize("between", usual("the same model", "a loaded model", of=STAGES))
def test_a_killed_script_of_two_calls_ends_as_the_whole_one(tmp_path, between, capfd):
    def script(folder, *callbacks):
        """The first call ends early, with its best weights; the second has other data."""
        given, first = [stopping(), *callbacks], folder / "first"
        model, history = train(first, callbacks=given, make=network)
        model = STAGES[between](model, first) or model
        x, y, size = X[:36], Y[:36], {"batch_size": 12, "epochs": 4, "verbose": 0}
        later = model.fit(x, y, callbacks=callbacks, checkpoint_dir=folder / "later", **size)
        return fingerprint(model, history), fingerprint(model, later)

    whole = script(tmp_path / "whole")
    folder, first = tmp_path / "run", whole[0][1][-1]
    for step in 4, first + 6, first + 9:
        with pytest.raises(Interruption):
            script(folder, interrupt_at(step))
    assert list_steps(folder / "later") == [first + 3, first + 6]
    assert script(folder) == whole == script(folder)
    assert not any("superseded" in entry.name for entry in (folder / "later").iterdir())
    assert "a callback ended it after" in capfd.readouterr().err


class Failing:
    """Raises before the first step."""

    def attach(self, loop):
        loop.on.before_span.append(self)

    def __call__(self, checkpoint):
        raise Interruption


@pytest.mark.slow
def test_what_is_saved_before_the_first_step_of_a_second_call_is_of_that_call(tmp_path):
    def script(folder, *callbacks):
        model, history = train(folder / "first", epochs=2)
        size = {"batch_size": 10, "epochs": 2, "verbose": 0}
        later = model.fit(
            X[:30], Y[:30], callbacks=callbacks, checkpoint_dir=folder / "later", **size
        )
        return fingerprint(model, history), fingerprint(model, later)

    whole = script(tmp_path / "whole")
    with pytest.raises(Interruption):
        script(tmp_path / "run", SaveOnSignal(grace_seconds=None, on_exception=True), Failing())
    assert list_steps(tmp_path / "run" / "later") == [8]
    assert script(tmp_path / "run") == whole


@pytest.mark.slow
def test_a_model_that_is_set_back_does_not_resume_its_own_call(tmp_path):
    model, _ = train(tmp_path, epochs=1)
    start = model.state.replace(step=np.int32(0))
    folder, train_on = tmp_path / "other", {"batch_size": 16, "epochs": 2, "verbose": 0}
    model.state = start
    with pytest.raises(Interruption):
        model.fit(X, Y, checkpoint_dir=folder, callbacks=interrupt_at(8), **train_on)
    model.state = start
    assert model.fit(X, Y, checkpoint_dir=folder, **train_on).steps == [4, 8]
    model.state = start
    with pytest.raises(ValueError, match="again from step 0: an earlier call of fit on this model"):
        model.fit(X, Y, checkpoint_dir=folder, **train_on)


@pytest.mark.slow
def test_a_run_that_does_not_say_where_it_began_is_that_of_a_fresh_model(tmp_path, monkeypatch):
    get_state = History.get_state

    def old(history):
        return {n: value for n, value in get_state(history).items() if n != "first_step"}

    monkeypatch.setattr(History, "get_state", old)
    train(tmp_path, epochs=1)
    monkeypatch.undo()
    for epochs in 2, 3:
        assert train(tmp_path, epochs=epochs)[0].step == 4 * epochs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Timer(n_steps=6), ", as the budget of 6 steps is used up."),
        thorough(lambda: lambda checkpoint: checkpoint.replace(stop=checkpoint.epoch == 1), "."),
    ],
    ids=["Timer", "function"],
)
def test_a_run_that_a_callback_ended_says_so_and_how_to_train_on(tmp_path, capfd, make, reason):
    train(tmp_path / "run", callbacks=[make()])
    assert train(tmp_path / "run")[1].n_epochs == 2
    words = " ".join(capfd.readouterr().err.split())
    assert f"a callback ended it after 2 of 5 epochs{reason} To train on, call model.load" in words
    model = layer()
    model.load(tmp_path / "run")
    history = model.fit(
        X, Y, epochs=5, initial_epoch=2, checkpoint_dir=tmp_path / "other", verbose=0, batch_size=16
    )
    assert history.epoch == [2, 3, 4]


@pytest.mark.slow
def test_resume_is_asked_for_or_ruled_out(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        train(tmp_path / "run", resume=True)
    train(tmp_path / "run", epochs=1, resume=False)
    with pytest.raises(ValueError, match="is not empty: it holds 4"):
        train(tmp_path / "run", resume=False)
    assert train(tmp_path / "run", resume=True)[0].step == 20
    with pytest.raises(ValueError, match="'auto', True or False"):
        train(tmp_path / "run", resume="always")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty: it holds notes.txt"):
        train(tmp_path / "other", resume=False)


@pytest.mark.slow
def test_epochs_of_another_length_and_other_data_are_refused(tmp_path):
    train(tmp_path, epochs=1)
    with pytest.raises(ValueError, match="with 3 steps per epoch: its 1 epochs took 4 steps"):
        train(tmp_path, steps_per_epoch=3)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(ValueError, match="Cannot resume in other data"):
        train(tmp_path, batch_size=8)


@pytest.mark.slow
def test_a_writer_in_the_place_of_the_folder_says_what_is_kept(tmp_path):
    writer = CheckpointFileWriter(tmp_path, keep=1)
    for _ in range(2):
        assert train(writer, epochs=3)[0].step == 12 and list_steps(tmp_path) == [12]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["checkpoint_dir", thorough("callbacks")])
def test_a_backup_is_deleted_when_training_has_succeeded_and_not_before(tmp_path, place):
    folder = tmp_path / "backup"

    def attempt(*callbacks):
        writer = CheckpointFileWriter(folder, delete_checkpoint=True)
        is_one = place == "callbacks"
        given = [every(4, writer), *callbacks] if is_one else callbacks
        return train(None if is_one else writer, epochs=2, callbacks=given)

    with pytest.raises(Interruption):
        attempt(interrupt_at(8))
    assert list_steps(folder) == [4]
    assert attempt()[0].step == 8
    assert not folder.exists()


def backed_up(folder, callback=None, rate=0.01, *, deletes=True):
    """Trains a linear model with a backup in a folder; returns the steps that stay there."""
    model = ff.Model(nn.Dense(1, kernel_init=waves), optax.sgd(rate), "mse")
    with CheckpointFileWriter(folder, delete_checkpoint=deletes) as writer:
        given = [] if callback is None else [callback]
        options = {"epochs": 4, "batch_size": 25, "verbose": 0}
        model.fit(X, Y, callbacks=given, checkpoint_dir=writer, **options)
    return list_steps(folder) if folder.exists() else []


@pytest.mark.slow
def test_a_backup_is_deleted_only_when_training_came_to_its_end(tmp_path):
    assert backed_up(tmp_path / "time", Timer(n_steps=3)) == [2, 3]
    assert backed_up(tmp_path / "nan", StopOnNaN(raise_error=False), 1e30) == [2]
    assert backed_up(tmp_path / "nan to the end", rate=1e30) == [6, 8]
    assert backed_up(tmp_path / "no better", EarlyStopping("loss", mode="max")) == []
    assert backed_up(tmp_path / "not finite", EarlyStopping("loss"), 1e30) == [2]
    assert backed_up(tmp_path / "whole") == []
    for deletes in False, True:  # A run that was complete before is not deleted.
        assert backed_up(tmp_path / "before", deletes=deletes) == [6, 8]


RUN = """
import os, signal, sys
import jax
for name, value in {options!r}.items():
    jax.config.update(name, value)
sys.path[:0] = {folders!r}
import test_resume as t

def kill(checkpoint):
    if checkpoint.step == 12:
        os.kill(os.getpid(), signal.SIGKILL)

t.train(sys.argv[1], callbacks=[kill])
"""


@pytest.mark.slow
def test_a_killed_process_loses_no_finished_epoch(tmp_path, run_child):
    """The process of the test goes on where the killed one was; `test_faults` uses new ones."""
    options = {
        "jax_num_cpu_devices": jax.device_count(),
        # What the one compiles, the other only loads.
        "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    own = Path(__file__).parent
    run = RUN.format(folders=[str(own), str(own.parent / "support")], options=options)
    killed = run_child([sys.executable, "-c", run, str(tmp_path / "run")])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert latest(tmp_path / "run") in (4, 8)
    whole = fingerprint(*train(tmp_path / "whole"))
    assert fingerprint(*train(tmp_path / "run")) == whole


@pytest.mark.slow
def test_a_run_without_a_display_is_resumed_with_one_and_back(tmp_path, capsys):
    for epochs, verbose in (1, 0), (2, 2), (3, 0):
        train(tmp_path, epochs=epochs, verbose=verbose)
        said = capsys.readouterr().err
        assert ("restored step" in said) == (verbose == 2) and "ProgressBar" not in said
