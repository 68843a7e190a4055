"""Saves that are in progress: the end of a process and other readers wait for them."""

import sys
import textwrap
import threading

import pytest
from checkpoint_files import make_checkpoint
from marks import slow, thorough

from flaxfit.checkpoints import (
    CheckpointFileReader,
    CheckpointFileWriter,
    _end,
    _folder,
    best,
    latest,
    list_steps,
    restore,
    save,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", [thorough(""), thorough("raise KeyError('of the user')"), "sys.exit(3)"]
)
def test_a_process_that_ends_without_close_loses_nothing(tmp_path, ending, run_child):
    program = f"""
        import sys
        import jax.numpy as jnp, optax
        from flaxfit import Checkpoint, init_state
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


@pytest.mark.slow
def test_a_save_that_fails_when_the_process_ends_shows_in_its_exit_code(tmp_path, run_child):
    program = f"""
        import atexit, sys
        import jax, jax.numpy as jnp
        from flaxfit import Checkpoint, TrainState
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


@pytest.fixture
def in_progress(tmp_path, monkeypatch):
    """A folder with a save that is completed once somebody waits for it; and its writer."""
    gate, complete, wait = threading.Event(), _folder.complete, _end.wait

    def late(*arguments):
        assert gate.wait(60)
        complete(*arguments)

    def let_it_end(saves):
        gate.set()
        return wait(saves)

    save(tmp_path / "run", make_checkpoint(1))
    writer = CheckpointFileWriter(tmp_path / "run", monitor="loss")
    writer.asynchronous = True  # Also with a Python that cannot do so while it exits.
    monkeypatch.setattr(_folder, "complete", late)
    monkeypatch.setattr(_end, "wait", let_it_end)
    writer(make_checkpoint(2))
    yield tmp_path / "run"
    gate.set()
    writer.close()


@pytest.mark.parametrize("through", [slow("its path"), "a link"])
@pytest.mark.parametrize(
    "look",
    [
        lambda folder: int(CheckpointFileReader(folder).read().state.step),
        lambda folder: int(restore(folder).step),
        lambda folder: list_steps(folder)[-1],
        latest,
        best,
        lambda folder: CheckpointFileWriter(folder) and _folder.steps(folder)[-1],
    ],
    ids=["reader", "restore", "list_steps", "latest", "best", "writer"],
)
def test_a_save_that_the_same_process_has_begun_is_waited_for(in_progress, tmp_path, look, through):
    folder = in_progress
    if through == "a link":
        folder = tmp_path / "link"
        folder.symlink_to(in_progress)
    assert look(folder) == 2
