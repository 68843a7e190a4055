"""Which steps a writer keeps."""

from checkpoint_files import read

from flaxfit.checkpoints import CheckpointFileWriter, best, latest, list_steps, save


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


def test_a_run_from_an_earlier_step_supersedes_the_later_steps(tmp_path, tools, capfd):
    for step in (10, 20, 30):
        save(tmp_path, tools.make_checkpoint(step))
    with CheckpointFileWriter(tmp_path, keep=3) as writer:
        writer(tools.make_checkpoint(15))
        writer(tools.make_checkpoint(16))
    assert list_steps(tmp_path) == [10, 15, 16]
    assert (tmp_path / "superseded-20-0").is_dir()
    assert "an earlier run's step 30 is now superseded-30-0" in capfd.readouterr().err
