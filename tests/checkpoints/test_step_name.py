"""Saves within an epoch; folders of steps named by a template, which are read as others."""

import numpy as np
import optax
import pytest
from checkpoint_files import SMALL, make_checkpoint, save_losses, small_state
from flax import linen as nn
from loops import assert_identical

import flaxfit as ff
from flaxfit.checkpoints import (
    CheckpointFileReader,
    CheckpointFileWriter,
    best,
    list_steps,
    restore,
    save,
)

x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
KERAS = "{epoch:02d}-{val_loss:.2f}"


def make_model(metrics=("mae",)):
    return ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", list(metrics))


def fit(model, **options):
    options = {"epochs": 3, "validation_data": (x, 3 * x), **options}
    return model.fit(x, 3 * x, batch_size=4, verbose=0, **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_steps_of_fit_are_named_as_in_keras_and_those_within_an_epoch_too(tmp_path):
    writer = CheckpointFileWriter(tmp_path, keep=None, save_freq=3, name=KERAS)
    losses = fit(make_model(), callbacks=[writer])["val_loss"]
    whole = [f"{4 * n}@{n:02d}-{loss:.2f}" for n, loss in enumerate(losses, start=1)]
    within = ["3@01-nan", "6@02-nan", "9@03-nan"]
    assert names(tmp_path) == sorted(whole + within)


@pytest.mark.slow
def test_the_best_is_an_epoch_and_steps_within_are_not_told_of(tmp_path, capsys):
    writer = CheckpointFileWriter(tmp_path, save_freq=3, keep=1, monitor="loss", verbose=1)
    fit(make_model(), callbacks=[writer])
    assert list_steps(tmp_path) == [12]
    printed = capsys.readouterr().err
    assert "lacks" not in printed
    told = [n for n in range(13) if f"step {n} is saved as {tmp_path / str(n)}" in printed]
    assert told == [3, 4, 6, 8, 9, 12]


@pytest.mark.slow
def test_named_steps_are_kept_ranked_and_read_as_others(tmp_path):
    losses = [0.5, 0.2, 0.9, 0.2, 0.8]
    save_losses(
        tmp_path,
        losses,
        keep=1,
        keep_best=2,
        monitor="val_loss",
        name="{val_loss}",
        asynchronous=False,
    )
    assert names(tmp_path) == ["2@0.2", "4@0.2", "5@0.8"]
    assert list_steps(tmp_path) == [2, 4, 5] and best(tmp_path) == 4
    for which, step in {"latest": 5, "best": 4, 2: 2}.items():
        assert_identical(restore(tmp_path, SMALL, which=which), small_state(step))


def test_a_damaged_a_replaced_and_an_emptied_named_step_are_known(tmp_path, capfd):
    save_losses(tmp_path, [0.5, 0.2], name="{val_loss}", asynchronous=False)
    (tmp_path / "2@0.2" / "seal.json").write_text("{}")
    assert CheckpointFileReader(tmp_path).read().step == 1
    assert names(tmp_path) == ["1@0.5", "corrupt-2-0"]
    (tmp_path / "1@0.5").rename(tmp_path / "replaced-1-0")  # As by an interrupted replacement.
    CheckpointFileWriter(tmp_path)
    assert names(tmp_path) == ["1", "corrupt-2-0"]
    (tmp_path / "3@0.2").mkdir()
    assert CheckpointFileReader(tmp_path).read().step == 1
    report = capfd.readouterr().err
    assert "the checkpoint of step 2" in report and "not checkpoints: 3@0.2" in report


def test_a_step_saved_again_replaces_the_one_of_another_name(tmp_path):
    save(tmp_path, make_checkpoint(1, val_loss=0.7))
    (tmp_path / "1@of the user").mkdir()
    save_losses(tmp_path, [0.5], name="best {val_loss:.1e}", asynchronous=False)
    assert names(tmp_path) == ["1@best 5.0e-01", "foreign-1-0"]
    inode = (tmp_path / "1@best 5.0e-01").stat().st_ino
    save_losses(tmp_path, [0.5], asynchronous=False)  # The same content.
    assert (tmp_path / "1@best 5.0e-01").stat().st_ino == inode


@pytest.mark.slow
def test_a_run_resumes_from_folders_with_and_without_names(tmp_path):
    def fail(checkpoint):
        if checkpoint.step == 8:
            raise KeyError

    def named():
        return CheckpointFileWriter(tmp_path, keep=None, save_freq=3, name=KERAS)

    with pytest.raises(KeyError):
        fit(make_model(), callbacks=[fail], checkpoint_dir=tmp_path)
    assert names(tmp_path) == ["4"]
    with pytest.raises(KeyError):
        fit(make_model(), callbacks=[fail], checkpoint_dir=named())
    assert names(tmp_path) == ["4", "7@02-nan"]
    resumed, whole = make_model(), make_model()
    assert dict(fit(resumed, checkpoint_dir=named())) == dict(fit(whole))
    np.testing.assert_array_equal(resumed.state.params["kernel"], whole.state.params["kernel"])
    found = {name.partition("-")[0] for name in names(tmp_path)}
    assert found == {"4", "7@02", "8@02", "10@03", "12@03"}


def test_a_long_name_is_cut(tmp_path):
    save_losses(tmp_path, [0.5], name="å" * 300, asynchronous=False)
    assert names(tmp_path) == ["1@" + "å" * 100]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("", "is not a template of names: it is empty"),
        ("{epoch", "is not a template of names: expected '}'"),
        ("{}", "a field is written {name}"),
        ("{0}", "a field is written {name}"),
        ("{epoch!r}", "a field is written {name}"),
        ("{epoch:.2q}", "is not a template of names"),
        ("{val_loss:02d}", "is not a template of names"),
        ("{val_loss:{epoch}}", "is not a template of names"),
        ("{val_loss:9000000000f}", "a width is at most 200"),
        ("{val_loss:.201f}", "a width is at most 200"),
        ("../{epoch}", "the name of a folder, not a path"),
        ("a\\{epoch}", "the name of a folder, not a path"),
        ("{epoch:/>9}", "the name of a folder, not a path"),
        ("a\n", "the name of a folder, not a path"),
    ],
)
def test_what_is_no_name_is_refused_before_a_folder_is_made(tmp_path, template, words):
    with pytest.raises(ValueError, match=words):
        CheckpointFileWriter(tmp_path / "new", name=template)
    assert not (tmp_path / "new").exists()


def test_an_unknown_field_is_refused_before_the_first_step(tmp_path):
    writer = CheckpointFileWriter(tmp_path, name="{val_los:.2f}")
    words = "cannot name steps by 'val_los': .* in name=. Did you mean 'val_loss'"
    with pytest.raises(ValueError, match=words):
        fit(make_model(), callbacks=[writer])
    assert not names(tmp_path)


def test_a_field_that_comes_from_a_callback_is_checked_at_the_first_save(tmp_path):
    writer = CheckpointFileWriter(tmp_path, name="{val_los:.2f}")
    with pytest.raises(ValueError, match="hold val_loss. .* Did you mean 'val_loss'"):
        writer(make_checkpoint(1, val_loss=0.5))
    writer = CheckpointFileWriter(tmp_path, name="{counts}")
    with pytest.raises(ValueError, match="'counts': it is not a single number"):
        writer(make_checkpoint(1, counts=np.ones((2, 2))))


def test_only_fit_has_epochs(tmp_path):
    writer = CheckpointFileWriter(tmp_path, name="{epoch}")
    with pytest.raises(ValueError, match="'epoch', which only fit has: use {step}"):
        writer(make_checkpoint(1))
    task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(0.1), "mse", iter([(x, x)]))
    with pytest.raises(ValueError, match="'epoch', which only fit has: use {step}"):
        ff.TrainLoop(nn.Dense(1).init, task, 0, n_steps=1, callbacks=[writer])
