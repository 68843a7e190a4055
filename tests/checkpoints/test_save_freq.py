"""Saves within an epoch, and runs that resume from them."""

import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileWriter, list_steps

x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]


def make_model():
    return ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", ["mae"])


def fit(model, **options):
    return model.fit(x, 3 * x, batch_size=4, epochs=3, verbose=0, **options)


def stop_at(step):
    class Fails:
        def attach(self, loop):
            loop.watchers.append(self.look)

        def look(self, now):
            if now == step:
                raise KeyError(step)

        def __call__(self, checkpoint):
            return checkpoint

    return Fails()


@pytest.mark.slow
def test_a_run_that_resumes_within_an_epoch_reports_the_same(tmp_path):
    writer = CheckpointFileWriter(tmp_path, save_freq=3, keep=None)
    model = make_model()
    with pytest.raises(KeyError):
        fit(model, callbacks=[stop_at(7)], checkpoint_dir=writer)
    assert list_steps(tmp_path) == [3, 4, 6]
    resumed, whole = make_model(), make_model()
    again = CheckpointFileWriter(tmp_path, save_freq=3, keep=None)
    assert dict(fit(resumed, checkpoint_dir=again)) == dict(fit(whole))
    np.testing.assert_array_equal(resumed.state.params["kernel"], whole.state.params["kernel"])
    assert list_steps(tmp_path) == [3, 4, 6, 8, 9, 12]


@pytest.mark.slow
def test_the_best_is_an_epoch_and_steps_within_are_not_told_of(tmp_path, capsys):
    writer = CheckpointFileWriter(tmp_path, save_freq=3, keep=1, monitor="loss", verbose=1)
    fit(make_model(), callbacks=[writer])
    assert list_steps(tmp_path) == [12]
    printed = capsys.readouterr().err
    assert "lacks" not in printed
    assert [
        step for step in range(13) if f"step {step} is saved as {tmp_path / str(step)}" in printed
    ] == [*(3, 4, 6, 8, 9, 12)]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"save_freq": "batch"}, TypeError, "save_freq must be an integer or 'epoch'"),
        ({"save_freq": 0}, ValueError, "save_freq must be 1 or more"),
        ({"save_freq": 5, "save_best_only": True}, ValueError, "needs save_freq='epoch', got 5"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        CheckpointFileWriter(tmp_path, **options)
