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
from checkpoint_files import SMALL, abstract, make_checkpoint, make_state, read, replicated
from loops import assert_identical
from marks import thorough

from flaxfit import Checkpoint
from flaxfit.checkpoints import (
    CheckpointFileWriter,
    _contents,
    _orbax,
    _step_save,
    list_steps,
    restore,
    save,
)


def test_a_with_block_that_succeeds_deletes_the_steps_on_request(tmp_path):
    other = tmp_path / "other"
    with pytest.raises(KeyError), CheckpointFileWriter(tmp_path, delete_checkpoint=True) as writer:
        assert writer(checkpoint := make_checkpoint(3)) is checkpoint
        raise KeyError
    assert list_steps(tmp_path) == [3]
    other.touch()
    with writer:
        writer(make_checkpoint(4))
    assert list(tmp_path.iterdir()) == [other]
    other.unlink()
    with writer:
        writer(make_checkpoint(5))
        writer.finish()
    assert not tmp_path.exists() and writer.last_saved is None


def test_a_replicated_state_that_is_saved_at_once_may_be_donated(tmp_path):
    state = replicated(make_state(7))
    save(tmp_path, state)
    consume = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    jax.block_until_ready(consume(state.params))
    assert state.params["Dense_0"]["kernel"].is_deleted()
    expected = make_state(7)
    assert_identical(restore(tmp_path, abstract(expected)), expected)


@pytest.mark.parametrize("end", ["donate", "delete"])
@pytest.mark.parametrize("place", ["one device", "all devices"])
def test_arrays_that_are_gone_before_the_background_begins_are_saved(
    tmp_path, monkeypatch, place, end
):
    may_begin, kept = threading.Event(), _contents.undeleted

    def late(*arguments):
        assert may_begin.wait(60)
        return kept(*arguments)

    writer = CheckpointFileWriter(tmp_path)
    writer.asynchronous = True  # Also with a Python that cannot do so while it exits.
    monkeypatch.setattr(_contents, "undeleted", late)
    state = make_state(7)
    state = replicated(state) if place == "all devices" else state
    writer(make_checkpoint(7).replace(state=state))
    params = state.params
    if end == "donate":
        change = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
        jax.block_until_ready(change(params))
    else:
        jax.tree.map(lambda x: x.delete(), params)
    may_begin.set()
    writer.close()
    expected = make_state(7)
    assert_identical(restore(tmp_path, abstract(expected)), expected)


def test_numpy_leaves_changed_after_the_call_do_not_reach_the_file(tmp_path):
    state = make_state()
    weights = np.arange(200_000, dtype=np.float64)
    checkpoint = make_checkpoint(1).replace(state=state.replace(params={"w": weights}))
    position = {"next": 3}
    with CheckpointFileWriter(tmp_path) as writer:
        writer(checkpoint.replace(data_state=position))
        weights[:] = 0
        position["next"] = 4
    found = read(tmp_path)
    np.testing.assert_array_equal(found.state.params["w"], np.arange(200_000, dtype=np.float64))
    assert found.data_state == {"next": 3}


def test_the_same_content_is_not_written_twice(tmp_path):
    checkpoint = make_checkpoint(5)
    save(tmp_path, checkpoint)
    before = (tmp_path / "5").stat().st_ino
    save(tmp_path, checkpoint)
    assert (tmp_path / "5").stat().st_ino == before


def test_other_content_of_a_step_replaces_it(tmp_path):
    save(tmp_path, make_checkpoint(5))
    other = make_state(6).replace_step(5)
    save(tmp_path, other, metrics={"loss": 2.0})
    found = read(tmp_path, abstract(other))
    assert_identical(found.state, other)
    assert found.metrics == {"loss": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


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


# After a failure, writes that Orbax still had under way complain that its event loop is closed.
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
    # What Orbax still had under way may make its removed folder again, until the next cleaning.
    assert [path.name for path in tmp_path.iterdir() if "saving" not in path.name] == ["1"]
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


@pytest.mark.parametrize("name", ["lr=[0.1]", "a*b?", "[!x", "x]y"])
def test_the_name_of_a_folder_is_no_pattern(tmp_path, name):
    path = save(tmp_path / name, SMALL)
    assert path.parent == tmp_path / name
    np.testing.assert_array_equal(restore(tmp_path / name).params["w"], SMALL.params["w"])


def merge_nothing(handler, folder):
    """As after an I/O error where Orbax lists what to merge: it only logs that."""


def fail_to_merge(handler, folder):
    raise ValueError("its files are odd")


@pytest.mark.parametrize(
    ("finalize", "words"),
    [
        (merge_nothing, "step 2.*files are incomplete.*has no array"),
        (fail_to_merge, "step 2.*its files are odd"),
    ],
)
def test_a_step_whose_files_are_not_merged_is_not_sealed_and_deletes_nothing(
    tmp_path, monkeypatch, finalize, words
):
    from orbax.checkpoint import PyTreeCheckpointHandler

    with CheckpointFileWriter(tmp_path, keep=1, asynchronous=False) as writer:
        writer(make_checkpoint(1))
        monkeypatch.setattr(PyTreeCheckpointHandler, "finalize", finalize)
        with pytest.raises(RuntimeError, match=words):
            writer(make_checkpoint(2))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    restore(tmp_path)


FULL_DISK = """
    import os, sys
    from pathlib import Path
    import jax, jax.numpy as jnp
    from flaxfit import Checkpoint, TrainState
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
    @pytest.mark.parametrize("asynchronous", ["async", thorough("sync")])
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
        assert "The run continues without this checkpoint." in ended.stderr
        assert "Cannot save the checkpoint of step 10" in ended.stdout
        assert re.search(r"needs up to 400,0\d\d bytes, [\d,]+ are free", ended.stdout)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_on_error_warn_lets_the_run_go_on_and_says_so(tmp_path, asynchronous, capfd, caplog):
    with CheckpointFileWriter(tmp_path, asynchronous=asynchronous, on_error="warn") as writer:
        writer(noise(1))
        writer.wait()
        with small_disk():
            assert writer(noise(2)).step == 2
            writer.wait()
        assert "Cannot save the checkpoint of step 2" in capfd.readouterr().err
        assert not [each for each in caplog.records if each.exc_info]  # Orbax's tracebacks.
        writer(noise(3))
    assert list_steps(tmp_path) == [1, 3]


def test_a_folder_that_has_gone_is_an_error_in_words_or_with_on_error_a_warning(tmp_path, capfd):
    with CheckpointFileWriter(tmp_path / "run") as writer:
        (tmp_path / "run").rmdir()
        (tmp_path / "run").write_text("in the way")
        with pytest.raises(RuntimeError, match="Cannot save the checkpoint of step 1"):
            writer(make_checkpoint(1))
        writer.on_error = "warn"
        writer(make_checkpoint(1))
        assert "continues without" in capfd.readouterr().err
        (tmp_path / "run").unlink()
        writer(make_checkpoint(2))
    assert list_steps(tmp_path / "run") == [2]


@pytest.mark.parametrize("where", ["start", "wait"])
def test_the_failure_of_one_process_is_told_to_the_others_under_the_name_of_the_folder(
    tmp_path, monkeypatch, where
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

    monkeypatch.setattr(_step_save, "exchange", heard)
    with CheckpointFileWriter(tmp_path, on_error="warn") as writer:
        writer(make_checkpoint(1))
        writer.wait()
        monkeypatch.setattr(_orbax.StepWriter, where, full)
        writer(make_checkpoint(2))
        writer.wait()
        monkeypatch.undo()
        writer(make_checkpoint(3))
    topic = f"the arrays of a save in {tmp_path}"
    assert told[0] == (topic, None)
    assert told[1][0] == topic and "No space left on device" in told[1][1]
    assert list_steps(tmp_path) == [1, 3]
