"""What a model trains from before it has a loop: weights of files, or the state of a checkpoint."""

import shutil

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from marks import thorough

import flaxfit as ff

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 16)


def make_model(n=3, **options):
    return ff.Model(nn.Dense(n), optax.adam(1e-2), "crossentropy", ["accuracy"], **options)


def saved(folder, **options):
    model = make_model(**options)
    model.fit(X, Y, verbose=0)
    model.save(folder)
    return model


@pytest.fixture
def loaded(tmp_path):
    def load(**options):
        saved(tmp_path / "run", **options)
        model = make_model(**options)
        model.load(tmp_path / "run")
        return model

    return load


@pytest.fixture
def ones(tmp_path):
    """A file of weights that are all 1."""
    path = tmp_path / "ones.safetensors"
    arrays = {"kernel": np.ones((4, 3), np.float32), "bias": np.ones(3, np.float32)}
    ff.checkpoints.save_weights(path, {f"params/{name}": each for name, each in arrays.items()})
    return path


@pytest.mark.parametrize("use", ["predict", thorough("evaluate"), thorough("export"), "fit"])
def test_a_loaded_state_of_another_model_is_refused_at_the_first_use(tmp_path, use):
    model, other = saved(tmp_path / "run"), make_model(2)
    with pytest.raises(FileNotFoundError):
        other.load(tmp_path / "none")
    other.load(tmp_path / "run")
    uses = {
        "predict": lambda: other.predict(iter([X])),
        "evaluate": lambda: other.evaluate(X, Y),
        "export": lambda: other.export(tmp_path / "x", input_spec=ff.export.InputSpec((1, 4))),
        "fit": lambda: other.fit(X, Y, verbose=0),
    }
    with pytest.raises(ValueError, match=r"run(/1)? does not fit this model(?s:.)*params/kernel"):
        uses[use]()
    other = make_model()
    other.load(tmp_path / "run")
    both = (each.predict(iter([X, X])) for each in (other, model))
    np.testing.assert_array_equal(*both)


@pytest.mark.slow
def test_weights_are_added_to_a_loaded_state_which_keeps_its_step(loaded, ones, tmp_path):
    model = loaded()
    kernel = np.array(model.state.params["kernel"])
    model.load_weights(ones, partial="bias")
    assert model.step == 1
    np.testing.assert_array_equal(model.state.params["kernel"], kernel)
    assert np.all(model.state.params["bias"] == 1)
    model.freeze = "bias"
    # The folder it was loaded from is not read again.
    model.fit(X, Y, verbose=0, checkpoint_dir=tmp_path / "run")
    assert model.step == 2
    assert np.all(model.state.params["bias"] == 1)
    # A state that is loaded replaces the weights.
    model = make_model()
    model.load_weights(ones)
    model.load(tmp_path / "run", which=1)
    np.testing.assert_array_equal(model.state.params["kernel"], kernel)


@pytest.mark.slow
def test_a_loaded_state_is_frozen_with_its_average_and_without_its_folder(loaded, tmp_path):
    model = loaded(ema=0.9)
    shutil.rmtree(tmp_path / "run")
    before = np.array(model.state.opt_state["average"]["kernel"])
    model.freeze = "bias"
    np.testing.assert_array_equal(model.state.opt_state.average["kernel"], before)
    assert np.any(model.state.params["kernel"] != before)
    model.fit(X, Y, verbose=0)
    assert model.step == 2


@pytest.mark.slow
def test_a_fit_that_failed_keeps_the_loaded_weights(ones, tmp_path):
    model = make_model(freeze="bias")
    model.load_weights(ones, partial="bias")
    with pytest.raises(ValueError, match="out of range for 3 outputs"):
        model.fit(X, Y + 5, verbose=0, checkpoint_dir=tmp_path / "run")
    model.load_weights(ones, partial="kernel")
    np.testing.assert_allclose(model.predict(X), np.tile(X.sum(1)[:, None] + 1, 3), rtol=1e-5)
    model.fit(X, Y, verbose=0, checkpoint_dir=tmp_path / "run")
    assert np.all(model.state.params["bias"] == 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": optax.sgd(0.1, momentum=0.9), "ema": 0.9},
        thorough({"optimizer": optax.sgd(0.1, momentum=0.9)}),
        thorough({"ema": 0.9}),
    ],
)
def test_a_loaded_model_is_saved_as_it_was_compiled(loaded, tmp_path, options):
    model = loaded()
    model.compile(**options)
    model.save(tmp_path / "compiled")
    again = make_model()
    again.compile(**options)
    again.load(tmp_path / "compiled")
    for each in (model, again):
        each.fit(X, Y, verbose=0)
    for state in (model.state, again.state):
        assert state.step == 2
    for one, other in zip(jax.tree.leaves(model.state), jax.tree.leaves(again.state), strict=True):
        assert np.all(one == other)
