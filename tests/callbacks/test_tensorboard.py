"""TensorBoardLogger, read back with TensorBoard's own reader."""

import sys
import types
from typing import Any

import flax.linen as nn
import numpy as np
import optax
import pytest
from loops import init_of

import flaxfit as ff
from flaxfit.callbacks import TensorBoardLogger

accumulator: Any = None


@pytest.fixture(scope="module", autouse=True)
def _tensorboard():
    # Where these tests are run, as they take seconds.
    global accumulator
    # TensorBoard then reads without TensorFlow, which takes many seconds to import.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed",
    )


x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]


def read(folder):
    events = accumulator.EventAccumulator(str(folder), size_guidance={"histograms": 0})
    return events.Reload()


def write(log, *checkpoints):
    for checkpoint in checkpoints:
        log(checkpoint)
    log.close()


def state_of(**params):
    return ff.InferenceState(np.int32(1), params, {})


def scalars(folder, name="loss"):
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def make_loop(callbacks, **options):
    task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(0.1), "mse", [(x, 3 * x)] * 4)
    init = init_of(nn.Dense(1), 1)
    return ff.TrainLoop(init, task, 0, callbacks=callbacks, stdout=False, **options)


def test_a_run_has_the_metrics_and_histograms_of_parameters_and_gradients_that_are_kept(tmp_path):
    log = TensorBoardLogger(tmp_path / "run", histograms=True)
    checkpoints = list(make_loop([log], keep_grads=True))
    found = read(tmp_path / "run")
    assert set(found.Tags()["scalars"]) == set(checkpoints[0].scalars)
    assert scalars(tmp_path / "run") == [(c.step, np.float32(c.loss)) for c in checkpoints]
    assert len(list((tmp_path / "run").iterdir())) == 1
    assert set(found.Tags()["histograms"]) == {
        f"{kind}/{name}" for kind in ("params", "grads") for name in ("kernel", "bias")
    }
    last = found.Histograms("params/kernel")[-1]
    kernel = np.asarray(checkpoints[-1].state.params["kernel"])
    assert last.step == 4 and last.histogram_value.num == kernel.size
    np.testing.assert_allclose(last.histogram_value.sum, kernel.sum(), rtol=1e-6)


def test_histograms_leave_out_what_is_not_finite(tmp_path, checkpoint_at):
    state = state_of(w=np.array([1.0, np.nan]), none=np.array([np.inf]))
    write(TensorBoardLogger(tmp_path, histograms=True), checkpoint_at(1, loss=0.5, state=state))
    found = read(tmp_path)
    assert found.Tags()["histograms"] == ["params/w"]
    assert found.Histograms("params/w")[0].histogram_value.num == 1


def test_parameters_of_one_or_two_axes_are_images_on_request(tmp_path, checkpoint_at):
    state = state_of(w=np.arange(6.0).reshape(3, 2), b=np.zeros(4), conv=np.ones((2, 2, 2)))
    log = TensorBoardLogger(log_dir=tmp_path, histogram_freq=1, write_images=True)
    write(log, checkpoint_at(1, loss=0.5, state=state))
    found = read(tmp_path)
    assert set(found.Tags()["images"]) == {"params/w/image", "params/b/image"}
    image = found.Images("params/w/image")[0]
    assert (image.height, image.width) == (2, 3)


def test_options_of_keras_that_are_off_are_taken(tmp_path):
    TensorBoardLogger(tmp_path, write_graph=False, profile_batch=0)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"profile_batch": 2}, TypeError, r"profile_batch=2: add callbacks\.Profiler"),
        ({"writes_graph": False}, TypeError, "has no option writes_graph"),
        ({"folder": ""}, TypeError, "needs one folder: pass it first or as log_dir=, not both"),
        ({"log_dir": "b"}, TypeError, "needs one folder: pass it first or as log_dir=, not both"),
        ({"write_images": True}, ValueError, "write_images=True needs histograms=True"),
        ({"histograms": 1, "histogram_freq": 1}, ValueError, "and histogram_freq, two names"),
        ({"histograms": -1}, ValueError, "histograms must be 0 or more, got -1"),
        ({"update_freq": "step"}, TypeError, "must be an integer or 'epoch', got 'step'"),
    ],
)
def test_what_cannot_be_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        TensorBoardLogger(**{"folder": "runs", **options})


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path, checkpoint_at):
    for steps, loss in ((1, 2, 3, 4), 1), ((3, 4, 5), 2):
        write(TensorBoardLogger(tmp_path), *(checkpoint_at(step, loss=loss) for step in steps))
    assert scalars(tmp_path) == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("n_lost", [1, 15, 30])
def test_a_record_that_a_killed_process_left_unfinished_is_cut_off(tmp_path, checkpoint_at, n_lost):
    log = TensorBoardLogger(tmp_path)
    write(log, *(checkpoint_at(step, loss=1.0) for step in (1, 2, 3)))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-n_lost])
    write(log, checkpoint_at(4, loss=2.0))
    assert scalars(tmp_path) == [(1, 1), (2, 1), (4, 2)]


def test_a_loop_that_goes_back_voids_what_it_had_written(tmp_path, checkpoint_at):
    losses = (1, 1.0), (2, 1.0), (3, 1.0), (2, 2.0)
    write(TensorBoardLogger(tmp_path), *(checkpoint_at(step, loss=loss) for step, loss in losses))
    assert scalars(tmp_path) == [(1, 1), (2, 2)]


def test_images_and_texts_are_written_at_the_latest_step(tmp_path, checkpoint_at):
    pytest.importorskip("PIL", reason="pillow is not installed")
    log = TensorBoardLogger(tmp_path)
    log(checkpoint_at(7, loss=1.0))
    log.log_image("digit", np.zeros((8, 6)))
    log.log_image("photo", np.zeros((8, 6, 3), np.uint8), step=9)
    log.log_text("note", "**hello**")
    log.log(8, {"extra": 0.25})
    log.close()
    found = read(tmp_path)
    (image,) = found.Images("digit")
    assert (image.step, image.height, image.width) == (7, 8, 6)
    assert found.Images("photo")[0].step == 9
    assert found.Tensors("note/text_summary")[0].tensor_proto.string_val == [b"**hello**"]
    assert scalars(tmp_path, "extra") == [(8, 0.25)]


def test_hyperparameters_are_in_the_table_of_the_plugin(tmp_path, checkpoint_at):
    from tensorboard.plugins.hparams import metadata

    given = {"rate": 0.5, "name": "adam", "big": True, "shape": (2, 3)}
    write(TensorBoardLogger(tmp_path, hparams=given), checkpoint_at(1, loss=1.0))
    contents = read(tmp_path).summary_metadata[metadata.SESSION_START_INFO_TAG]
    data = metadata.parse_session_start_info_plugin_data(contents.plugin_data.content)
    found = {name: getattr(v, v.WhichOneof("kind")) for name, v in data.hparams.items()}
    assert found == {"rate": 0.5, "name": "adam", "big": True, "shape": "(2, 3)"}


def test_a_folder_that_cannot_be_written_does_not_stop_training(tmp_path, capsys):
    (tmp_path / "run").write_text("a file where the folder should be")
    assert len(list(make_loop([TensorBoardLogger(tmp_path / "run")]))) == 4
    assert capsys.readouterr().err.count("TensorBoardLogger failed") == 1


def test_training_and_validation_are_two_runs_with_the_same_names(tmp_path, checkpoint_at):
    for steps in (2,), (1, 2, 3), (3,):  # The second run begins again, the third is resumed.
        log = TensorBoardLogger(tmp_path, split=True, histograms=True)
        for step in steps:
            tested = {"val_loss": step / 4} if step != 2 else {}
            log(checkpoint_at(step, loss=step / 2, **tested))
        log.log_text("note", "hello")
        log.close()
        if steps == (2,):  # Without validation there is no run of it.
            assert [path.name for path in tmp_path.iterdir()] == ["train"]
    assert scalars(tmp_path / "train") == [(1, 0.5), (2, 1), (3, 1.5)]
    assert scalars(tmp_path / "validation") == [(1, 0.25), (3, 0.75)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train", "validation"]


@pytest.mark.parametrize("options", [{"histograms": 2}, {"histogram_freq": 2}])
def test_histograms_are_written_at_every_nth_checkpoint(tmp_path, checkpoint_at, options):
    state = state_of(w=np.ones(2))
    checkpoints = [checkpoint_at(step, loss=0.5, state=state) for step in (1, 2, 3, 4)]
    write(TensorBoardLogger(tmp_path, **options), *checkpoints)
    assert [event.step for event in read(tmp_path).Histograms("params/w")] == [1, 3]


@pytest.mark.parametrize(("freq", "steps"), [("batch", [1, 2, 3, 4]), (2, [2, 4]), ("epoch", None)])
def test_metrics_within_an_epoch_are_written_on_request(tmp_path, freq, steps):
    log = TensorBoardLogger(tmp_path, split=True, update_freq=freq)
    options = {"n_steps_per_checkpoint": 2, "first_checkpoint": 2}
    losses = []
    for _ in range(2):  # The second run starts over, in the same folder.
        losses = [(c.step, np.float32(c.loss)) for c in make_loop(log, **options)]
    assert scalars(tmp_path / "train") == losses
    if steps is None:
        assert "batch_loss" not in read(tmp_path / "train").Tags()["scalars"]
    else:
        found = scalars(tmp_path / "train", "batch_loss")
        assert [step for step, _ in found] == steps
        assert [each for each in found if each[0] in (2, 4)] == losses
