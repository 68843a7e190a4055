"""A loop with a writer and a reader, ended at any instant and started again, ends the same."""

import hashlib
import json
import os
import signal

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from marks import thorough

import flaxfit as ff
from flaxfit.callbacks import EarlyStopping, Rollback, SaveOnSignal, every
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter, list_steps

rng = np.random.default_rng(0)
X = rng.normal(size=(32, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Interruption(Exception):
    pass


class At:
    """Interrupts, or sends a signal to this process, after a step."""

    def __init__(self, step=None, number=None):
        self.step, self.number = step, number

    def attach(self, loop):
        loop.watchers.insert(0, self.watch)

    def watch(self, step):
        if step == self.step:
            if self.number is None:
                raise Interruption
            os.kill(os.getpid(), self.number)

    def __call__(self, checkpoint):
        pass


def measure(checkpoint):
    """A metric that is best at step 6."""
    return checkpoint.with_metrics({"val_loss": abs(checkpoint.step - 6.0)})


def digest(state):
    leaves = jax.tree.leaves(state.replace(key=jax.random.key_data(state.key)))
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def plain(state):
    return jax.tree.map(lambda x: np.asarray(x).tolist(), state)


def batches():
    for i in range(1, 31):
        yield (X * np.nan if i in (3, 9) else X), Y


def run(folder, at=None, writer_first=False):
    """All that is left of a run; None if it was interrupted."""
    history, stopping, rollback = ff.History(), EarlyStopping(patience=4), Rollback()
    task = ff.TrainTask(nn.Dense(1).apply, optax.adam(0.01), "mse", batches)
    callbacks = [measure, history.append, every(1, stopping), rollback]
    # Wherever it stands.
    callbacks.insert(0 if writer_first else 4, CheckpointFileWriter(folder))
    loop = ff.TrainLoop(
        CheckpointFileReader(folder, nn.Dense(1).init),
        task,
        0,
        n_steps_per_checkpoint=2,
        first_checkpoint=2,
        callbacks=[*callbacks, SaveOnSignal(grace_seconds=None), at or At()],
        stdout=False,
    )
    try:
        with loop:
            for _ in loop:
                pass
    except (Interruption, SystemExit):
        return None
    assert not (at and at.step)
    return (
        digest(loop.state),
        loop.stopped,
        {name: list(map(str, values)) for name, values in history.items()},
        history.steps,
        plain(stopping.get_state()),
        plain(rollback.get_state()),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    result = run(folder)
    assert result is not None
    assert result[1] and result[3] == [2, 4, 6, 8, 10, 12, 14] and result[5] == {"n_rollbacks": 2}
    return folder, result


@pytest.mark.slow
@pytest.mark.parametrize(
    "instants",
    [
        thorough([At(5), At(12)]),
        [At(9, signal.SIGTERM), At(13, signal.SIGTERM)],
        [At(3, signal.SIGTERM)],
        thorough([At(n, signal.SIGTERM) for n in range(4, 15)]),
        thorough([At(n) for n in range(1, 15)]),
    ],
    ids=["killed", "told to end", "in what is not finite", "always told to end", "always killed"],
)
def test_a_loop_that_is_started_again_ends_as_the_whole_one(tmp_path, whole, instants):
    for i, at in enumerate(instants):
        assert run(tmp_path, at, writer_first=i % 2 == 0) is None
    assert run(tmp_path) == whole[1]


@pytest.mark.slow
def test_a_loop_that_was_stopped_stays_stopped_with_the_best_weights(whole):
    folder, result = whole
    steps = list_steps(folder)
    assert run(folder) == result
    assert list_steps(folder) == steps
    found = CheckpointFileReader(folder).read()
    assert found is not None
    assert found.stop and found.history["steps"] == result[3]
    assert set(found.callback_states) == {"EarlyStopping", "Rollback"}
    loop = ff.TrainLoop(
        CheckpointFileReader(folder, nn.Dense(1).init),
        ff.TrainTask(nn.Dense(1).apply, optax.adam(0.01), "mse", batches),
        n_steps_per_checkpoint=2,
        stdout=False,
    )
    assert list(loop.run_until(20)) == []


@pytest.mark.slow
def test_what_is_best_right_now_is_not_written_twice(tmp_path):
    run(tmp_path / "at the best", At(7))
    run(tmp_path / "after it", At(9))

    def written(folder):
        found = CheckpointFileReader(tmp_path / folder).read()
        assert found is not None
        record = json.loads((found.path / "record" / "metadata").read_text())
        return found, {path for path, each in record["arrays"].items() if not each.get("is_own")}

    (best, few), (after, more) = written("at the best"), written("after it")
    assert (best.step, after.step) == (6, 8) and few < more
    for found in (best, after):
        kept = found.callback_arrays["EarlyStopping"]["params"]["kernel"]
        np.testing.assert_array_equal(kept, best.state.params["kernel"])


@pytest.mark.slow
def test_states_are_found_by_type_and_what_finds_none_is_said(tmp_path, capsys):
    def loop(callbacks, init=None, n_steps=4):
        data = ff.ArrayStream(X, Y, batch_size=8)
        task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(0.01), "mse", data)
        return ff.TrainLoop(init or nn.Dense(1).init, task, 0, n_steps=n_steps, callbacks=callbacks)

    def stopping():
        return EarlyStopping("step", mode="min", patience=9, restore_best=False)

    def number(checkpoint):
        return checkpoint.with_metrics({"step": checkpoint.step})

    first = [number, stopping(), CheckpointFileWriter(tmp_path)]
    with loop(first) as running:
        list(running)
    reader = CheckpointFileReader(tmp_path, nn.Dense(1).init)
    second = [lambda c: None, number, *(every(1, stopping()) for _ in range(2))]
    next(loop(second, reader, 6))
    assert [each.get_state()["n_waited"] for each in second[2:]] == [4, 0]
    assert "EarlyStopping-2 starts from scratch" in capsys.readouterr().err
    next(loop([], reader, 6))
    assert "no callback takes the saved state of EarlyStopping" in capsys.readouterr().err


def test_a_state_that_is_not_finite_is_no_start_to_go_back_to():
    task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(0.1), "mse", (X, Y))
    state = ff.init_state(nn.Dense(1).init, task.optimizer, 0, (X,))
    state = state.replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    loop = ff.TrainLoop(state, task, callbacks=[Rollback()], stdout=False)
    with pytest.raises(FloatingPointError, match="no good state to return to"):
        next(loop)
