"""Weights that a model begins with: from a file, all of them or some."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import flaxfit as ff

rng = np.random.default_rng(4)
X = rng.normal(size=(24, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class MLP(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5, name="stem")(x)
        x = nn.BatchNorm(use_running_average=not self.train, name="norm")(x)
        return nn.Dense(1, name="head")(nn.relu(x))


def make_model(**options):
    return ff.Model(MLP(), optax.adam(0.05), "mse", **options)


def fitted(**options):
    model = make_model(**options)
    model.fit(X, Y, epochs=2, batch_size=8, verbose=0)
    return model


def assert_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def test_weights_are_used_in_a_fresh_model_and_trained_on(tmp_path):
    model = fitted()
    model.save_weights(tmp_path / "weights.safetensors")
    other = make_model(seed=1)
    other.load_weights(tmp_path / "weights.safetensors")
    np.testing.assert_array_equal(other.predict(X), model.predict(X))
    assert other.evaluate(X, Y) == model.evaluate(X, Y)
    assert other.step == 0
    other.fit(X, Y, batch_size=24, verbose=0)
    # One step of Adam moves each weight by about the learning rate, no more.
    kernels = [each.state.params["stem"]["kernel"] for each in (model, other)]
    assert 0 < np.abs(kernels[0] - kernels[1]).max() < 0.051


def test_some_of_the_weights_leave_the_others_as_they_begin(tmp_path):
    model = fitted()
    model.save_weights(tmp_path / "weights.safetensors")
    model, untouched = (make_model(seed=1, freeze="(stem|norm)/.*") for _ in range(2))
    model.load_weights(tmp_path / "weights.safetensors", partial="(stem|norm)/.*")
    for each in (model, untouched):
        each.fit(X, Y, batch_size=24, verbose=0)
    stem = fitted().state.params["stem"]
    assert_equal(model.state.params["stem"], stem)
    assert np.any(untouched.state.params["stem"]["kernel"] != stem["kernel"])
    assert (
        np.abs(
            model.state.params["head"]["kernel"] - untouched.state.params["head"]["kernel"]
        ).max()
        < 0.11
    )


def test_a_trained_model_takes_weights_over_and_begins_its_optimizer_afresh(tmp_path):
    model = fitted()
    model.save_weights(tmp_path / "weights.safetensors")
    expected = model.predict(X)
    model.fit(X, Y, epochs=1, batch_size=8, verbose=0)
    model.load_weights(tmp_path / "weights.safetensors")
    np.testing.assert_array_equal(model.predict(X), expected)
    assert model.step == 9
    assert not any(np.any(x) for x in jax.tree.leaves(model.state.opt_state))


def test_an_interrupted_fit_of_a_warm_model_goes_on_from_its_folder(tmp_path):
    fitted().save_weights(tmp_path / "weights.safetensors")
    whole = make_model(seed=1)
    whole.load_weights(tmp_path / "weights.safetensors")
    whole.fit(X, Y, epochs=4, batch_size=8, verbose=0)
    for epochs in (2, 4):
        model = make_model(seed=1)
        model.load_weights(tmp_path / "weights.safetensors")
        model.fit(X, Y, epochs=epochs, batch_size=8, verbose=0, checkpoint_dir=tmp_path / "run")
    assert_equal(model.state.params, whole.state.params)


def test_weights_of_another_model_are_refused_with_the_names_of_both(tmp_path):
    ff.checkpoints.save_weights(tmp_path / "w.safetensors", {"params": {"other": np.ones(3)}})
    model = make_model()
    model.load_weights(tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"(?s)other.*stem/kernel|stem/kernel.*other"):
        model.fit(X, Y, verbose=0)


def test_weights_under_other_names_are_translated(tmp_path):
    source = fitted().state.params
    names = {"a.weight": source["stem"]["kernel"].T, "a.bias": source["stem"]["bias"]}
    np.savez(tmp_path / "other.npz", **{name: np.asarray(x) for name, x in names.items()})
    translator = ff.importers.CheckpointTranslator()

    @translator.add(r"a\.(weight|bias)")
    def stem(opts, key, value, kind):
        if kind == "bias":
            return "stem/bias", value
        return "stem/kernel", np.asarray(value.get()).T

    model = make_model(seed=1, freeze="stem/.*")
    model.load_weights(tmp_path / "other.npz", translator=translator, partial="stem/.*")
    model.fit(X, Y, batch_size=24, verbose=0)
    assert_equal(model.state.params["stem"], source["stem"])
    model.load_weights(tmp_path / "other.npz", translator=translator, partial="stem/bias")
    with pytest.raises(ValueError, match="head/kernel is not in the checkpoint"):
        model.load_weights(tmp_path / "other.npz", translator=translator)
    with pytest.raises(ValueError, match="'body' matches no parameter"):
        model.load_weights(tmp_path / "other.npz", translator=translator, partial="body")
