import json
import shutil
import sys
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxfit.checkpoints import (
    CheckpointFileReader,
    CheckpointFileWriter,
    _end,
    _file,
    _folder,
    _seal,
    best,
    latest,
    list_steps,
    restore,
    save,
)
from flaxfit.data import ArrayStream
from flaxfit.loop._train_loop import TrainLoop
from flaxfit.model._resume import RunFolder
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.state._train_state import TrainState
from flaxfit.step._init_state import init_state
from flaxfit.task._task import TrainTask

SMALL = TrainState(
    step=jnp.int32(0),
    params={"w": jnp.arange(4.0)},
    opt_state=(),
    model_state={},
    key=jax.random.key(0),
)


DENSE = nn.Dense(2, kernel_init=nn.initializers.ones)


def read(folder, template=None, **options):
    found = CheckpointFileReader(folder, **options).read(template)
    assert found is not None
    return found


def fill(folder, *steps):
    for step in steps:
        save(folder, SMALL.replace(step=jnp.int32(step), params={"w": jnp.arange(4.0) + step}))


def data_files(step):
    """The files of a step that hold array content."""
    return [path for path in all_files(step) if path.parent.name == "d"]


def all_files(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


@pytest.mark.parametrize("which", [None, "abstract", "replicated"])
def test_a_state_comes_back_bit_for_bit(tmp_path, tools, which):
    state = tools.make_state(3)
    save(tmp_path, tools.replicated(state))
    template = {None: state, "abstract": tools.abstract(state)}.get(which, tools.replicated(state))
    found = read(tmp_path, template)
    tools.assert_same(found.state, state)
    assert found.step == 3
    kernel = found.state.params["Dense_0"]["kernel"]
    assert len(kernel.devices()) == (4 if which == "replicated" else 1)


def test_a_restored_state_without_a_place_can_go_to_any_device(tmp_path):
    fill(tmp_path, 1)
    state = restore(tmp_path, jax.eval_shape(lambda: SMALL))
    assert not state.params["w"].committed
    assert not state.key.committed


def test_a_restored_key_draws_the_same_numbers(tmp_path):
    state = SMALL.replace(key=jax.random.key(7, impl="rbg"))
    save(tmp_path, state)
    found = restore(tmp_path, jax.eval_shape(lambda: state))
    np.testing.assert_array_equal(
        jax.random.normal(found.key, (3,)), jax.random.normal(state.key, (3,))
    )
    with pytest.raises(ValueError, match="key is key<rbg> .* on disk, key<fry> .* here"):
        restore(tmp_path, SMALL)


def test_a_restored_state_may_be_donated_and_the_template_stays(tmp_path):
    fill(tmp_path, 1)
    found = restore(tmp_path, SMALL)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(found.params["w"]))
    np.testing.assert_array_equal(SMALL.params["w"], np.arange(4.0))
    np.testing.assert_array_equal(restore(tmp_path, SMALL).params["w"], np.arange(4.0) + 1)


def test_a_sharded_state_is_restored_on_other_devices(tmp_path):
    devices = np.array(jax.devices())
    wide = NamedSharding(Mesh(devices, ("d",)), PartitionSpec("d"))
    narrow = NamedSharding(Mesh(devices[:2], ("d",)), PartitionSpec(None, "d"))
    values = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    save(tmp_path, SMALL.replace(params={"w": jax.device_put(values, wide)}))
    template = SMALL.replace(
        params={"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=narrow)}
    )
    found = restore(tmp_path, template).params["w"]
    assert found.sharding == narrow
    np.testing.assert_array_equal(found, values)


def test_unusual_leaves_survive(tmp_path):
    params = {
        "empty": jnp.zeros((0, 3)),
        "int4": jnp.arange(4, dtype=jnp.int4),
        "float8": jnp.ones(3, jnp.float8_e4m3fn),
        "wide": np.arange(3, dtype=np.int64) * 2**40,
        "number": 3,
        "bool": np.array([True, False]),
        "a.b ../../é~": jnp.ones(2),
        "a": {"b": jnp.zeros(2)},
    }
    state = SMALL.replace(params=params)
    save(tmp_path, state)
    found = restore(tmp_path, state).params
    assert found["number"] == 3 and isinstance(found["number"], int)
    assert isinstance(found["wide"], np.ndarray)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype
    plain = restore(tmp_path).params
    np.testing.assert_array_equal(plain["wide"], params["wide"])
    assert plain["empty"].shape == (0, 3)


def test_two_leaves_of_one_path_are_refused(tmp_path):
    state = SMALL.replace(params={"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})
    with pytest.raises(ValueError, match="params/a/b"):
        save(tmp_path, state)


def test_everything_beside_the_state_comes_back(tmp_path, tools):
    checkpoint = tools.make_checkpoint(2, loss=0.25, val_loss=float("inf"))
    with CheckpointFileWriter(tmp_path) as writer:
        writer.save(
            checkpoint.replace(data_state={"epoch": 1, "next": [3, None]}),
            history={"loss": [1.0, 0.25]},
            callback_states={"EarlyStopping": {"waited": 2}},
        )
    found = read(tmp_path)
    assert found.metrics == {"loss": 0.25, "val_loss": float("inf")}
    assert found.data_state == {"epoch": 1, "next": [3, None]}
    assert found.history == {"loss": [1.0, 0.25]}
    assert found.callback_states == {"EarlyStopping": {"waited": 2}}
    assert found.versions["jax"] == jax.__version__
    assert {"flax", "optax", "orbax-checkpoint", "flaxfit"} <= found.versions.keys()
    assert found.path == tmp_path / "2"


def test_without_a_template_the_optimizer_state_is_plain(tmp_path, tools):
    state = tools.make_state(1)
    save(tmp_path, state)
    found = restore(tmp_path)
    tools.assert_same(found.params, state.params)
    tools.assert_same(found.model_state, state.model_state)
    assert type(found.opt_state) is dict
    np.testing.assert_array_equal(
        found.opt_state["0"]["mu"]["Dense_1"]["kernel"],
        state.opt_state[0].mu["Dense_1"]["kernel"],
    )


def test_an_inference_state_reads_only_its_own_fields(tmp_path, tools):
    state = tools.make_state(1)
    save(tmp_path, state)
    found = restore(tmp_path, tools.abstract(state.for_inference()))
    tools.assert_same(found, state.for_inference())


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


def test_emptied_steps_alone_are_no_empty_folder(tmp_path):
    fill(tmp_path, 1, 2)
    for item in ("arrays", "record"):
        shutil.rmtree(tmp_path / "1" / item)
        shutil.rmtree(tmp_path / "2" / item)
    (tmp_path / "2" / "seal.json").unlink()
    with pytest.raises(ValueError, match="holds no intact checkpoint, only 1, 2"):
        CheckpointFileReader(tmp_path, lambda rngs, x: {}).read(SMALL)


def test_a_step_that_is_asked_for_must_be_there(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint of step 99 in .*: it holds none"):
        CheckpointFileReader(tmp_path, which=99).read(SMALL)


def test_a_state_as_target_says_what_to_expect_and_starts_the_run(tmp_path, tools):
    task = TrainTask(DENSE.apply, optax.adam(0.05), "mse", (np.ones((4, 3)), np.ones((4, 2))))
    state = init_state(DENSE.init, task.optimizer, 3, (np.ones((4, 3), np.float32),))
    reader = CheckpointFileReader(tmp_path, state)
    tools.assert_same(TrainLoop(reader, task, stdout=False).state, state)
    later = state.replace(step=jnp.int32(7), params=jax.tree.map(lambda x: x + 1, state.params))
    save(tmp_path, later)
    assert TrainLoop(reader, task, stdout=False).step == 7
    found = reader.read()
    assert found is not None
    tools.assert_same(found.state, later)
    for target in (None, 3):
        with pytest.raises(TypeError, match="a reader that knows the model, got .* target"):
            TrainLoop(CheckpointFileReader(tmp_path, target), task, 0, stdout=False)


@pytest.mark.parametrize("target", [nn.Dense(1).init, {"params": {}}], ids=["init", "dict"])
def test_what_is_no_state_is_no_target_of_restore(tmp_path, target):
    fill(tmp_path, 1)
    with pytest.raises(TypeError, match="is read into a state, got (function|method|dict)"):
        restore(tmp_path, target)


def test_a_file_that_the_disk_does_not_give_is_damage(tmp_path, monkeypatch, capfd):
    fill(tmp_path, 1, 2)
    digest = _seal.hashlib.file_digest

    def failing(file, kind):
        if "/2/" in file.name and "manifest" in file.name:
            raise OSError(5, "Input/output error", file.name)
        return digest(file, kind)

    monkeypatch.setattr(_seal.hashlib, "file_digest", failing)
    assert int(restore(tmp_path, SMALL).step) == 1
    assert "its files cannot be read (Input/output error" in capfd.readouterr().err


def test_a_damaged_step_that_cannot_be_renamed_is_passed_over(tmp_path, monkeypatch, capfd):
    fill(tmp_path, 1, 2)
    (tmp_path / "2" / "seal.json").unlink()

    def fail(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_folder, "set_aside", fail)
    assert int(restore(tmp_path, SMALL).step) == 1
    assert "not used, and cannot be put aside (Permission denied)" in capfd.readouterr().err


def test_steps_are_chosen_by_number(tmp_path):
    fill(tmp_path, 2, 10, 9)
    assert list_steps(tmp_path) == [2, 9, 10]
    assert int(restore(tmp_path).step) == 10
    assert int(restore(tmp_path, which=9).step) == 9
    assert int(restore(tmp_path, which=2).step) == 2
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


def test_a_model_that_differs_is_refused_and_the_checkpoint_stays(tmp_path, tools):
    save(tmp_path, tools.make_state(1))
    with pytest.raises(ValueError) as error:
        restore(tmp_path, tools.make_state(1, width=6, optimizer=optax.sgd(0.1)))
    message = str(error.value)
    assert "params/Dense_0/kernel is bfloat16 (3, 5) on disk, bfloat16 (3, 6) here" in message
    assert "opt_state/0/mu/Dense_0/kernel is on disk, not here" in message
    assert list_steps(tmp_path) == [1]


def test_a_dtype_is_never_cast(tmp_path):
    fill(tmp_path, 1)
    with pytest.raises(ValueError, match=r"params/w is float32 \(4,\) on disk, bfloat16 \(4,\)"):
        restore(tmp_path, SMALL.replace(params={"w": jnp.zeros(4, jnp.bfloat16)}))


def test_a_flipped_bit_in_any_file_is_detected_and_the_file_named(tmp_path):
    fill(tmp_path, 1)
    rng = np.random.default_rng(0)
    for file in all_files(tmp_path / "1"):
        content = file.read_bytes()
        for bit in rng.integers(8 * len(content), size=8):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="1 is damaged: its ") as error:
                restore(tmp_path, SMALL, which=1)
            assert file.name == "seal.json" or file.name in str(error.value)
        file.write_bytes(content)
    assert int(restore(tmp_path, SMALL, which=1).step) == 1


def test_a_missing_file_is_detected_and_named(tmp_path):
    fill(tmp_path, 1)
    for file in all_files(tmp_path / "1"):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(ValueError, match=f"1 is damaged: its .*{file.name} is missing"):
            restore(tmp_path, SMALL, which=1)
        file.write_bytes(content)


def test_arrays_that_are_intact_files_of_another_content_are_detected(tmp_path):
    fill(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "1" / "arrays")
    shutil.copytree(tmp_path / "2" / "arrays", tmp_path / "1" / "arrays")
    _seal.write(tmp_path / "1")
    with pytest.raises(ValueError, match="1 is damaged: the content of .* was changed"):
        restore(tmp_path, SMALL, which=1)


@pytest.mark.parametrize("name", ["step", "key"])
def test_a_record_that_leaves_out_what_every_state_has_is_damaged(tmp_path, name):
    fill(tmp_path, 1)
    record = tmp_path / "1" / "record" / "metadata"
    content = json.loads(record.read_text())
    del content["arrays"][name]
    record.write_text(json.dumps(content))
    _seal.write(tmp_path / "1")
    with pytest.raises(ValueError, match=f"1 is damaged: it does not hold {name}"):
        restore(tmp_path, which=1)


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
    save(tmp_path, SMALL.replace(step=jnp.int32(2)), metrics={"loss": 0.5})
    DAMAGE[name](tmp_path / "2")
    found = read(tmp_path, SMALL)
    assert found.step == int(found.state.step) == 1
    assert (tmp_path / "corrupt-2-0").is_dir()
    report = capfd.readouterr().err
    assert "the checkpoint of step 2" in report and "is now corrupt-2-0" in report
    assert list_steps(tmp_path) == [1]


def test_a_renamed_step_is_damaged(tmp_path, capfd):
    fill(tmp_path, 1, 3)
    (tmp_path / "3").rename(tmp_path / "9")
    assert int(restore(tmp_path).step) == 1
    assert "its record is that of step 3" in capfd.readouterr().err


def test_when_all_are_damaged_a_run_does_not_start_anew(tmp_path):
    fill(tmp_path, 1, 2)
    for step in (1, 2):
        truncate_arrays(tmp_path / str(step))
    for _ in range(2):
        with pytest.raises(ValueError, match="no intact checkpoint, only .*corrupt-2-0"):
            CheckpointFileReader(tmp_path).read(SMALL)


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
    with CheckpointFileWriter(tmp_path, keep=None, monitor="loss") as writer:
        for step, loss in enumerate([0.3, 0.1, 0.2, 0.9]):
            state = SMALL.replace(step=jnp.int32(step))
            writer(Checkpoint(step=step, state=state, metrics={"loss": loss}))
    assert best(tmp_path) == 1
    truncate_arrays(tmp_path / "1")
    assert int(restore(tmp_path, SMALL, which="best").step) == 2
    shutil.rmtree(tmp_path / "2" / "record")
    assert best(tmp_path) == 0
    assert int(restore(tmp_path, SMALL, which="best").step) == 0
    assert "corrupt-2-0" in capfd.readouterr().err


@pytest.mark.slow
def test_importing_checkpoints_does_not_import_orbax(run_child):
    program = "import sys, flaxfit.checkpoints; sys.exit('orbax.checkpoint' in sys.modules)"
    assert run_child([sys.executable, "-c", program], seconds=120).returncode == 0


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
    assert "holds what is no checkpoint, by the names 9" in capfd.readouterr().err
    with pytest.raises(ValueError, match="no checkpoint, by the names 9"):
        restore(tmp_path, SMALL, strict=True)
    assert (tmp_path / "9").is_dir()


def test_damage_in_every_step_is_an_error_that_names_them_and_nothing_is_deleted(tmp_path, capfd):
    fill(tmp_path, 1, 2, 3)
    shutil.rmtree(tmp_path / "1" / "record")
    truncate_arrays(tmp_path / "2")
    flip_array(tmp_path / "3")
    with pytest.raises(ValueError, match="only .*corrupt-3-0.*corrupt-2-0.*corrupt-1-0"):
        restore(tmp_path, SMALL)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("n_before, n_after", [(1, 4), (4, 2)])
def test_a_run_goes_on_with_another_number_of_devices(tmp_path, n_before, n_after):
    init = DENSE.init
    x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    y = x[:, :2] - x[:, 1:]

    def loop(init, n_devices, n_steps):
        data = ArrayStream(x, y, batch_size=8, shuffle=True)
        task = TrainTask(DENSE.apply, optax.adam(0.05), "mse", data)
        devices = jax.devices()[:n_devices]
        return TrainLoop(init, task, 0, n_steps=n_steps, devices=devices, stdout=False)

    with CheckpointFileWriter(tmp_path) as save_each:
        *_, before = [save_each(checkpoint) for checkpoint in loop(init, n_before, 5)]
    resumed = loop(CheckpointFileReader(tmp_path, init), n_after, 10)
    for one, other in zip(
        jax.tree.leaves(resumed.state), jax.tree.leaves(before.state), strict=True
    ):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(one, other)
    *_, last = resumed
    *_, uninterrupted = loop(init, n_before, 10)
    assert last.step == 10
    for one, other in zip(
        jax.tree.leaves(last.model_params), jax.tree.leaves(uninterrupted.model_params), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.fixture
def in_progress(tmp_path, tools, monkeypatch):
    """A folder with a save that is completed once somebody waits for it; and its writer."""
    gate, complete, wait = threading.Event(), _folder.complete, _end.wait

    def late(*arguments):
        assert gate.wait(60)
        complete(*arguments)

    def let_it_end(saves):
        gate.set()
        return wait(saves)

    save(tmp_path / "run", tools.make_checkpoint(1))
    writer = CheckpointFileWriter(tmp_path / "run", monitor="loss")
    writer.asynchronous = True  # Also with a Python that cannot do so while it exits.
    monkeypatch.setattr(_folder, "complete", late)
    monkeypatch.setattr(_end, "wait", let_it_end)
    writer(tools.make_checkpoint(2))
    yield tmp_path / "run"
    gate.set()
    writer.close()


@pytest.mark.parametrize("through", ["its path", "a link"])
@pytest.mark.parametrize(
    "look",
    [
        lambda folder: int(CheckpointFileReader(folder).read().state.step),
        lambda folder: int(restore(folder).step),
        lambda folder: list_steps(folder)[-1],
        latest,
        best,
        lambda folder: CheckpointFileWriter(folder)._found[-1],
        lambda folder: RunFolder(folder)._folder and _folder.steps(folder)[-1],
    ],
    ids=["reader", "restore", "list_steps", "latest", "best", "writer", "run folder"],
)
def test_a_save_that_the_same_process_has_begun_is_waited_for(in_progress, tmp_path, look, through):
    folder = in_progress
    if through == "a link":
        folder = tmp_path / "link"
        folder.symlink_to(in_progress)
    assert look(folder) == 2


def test_a_run_whose_writer_is_called_by_hand_is_resumed_from_its_last_step(tmp_path):
    def run(n_steps):
        data = ArrayStream(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32), batch_size=8)
        task = TrainTask(nn.Dense(1).apply, optax.sgd(0.1), "mse", data)
        reader = CheckpointFileReader(tmp_path, nn.Dense(1).init)
        loop = TrainLoop(reader, task, 0, n_steps=n_steps, n_steps_per_checkpoint=1, stdout=False)
        write = CheckpointFileWriter(tmp_path)
        first = loop.step
        for checkpoint in loop:
            write(checkpoint)
        return first

    assert [run(3), run(6), run(7)] == [0, 3, 6]
