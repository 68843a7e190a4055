import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.checkpoints import (
    CheckpointFileReader,
    CheckpointFileWriter,
    _failure,
    _file,
    _folder,
    _orbax,
    best,
    latest,
    list_steps,
    restore,
    save,
)
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.state._train_state import TrainState

SMALL = TrainState(
    step=jnp.int32(0), params={}, opt_state=(), model_state={}, key=jax.random.key(0)
)


def read(folder, template=None, **options):
    found = CheckpointFileReader(folder, **options).read(template)
    assert found is not None
    return found


def test_the_writer_returns_the_checkpoint_untouched(tmp_path, tools):
    checkpoint = tools.make_checkpoint(3)
    with CheckpointFileWriter(tmp_path) as writer:
        assert writer(checkpoint) is checkpoint
    assert list_steps(tmp_path) == [3]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_replicated_state_is_saved_whole_and_may_be_donated_at_once(
    tmp_path, tools, asynchronous
):
    state = tools.make_state(7)
    placed = tools.replicated(state)
    checkpoint = tools.make_checkpoint(7).replace(state=placed)
    consume = jax.jit(
        lambda state: jax.tree.map(lambda x: x * 0 if x.ndim else x, state.params),
        donate_argnums=0,
    )
    with CheckpointFileWriter(tmp_path, asynchronous=asynchronous) as writer:
        writer(checkpoint)
        jax.block_until_ready(consume(placed))
        if not asynchronous:
            assert placed.params["Dense_0"]["kernel"].is_deleted()
    expected = tools.make_state(7)  # The placed state shared its buffers with the first one.
    tools.assert_same(restore(tmp_path, tools.abstract(expected)), expected)


@pytest.mark.parametrize("end", ["donate", "delete"])
@pytest.mark.parametrize("place", ["one device", "all devices"])
def test_arrays_that_are_gone_before_the_background_begins_are_saved(
    tmp_path, tools, monkeypatch, place, end
):
    may_begin, kept = threading.Event(), _file.kept

    def late(*arguments):
        assert may_begin.wait(60)
        return kept(*arguments)

    writer = CheckpointFileWriter(tmp_path)
    writer.asynchronous = True  # Also with a Python that cannot do so while it exits.
    monkeypatch.setattr(_file, "kept", late)
    state = jax.tree.map(jnp.copy, tools.make_state(7))  # Buffers of its own.
    state = tools.replicated(state) if place == "all devices" else state
    writer(tools.make_checkpoint(7).replace(state=state))
    params = state.params
    if end == "donate":
        change = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
        jax.block_until_ready(change(params))
    else:
        jax.tree.map(lambda x: x.delete(), params)
    may_begin.set()
    writer.close()
    expected = tools.make_state(7)
    tools.assert_same(restore(tmp_path, tools.abstract(expected)), expected)


def test_numpy_leaves_changed_after_the_call_do_not_reach_the_file(tmp_path, tools):
    state = tools.make_state()
    weights = np.arange(200_000, dtype=np.float64)
    checkpoint = tools.make_checkpoint(1).replace(state=state.replace(params={"w": weights}))
    position = {"next": 3}
    with CheckpointFileWriter(tmp_path) as writer:
        writer(checkpoint.replace(data_state=position))
        weights[:] = 0
        position["next"] = 4
    found = read(tmp_path)
    np.testing.assert_array_equal(found.state.params["w"], np.arange(200_000, dtype=np.float64))
    assert found.data_state == {"next": 3}


def test_a_relative_folder_is_made_absolute(tmp_path, tools, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CheckpointFileWriter("runs/first") as writer:
        monkeypatch.chdir("/")
        writer(tools.make_checkpoint(2))
    assert list_steps(tmp_path / "runs" / "first") == [2]


def test_the_last_ones_and_the_best_are_kept_and_ties_count_as_best(tmp_path, tools):
    losses = [0.5, 0.2, 0.9, 0.2, 0.8, 0.7, float("nan"), 0.6]
    state = tools.make_state()
    with CheckpointFileWriter(tmp_path, keep=2, monitor="val_loss") as writer:
        for step, loss in enumerate(losses):
            checkpoint = tools.make_checkpoint(step, val_loss=loss).replace(state=state)
            writer(checkpoint)
    assert list_steps(tmp_path) == [3, 6, 7]
    assert best(tmp_path) == 3
    assert latest(tmp_path) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6", "7"]


def test_the_largest_value_is_best_with_mode_max(tmp_path, tools):
    with CheckpointFileWriter(tmp_path, keep=1, monitor="accuracy", mode="max") as writer:
        for step, accuracy in enumerate([0.1, 0.9, 0.5]):
            writer(tools.make_checkpoint(step, accuracy=accuracy))
    assert list_steps(tmp_path) == [1, 2]
    assert read(tmp_path, which="best").metrics == {"accuracy": 0.9}


def test_keep_none_keeps_all(tmp_path, tools):
    state = tools.make_state()
    with CheckpointFileWriter(tmp_path, keep=None) as writer:
        for step in range(4):
            writer(tools.make_checkpoint(step).replace(state=state))
    assert list_steps(tmp_path) == [0, 1, 2, 3]


def test_a_checkpoint_without_the_monitored_metric_is_saved_and_announced(tmp_path, tools, capfd):
    with CheckpointFileWriter(tmp_path, monitor="val_loss") as writer:
        writer(tools.make_checkpoint(1))
    assert list_steps(tmp_path) == [1]
    assert "lacks the monitored metric 'val_loss' (it holds loss)" in capfd.readouterr().err


def test_the_same_content_is_not_written_twice(tmp_path, tools):
    checkpoint = tools.make_checkpoint(5)
    save(tmp_path, checkpoint)
    before = (tmp_path / "5").stat().st_ino
    save(tmp_path, checkpoint)
    assert (tmp_path / "5").stat().st_ino == before


def test_other_content_of_a_step_replaces_it(tmp_path, tools):
    save(tmp_path, tools.make_checkpoint(5))
    other = tools.make_state(6).replace_step(5)
    save(tmp_path, other, metrics={"loss": 2.0})
    found = read(tmp_path, tools.abstract(other))
    tools.assert_same(found.state, other)
    assert found.metrics == {"loss": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


def test_an_interrupted_replacement_is_taken_back(tmp_path, tools):
    state = tools.make_state(5)
    save(tmp_path, state)
    (tmp_path / "5").rename(tmp_path / "replaced-5-0")
    CheckpointFileWriter(tmp_path)
    tools.assert_same(restore(tmp_path, state), state)


def test_left_over_folders_of_a_killed_save_are_removed_and_others_are_not(tmp_path):
    for name in ("saving-7-0", "saving-8-1", "deleted-3-0"):
        (tmp_path / name / "arrays").mkdir(parents=True)
    (tmp_path / "saving-notes").mkdir()
    (tmp_path / "9").mkdir()
    CheckpointFileWriter(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["9", "saving-notes"]


def test_a_run_from_an_earlier_step_supersedes_the_later_steps(tmp_path, tools, capfd):
    for step in (10, 20, 30):
        save(tmp_path, tools.make_checkpoint(step))
    with CheckpointFileWriter(tmp_path, keep=3) as writer:
        writer(tools.make_checkpoint(15))
        writer(tools.make_checkpoint(16))
    assert list_steps(tmp_path) == [10, 15, 16]
    assert (tmp_path / "superseded-20-0").is_dir()
    assert "an earlier run's step 30 is now superseded-30-0" in capfd.readouterr().err


def test_everything_of_a_step_is_synced_before_it_gets_its_name_and_the_name_after(
    tmp_path, tools, monkeypatch
):
    fsync, synced = os.fsync, []

    def record(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        assert (tmp_path / "3").exists() == (synced[-1] == tmp_path.stat().st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save(tmp_path, tools.make_checkpoint(3))
    paths = [tmp_path, tmp_path / "3", *(tmp_path / "3").rglob("*")]
    assert set(synced) == {path.stat().st_ino for path in paths}


@contextmanager
def small_disk():
    """No file can grow beyond 300 kB: a write in the background fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def noise(step):
    params = {"w": jnp.asarray(np.random.default_rng(step).random((1000, 500), np.float32))}
    return Checkpoint(step=step, state=SMALL.replace(params=params), metrics={})


# After a failure, what Orbax still had under way complains that its event loop is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_save_is_raised_by_the_next_call_or_close_and_harms_nothing(tmp_path):
    writer = CheckpointFileWriter(tmp_path)
    writer(noise(1))
    writer.wait()
    # Where saving is not asynchronous the first of the calls raises.
    failure = "Cannot save the checkpoint of step 2 .*\n.*bytes"
    with small_disk(), pytest.raises(RuntimeError, match=failure):
        writer(noise(2))
        writer(noise(3))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    with small_disk(), pytest.raises(RuntimeError, match="of step 4"):
        writer(noise(4))
        writer.close()
    writer.close()
    writer(noise(5))
    writer.close()
    assert list_steps(tmp_path) == [1, 5]
    for step in (1, 5):
        found = restore(tmp_path, which=step)
        np.testing.assert_array_equal(found.params["w"], noise(step).state.params["w"])


def test_a_step_whose_files_cannot_be_merged_is_not_listed(tmp_path, tools, monkeypatch):
    from flaxfit.checkpoints import _orbax

    def fail(writer, path):
        raise ValueError("its files are odd")

    writer = CheckpointFileWriter(tmp_path)
    writer(tools.make_checkpoint(1))
    writer.wait()
    monkeypatch.setattr(_orbax.StepWriter, "finish", fail)
    with pytest.raises(RuntimeError, match="step 2.*its files are odd"):
        writer(tools.make_checkpoint(2))
        writer.wait()
    writer.close()
    monkeypatch.undo()
    assert list_steps(tmp_path) == [1]
    restore(tmp_path)


def test_a_save_that_cannot_begin_is_a_worded_error(tmp_path, tools):
    writer = CheckpointFileWriter(tmp_path / "run")
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(RuntimeError, match="Cannot save the checkpoint of step 1"):
        writer(tools.make_checkpoint(1))
        writer.close()


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("raise KeyError('of the user')", marks=pytest.mark.slow),
        "sys.exit(3)",
    ],
)
def test_a_process_that_ends_without_close_loses_nothing(tmp_path, ending, run_child):
    program = f"""
        import sys
        import jax.numpy as jnp, optax
        from flaxfit.state._checkpoint import Checkpoint
        from flaxfit.step._init_state import init_state
        from flaxfit.checkpoints import CheckpointFileWriter

        init = lambda rngs, x: {{"params": {{"w": jnp.ones((1000, 500))}}}}
        state = init_state(init, optax.sgd(0.1), 0, (jnp.ones(3),))
        save = CheckpointFileWriter({str(tmp_path)!r})
        for step in range(3):
            save(Checkpoint(step=step, state=state, metrics={{}}))
        {ending}
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    ended = run_child(command, seconds=120)
    assert ended.returncode == {"": 0, "sys.exit(3)": 3}.get(ending, 1)
    assert ("of the user" if "raise" in ending else "") in ended.stderr
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["1", "2"]
    assert restore(tmp_path).params["w"].shape == (1000, 500)


def test_what_is_not_json_is_refused_by_name(tmp_path, tools):
    checkpoint = tools.make_checkpoint(1).replace(data_state=b"opaque")
    with pytest.raises(TypeError, match="data position .* as JSON.*bytes"):
        save(tmp_path, checkpoint)
    assert list_steps(tmp_path) == []


def test_numpy_numbers_count_as_json(tmp_path, tools):
    checkpoint = tools.make_checkpoint(1, loss=jnp.float32(0.5)).replace(
        data_state={"next": np.int64(3), "order": np.arange(2)}
    )
    save(tmp_path, checkpoint)
    found = read(tmp_path)
    assert found.data_state == {"next": 3, "order": [0, 1]}
    assert found.metrics == {"loss": 0.5}


@pytest.mark.parametrize("options", [{"keep": 0}, {"mode": "least"}, {"on_error": "ignore"}])
def test_wrong_options_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CheckpointFileWriter(tmp_path, **options)


FULL_DISK = """
    import os, sys
    from pathlib import Path
    import jax, jax.numpy as jnp
    from flaxfit.state._checkpoint import Checkpoint
    from flaxfit.state._train_state import TrainState
    from flaxfit.checkpoints import CheckpointFileWriter, list_steps, restore

    def checkpoint(step, n=100_000):
        params = {"w": jax.random.normal(jax.random.key(step), (n,))}
        state = TrainState(jnp.int32(step), params, (), {}, jax.random.key(0))
        return Checkpoint(step=step, state=state, metrics={})

    folder = Path(sys.argv[1])
    assert os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize == 2 << 20
    writer = CheckpointFileWriter(folder, keep=None, asynchronous=sys.argv[2] == "async",
                                  on_error="warn")
    for step in range(1, 9):
        writer(checkpoint(step))  # The fifth finds no room.
    writer(checkpoint(9, 1000))
    writer.close()
    steps = list_steps(folder)
    assert steps[:3] == [1, 2, 3] and 8 not in steps and steps[-1] == 9, steps
    assert sorted(path.name for path in folder.iterdir()) == [str(step) for step in steps]
    for step in steps:
        n = 1000 if step == 9 else 100_000
        expected = checkpoint(step, n).state.params["w"]
        assert (restore(folder, which=step).params["w"] == expected).all()
    writer.on_error = "raise"
    try:
        writer(checkpoint(10))
        writer.close()
    except RuntimeError as error:
        print(error)
    os._exit(0)  # What Orbax still has under way may complain.
"""


def can_mount():
    """Whether a small file system can be mounted here."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0


# Elsewhere the tests with `small_disk` have to do.
if can_mount():

    @pytest.mark.slow
    @pytest.mark.parametrize("asynchronous", ["async", "sync"])
    def test_a_full_disk_loses_no_checkpoint_and_a_run_may_go_on(tmp_path, asynchronous, run_child):
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(FULL_DISK))
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = f'mount -t tmpfs -o size=2m none {disk} && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", mount, "sh"]
        command += [sys.executable, str(program), str(disk), asynchronous]
        ended = run_child(command, seconds=200)
        assert ended.returncode == 0, ended.stderr
        assert "Cannot save the checkpoint of step 8" in ended.stderr
        assert "The run goes on without this checkpoint." in ended.stderr
        assert "Cannot save the checkpoint of step 10" in ended.stdout
        assert re.search(r"needs up to 400,0\d\d bytes, [\d,]+ are free", ended.stdout)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_on_error_warn_lets_the_run_go_on_and_says_so(tmp_path, asynchronous, capfd):
    with CheckpointFileWriter(tmp_path, asynchronous=asynchronous, on_error="warn") as writer:
        writer(noise(1))
        writer.wait()
        with small_disk():
            assert writer(noise(2)).step == 2
            writer.wait()
        assert "Cannot save the checkpoint of step 2" in capfd.readouterr().err
        writer(noise(3))
    assert list_steps(tmp_path) == [1, 3]


def test_on_error_warn_covers_a_folder_that_has_gone(tmp_path, tools, capfd):
    with CheckpointFileWriter(tmp_path / "run", on_error="warn") as writer:
        (tmp_path / "run").rmdir()
        (tmp_path / "run").write_text("in the way")
        writer(tools.make_checkpoint(1))
        assert "goes on without" in capfd.readouterr().err
        (tmp_path / "run").unlink()
        writer(tools.make_checkpoint(2))
    assert list_steps(tmp_path / "run") == [2]


def test_a_foreign_folder_of_the_name_of_a_step_is_moved_not_lost(tmp_path, tools):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "thesis.txt").write_text("of the user")
    save(tmp_path, tools.make_checkpoint(3))
    CheckpointFileWriter(tmp_path)
    assert list_steps(tmp_path) == [3]
    assert (tmp_path / "foreign-3-0" / "thesis.txt").read_text() == "of the user"


@pytest.mark.slow
def test_a_save_that_fails_when_the_process_ends_shows_in_its_exit_code(tmp_path, run_child):
    program = f"""
        import atexit, sys
        import jax, jax.numpy as jnp
        from flaxfit.state._checkpoint import Checkpoint
        from flaxfit.state._train_state import TrainState
        from flaxfit.checkpoints import CheckpointFileWriter, _folder

        def fail(*arguments):
            raise OSError(28, "No space left on device")

        _folder.complete = fail
        atexit.register(print, "the program's own end")
        state = TrainState(jnp.int32(1), {{}}, (), {{}}, jax.random.key(0))
        CheckpointFileWriter({str(tmp_path)!r})(Checkpoint(step=1, state=state, metrics={{}}))
        sys.exit(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = run_child(command, seconds=120)
    if sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)):  # There it is raised by the call.
        assert ended.returncode == 1
        return
    assert ended.returncode == 86 and "No space left on device" in ended.stderr
    assert ended.stdout == "the program's own end\n"


@pytest.mark.parametrize("where", ["start", "wait"])
def test_the_failure_of_one_process_is_told_to_the_others_under_the_name_of_the_folder(
    tmp_path, tools, monkeypatch, where
):
    """Each writer has a thread of its own: without the folder they would hear of one another."""
    told = []

    def heard(topic, value, **options):
        told.append((topic, value))
        return [value]

    wait = _orbax.StepWriter.wait

    def full(writer, *arguments):
        wait(writer)  # Else the folder would be removed while it is written to.
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_failure, "exchange", heard)
    with CheckpointFileWriter(tmp_path, on_error="warn") as writer:
        writer(tools.make_checkpoint(1))
        writer.wait()
        monkeypatch.setattr(_orbax.StepWriter, where, full)
        writer(tools.make_checkpoint(2))
        writer.wait()
        monkeypatch.undo()
        writer(tools.make_checkpoint(3))
    topic = f"the arrays of a save in {tmp_path}"
    assert told[0] == (topic, None)
    assert told[1][0] == topic and "No space left on device" in told[1][1]
    assert list_steps(tmp_path) == [1, 3]


def test_a_place_that_was_removed_is_not_used_again(tmp_path):
    first = _folder.begin(tmp_path, 5)
    shutil.rmtree(first)
    assert _folder.begin(tmp_path, 5) != first
