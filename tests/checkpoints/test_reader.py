import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import SMALL, data_files, fill, read, save_losses, small_state
from loops import assert_identical

from flaxfit import Model, TrainLoop, TrainTask, init_state
from flaxfit.checkpoints import (
    CheckpointFileReader,
    CheckpointFileWriter,
    _file,
    _folder,
    best,
    latest,
    list_steps,
    restore,
    save,
)

DENSE = nn.Dense(2, kernel_init=nn.initializers.ones)


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_checkpoints_reads_as_none(tmp_path, make):
    folder = tmp_path / "run"
    if make:
        (folder / "007" / "arrays").mkdir(parents=True)
        (folder / "notes").mkdir()
    assert CheckpointFileReader(folder, lambda rngs, x: {}).read(SMALL) is None
    assert (list_steps(folder), latest(folder), best(folder)) == ([], None, None)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint in .*run"):
        restore(folder, SMALL)


def test_a_file_in_place_of_a_folder_is_answered_with_what_reads_it(tmp_path):
    file = tmp_path / "weights.npz"
    file.touch()
    model = Model(DENSE, optax.sgd(0.1), "mse")
    for load in (restore, model.load):
        with pytest.raises(FileNotFoundError, match=r"npz\. It is a file: load_weights reads"):
            load(file)


def test_emptied_steps_alone_are_no_empty_folder(tmp_path):
    fill(tmp_path, 1, 2)
    for item in ("arrays", "record"):
        shutil.rmtree(tmp_path / "1" / item)
        shutil.rmtree(tmp_path / "2" / item)
    (tmp_path / "2" / "seal.json").unlink()
    with pytest.raises(ValueError, match="holds no intact checkpoint, only 1, 2"):
        CheckpointFileReader(tmp_path, lambda rngs, x: {}).read(SMALL)


@pytest.mark.slow
def test_a_state_as_target_says_what_to_expect_and_starts_the_run(tmp_path):
    task = TrainTask(DENSE.apply, optax.adam(0.05), "mse", (np.ones((4, 3)), np.ones((4, 2))))
    state = init_state(DENSE.init, task.optimizer, 3, (np.ones((4, 3), np.float32),))
    reader = CheckpointFileReader(tmp_path, state)
    assert_identical(TrainLoop(reader, task, stdout=False).state, state)
    later = state.replace(step=jnp.int32(7), params=jax.tree.map(lambda x: x + 1, state.params))
    save(tmp_path, later)
    assert TrainLoop(reader, task, stdout=False).step == 7
    found = reader.read()
    assert found is not None
    assert_identical(found.state, later)
    for target in (None, 3):
        with pytest.raises(TypeError, match="a reader that knows the model, got .* target"):
            TrainLoop(CheckpointFileReader(tmp_path, target), task, 0, stdout=False)


@pytest.mark.parametrize("target", [nn.Dense(1).init, {"params": {}}], ids=["init", "dict"])
def test_what_is_no_state_is_no_target_of_restore(tmp_path, target):
    fill(tmp_path, 1)
    with pytest.raises(TypeError, match="is read into a state, got (function|method|dict)"):
        restore(tmp_path, target)


def test_a_damaged_step_that_cannot_be_renamed_is_passed_over(tmp_path, monkeypatch, capfd):
    fill(tmp_path, 1, 2)
    (tmp_path / "2" / "seal.json").unlink()

    def fail(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_folder, "set_aside", fail)
    assert int(restore(tmp_path, SMALL).step) == 1
    assert "not used, and cannot be renamed (Permission denied)" in capfd.readouterr().err


def test_steps_are_chosen_by_number(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint of step 99 in .*: it holds none"):
        restore(tmp_path, which=99)
    fill(tmp_path, 2, 10, 9)
    assert list_steps(tmp_path) == [2, 9, 10]
    assert [int(restore(tmp_path, which=n).step) for n in ("latest", 9, 2)] == [10, 9, 2]
    with pytest.raises(ValueError, match="no checkpoint of step 3 in .*: it holds 2, 9, 10"):
        restore(tmp_path, which=3)
    with pytest.raises(ValueError, match="'newest'"):
        restore(tmp_path, which="newest")


def test_the_best_of_unmonitored_checkpoints_is_an_error(tmp_path):
    fill(tmp_path, 1)
    with pytest.raises(ValueError, match="monitored no metric"):
        best(tmp_path)
    with pytest.raises(ValueError, match="monitored no metric"):
        restore(tmp_path, which="best")


def flip_array(step):
    for file in data_files(step):
        content = bytearray(file.read_bytes())
        for position in range(0, len(content), 8):
            content[position] ^= 4
        file.write_bytes(content)


def flip_record(step):
    file = step / "record" / "metadata"
    file.write_text(file.read_text().replace('"loss": 0.5', '"loss": 0.6'))


def truncate_arrays(step):
    for file in data_files(step):
        file.write_bytes(file.read_bytes()[:-20])


DAMAGE = {
    "flipped array bits": flip_array,
    "flipped metric": flip_record,
    "truncated arrays": truncate_arrays,
    "truncated record": lambda step: (step / "record" / "metadata").write_text('{"rec'),
    "record that is no object": lambda step: (step / "record" / "metadata").write_text("[]"),
    "deleted record": lambda step: shutil.rmtree(step / "record"),
    "deleted arrays": lambda step: shutil.rmtree(step / "arrays"),
    "deleted manifest": lambda step: (step / "arrays" / "manifest.ocdbt").unlink(),
    "deleted data": lambda step: [file.unlink() for file in data_files(step)],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(tmp_path, capfd, name):
    fill(tmp_path, 1)
    save(tmp_path, small_state(2), metrics={"loss": 0.5})
    DAMAGE[name](tmp_path / "2")
    found = read(tmp_path, SMALL)
    assert found.step == int(found.state.step) == 1
    assert (tmp_path / "corrupt-2-0").is_dir()
    report = capfd.readouterr().err
    assert "the checkpoint of step 2" in report and "is now corrupt-2-0" in report
    assert list_steps(tmp_path) == [1]


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"which": 1}])
def test_a_step_that_a_writer_removes_meanwhile_is_not_damage(tmp_path, monkeypatch, options):
    fill(tmp_path, 1)
    read_record = _file.read_record

    def read_late(path):
        if path.name == "1":
            shutil.rmtree(path)
            fill(tmp_path, 2)
        return read_record(path)

    monkeypatch.setattr(_file, "read_record", read_late)
    reader = CheckpointFileReader(tmp_path, **options)
    if options.get("which"):
        with pytest.raises(ValueError, match="no checkpoint of step 1 in .*: it holds 2"):
            reader.read(SMALL)
    else:
        assert reader.read(SMALL).step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_strict_reading_refuses_damage_and_renames_nothing(tmp_path):
    fill(tmp_path, 1, 2)
    flip_array(tmp_path / "2")
    with pytest.raises(ValueError, match="2 is damaged"):
        CheckpointFileReader(tmp_path, strict=True).read(SMALL)
    with pytest.raises(ValueError, match="2 is damaged"):
        restore(tmp_path, SMALL, which=2)
    assert list_steps(tmp_path) == [1, 2]


def test_a_damaged_best_gives_way_to_the_next_best(tmp_path, capfd):
    save_losses(tmp_path, [0.3, 0.1, 0.2, 0.9], first=0, keep=None, monitor="val_loss")
    assert best(tmp_path) == 1
    truncate_arrays(tmp_path / "1")
    assert int(restore(tmp_path, SMALL, which="best").step) == 2
    shutil.rmtree(tmp_path / "2" / "record")
    assert best(tmp_path) == 0
    assert int(restore(tmp_path, SMALL, which="best").step) == 0
    assert "corrupt-2-0" in capfd.readouterr().err


@pytest.mark.parametrize("content", [None, "notes.txt", "foreign/file"])
def test_an_emptied_or_foreign_newest_folder_is_named_and_the_one_before_is_used(
    tmp_path, capfd, content
):
    fill(tmp_path, 1)
    (tmp_path / "9").mkdir()
    if content:
        (tmp_path / "9" / content).parent.mkdir(exist_ok=True)
        (tmp_path / "9" / content).write_text("foreign")
    assert int(restore(tmp_path, SMALL).step) == 1
    assert "contains entries that are not checkpoints: 9" in capfd.readouterr().err
    with pytest.raises(ValueError, match="entries that are not checkpoints: 9"):
        restore(tmp_path, SMALL, strict=True)
    assert (tmp_path / "9").is_dir()


def test_damage_in_every_step_is_an_error_that_names_them_and_nothing_is_deleted(tmp_path, capfd):
    fill(tmp_path, 1, 2, 3)
    shutil.rmtree(tmp_path / "1" / "record")
    truncate_arrays(tmp_path / "2")
    flip_array(tmp_path / "3")
    with pytest.raises(ValueError, match="only .*corrupt-3-0.*corrupt-2-0.*corrupt-1-0"):
        restore(tmp_path, SMALL)
    with pytest.raises(ValueError, match="no intact checkpoint, only .*corrupt-2-0"):
        CheckpointFileReader(tmp_path).read(SMALL)  # No run starts from scratch.
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
def test_a_run_whose_writer_is_called_by_hand_is_resumed_from_its_last_step(tmp_path):
    def run(n_steps):
        task = TrainTask(DENSE.apply, optax.sgd(0.1), "mse", (np.ones((8, 3)), np.ones((8, 2))))
        reader = CheckpointFileReader(tmp_path, DENSE.init)
        loop = TrainLoop(reader, task, 0, n_steps=n_steps, stdout=False)
        first, write = loop.step, CheckpointFileWriter(tmp_path)
        for checkpoint in loop:
            write(checkpoint)
        return first

    assert [run(3), run(6), run(7)] == [0, 3, 6]
