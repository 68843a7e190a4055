"""Which steps a writer keeps."""

import pytest
from checkpoint_files import fill, make_checkpoint, read, save_losses

from flaxfit.checkpoints import CheckpointFileWriter, best, latest, list_steps


def test_the_last_ones_and_the_best_are_kept_and_ties_count_as_best(tmp_path):
    losses = [0.5, 0.2, 0.9, 0.2, 0.8, 0.7, float("nan"), 0.6]
    kept = save_losses(tmp_path, losses, first=0, keep=2, monitor="val_loss")
    assert kept == [3, 6, 7]
    assert best(tmp_path) == 3
    assert latest(tmp_path) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6", "7"]


def test_the_largest_value_is_best_with_mode_max(tmp_path):
    with CheckpointFileWriter(tmp_path, keep=1, monitor="accuracy", mode="max") as writer:
        for step, accuracy in enumerate([0.1, 0.9, 0.5]):
            writer(make_checkpoint(step, accuracy=accuracy))
    assert list_steps(tmp_path) == [1, 2]
    assert read(tmp_path, which="best").metrics == {"accuracy": 0.9}


def test_a_checkpoint_without_the_monitored_metric_is_saved_and_announced(tmp_path, capfd):
    with CheckpointFileWriter(tmp_path, monitor="val_loss") as writer:
        writer(make_checkpoint(1))
    assert list_steps(tmp_path) == [1]
    assert "lacks the monitored metric 'val_loss' (it holds loss)" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_from_an_earlier_step_supersedes_the_later_steps(tmp_path, capfd):
    fill(tmp_path, 10, 20, 30)
    with CheckpointFileWriter(tmp_path, keep=3) as writer:
        writer(make_checkpoint(15))
        writer(make_checkpoint(16))
    assert list_steps(tmp_path) == [10, 15, 16]
    assert (tmp_path / "superseded-20-0").is_dir()
    assert "an earlier run's step 30 is now superseded-30-0" in capfd.readouterr().err


@pytest.mark.slow
def test_keep_best_keeps_the_best_ones_of_val_loss_and_the_last(tmp_path):
    losses = [0.5, 0.2, 0.9, 0.3, 0.8, float("nan")]
    assert save_losses(tmp_path, losses, keep=1, keep_best=3) == [1, 2, 4, 6]


def test_save_best_only_saves_what_is_better_than_all_before_it(tmp_path):
    losses = [float("nan"), 0.5, 0.5, 0.6, 0.4, 0.45]
    best_only = {"keep": None, "save_best_only": True}
    assert save_losses(tmp_path, losses, **best_only) == [2, 5]
    assert save_losses(tmp_path, [0.42, 0.3], first=7, **best_only) == [2, 5, 8]


def test_save_best_only_of_another_run_does_not_look_at_the_later_steps(tmp_path):
    save_losses(tmp_path, [0.1, 0.1], first=5)
    assert save_losses(tmp_path, [0.5, 0.6], save_best_only=True) == [1]


def test_initial_value_threshold_is_to_be_beaten_too(tmp_path):
    best_only = {"keep": None, "save_best_only": True, "mode": "max"}
    losses = [0.5, 0.8, 0.7, 0.9]
    saved = save_losses(tmp_path, losses, initial_value_threshold=0.8, **best_only)
    assert saved == [4]


def test_save_best_only_needs_the_metric_but_save_does_not(tmp_path):
    with CheckpointFileWriter(tmp_path, save_best_only=True) as writer:
        with pytest.raises(ValueError, match="monitor 'val_loss': the checkpoints hold loss"):
            writer(make_checkpoint(1))
        writer.save(make_checkpoint(2))
    assert list_steps(tmp_path) == [2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 0}, "keep must be 1 or more"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"save_freq": 0}, "save_freq must be 1 or more"),
        ({"save_freq": 5, "save_best_only": True}, "needs save_freq='epoch', got 5"),
        ({"keep_best": 0}, "keep_best must be 1 or more"),
        ({"keep": None, "keep_best": 2}, "keep=None keeps all checkpoints"),
        ({"initial_value_threshold": 0.5}, "needs save_best_only=True"),
        ({"mode": "best"}, "mode must be"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        CheckpointFileWriter(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_best": "val_loss"}, "keep_best must be an integer or None, got 'val_loss'"),
        ({"save_freq": "batch"}, "save_freq must be an integer or 'epoch'"),
    ],
)
def test_options_of_another_type_are_refused(tmp_path, options, words):
    with pytest.raises(TypeError, match=words):
        CheckpointFileWriter(tmp_path, **options)
