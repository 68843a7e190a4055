"""Weights that a model begins with: from a file, all of them or some."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from marks import thorough
from strategies import one_device

import flaxfit as ff

rng = np.random.default_rng(4)
X = rng.normal(size=(24, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)
FIRST = one_device()


class MLP(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5, name="stem")(x)
        x = nn.BatchNorm(use_running_average=not self.train, name="norm")(x)
        return nn.Dense(1, name="head")(nn.relu(x))


def make_model(**options):
    return ff.Model(MLP(), optax.adam(0.05), "mse", strategy=FIRST, **options)


def fitted(**options):
    model = make_model(**options)
    model.fit(X, Y, epochs=6, batch_size=24, verbose=0)
    return model


@pytest.fixture(scope="module")
def trained():
    return fitted()


def assert_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.mark.slow
def test_weights_are_used_in_a_fresh_model_and_trained_on(trained, tmp_path):
    model = trained
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


@pytest.mark.slow
def test_some_of_the_weights_leave_the_others_as_they_begin(trained, tmp_path):
    trained.save_weights(tmp_path / "weights.safetensors")
    model, untouched = (make_model(seed=1, freeze="(stem|norm)/.*") for _ in range(2))
    model.load_weights(tmp_path / "weights.safetensors", partial="(stem|norm)/.*")
    for each in (model, untouched):
        each.fit(X, Y, batch_size=24, verbose=0)
    stem = trained.state.params["stem"]
    assert_equal(model.state.params["stem"], stem)
    assert np.any(untouched.state.params["stem"]["kernel"] != stem["kernel"])
    heads = [each.state.params["head"]["kernel"] for each in (model, untouched)]
    assert np.abs(heads[0] - heads[1]).max() < 0.11


@pytest.mark.slow
def test_a_trained_model_takes_weights_over_and_begins_its_optimizer_afresh(tmp_path):
    model = fitted()
    model.save_weights(tmp_path / "weights.safetensors")
    expected = model.predict(X)
    model.fit(X, Y, batch_size=24, verbose=0)
    model.load_weights(tmp_path / "weights.safetensors")
    np.testing.assert_array_equal(model.predict(X), expected)
    assert model.step == 7
    assert not any(np.any(x) for x in jax.tree.leaves(model.state.opt_state))


@pytest.mark.slow
def test_an_interrupted_fit_of_a_warm_model_goes_on_from_its_folder(trained, tmp_path):
    trained.save_weights(tmp_path / "weights.safetensors")
    whole = make_model(seed=1)
    whole.load_weights(tmp_path / "weights.safetensors")
    whole.fit(X, Y, epochs=4, batch_size=8, verbose=0)
    for epochs in (2, 4):
        model = make_model(seed=1)
        model.load_weights(tmp_path / "weights.safetensors")
        model.fit(X, Y, epochs=epochs, batch_size=8, verbose=0, checkpoint_dir=tmp_path / "run")
    assert_equal(model.state.params, whole.state.params)


@pytest.mark.slow
def test_weights_under_other_names_are_translated(trained, tmp_path):
    source = trained.state.params
    names = {"a.weight": source["stem"]["kernel"].T, "a.bias": source["stem"]["bias"]}
    np.savez(tmp_path / "other.npz", **{name: np.asarray(x) for name, x in names.items()})
    translator = ff.importers.CheckpointTranslator()

    @translator.add(r"a\.(weight|bias)")
    def stem(opts, key, value, kind):
        assert opts == {"seed": 1, "optimizer": "none"} or not opts
        if kind == "bias":
            return "stem/bias", value
        return "stem/kernel", np.asarray(value.get()).T

    model = make_model(seed=1, freeze="stem/.*")
    options = {"seed": 1, "optimizer": "none"}  # The translator's own.
    model.load_weights(tmp_path / "other.npz", translator=translator, partial="stem/.*", **options)
    model.fit(X, Y, batch_size=24, verbose=0)
    assert_equal(model.state.params["stem"], source["stem"])
    model.load_weights(tmp_path / "other.npz", translator=translator, partial="stem/bias")
    with pytest.raises(ValueError, match="head/kernel is not in the checkpoint"):
        model.load_weights(tmp_path / "other.npz", translator=translator)
    with pytest.raises(TypeError, match="The options seed need a translator"):
        model.load_weights(tmp_path / "other.npz", seed=1)
    with pytest.raises(ValueError, match="'body' matches no parameter"):
        model.load_weights(tmp_path / "other.npz", translator=translator, partial="body")


# Before a fit: the shapes are those of the first inputs.


class Body(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5, name="stem")(x)
        return nn.BatchNorm(use_running_average=not self.train, name="norm")(x)


class Whole(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="head")(nn.relu(Body(self.train, name="body")(x)))


def plain_names(state):
    """The parameters as another library would name and store them."""
    return {name: np.asarray(leaf) for name, leaf in flatten_dict(state.params, sep="/").items()}


def collection_names(state):
    return {name: np.asarray(leaf) for name, leaf in flatten_dict(state.variables, sep="/").items()}


@pytest.fixture(params=[thorough("npz"), "safetensors"])
def write(request, tmp_path):
    """Writes arrays under their names in a file of either format."""

    def save(arrays):
        path = tmp_path / f"weights.{request.param}"
        if request.param == "npz":
            np.savez(path, **arrays)
        else:
            ff.checkpoints.save_weights(path, arrays)
        return path

    return save


@pytest.mark.slow
@pytest.mark.parametrize("named", [plain_names, collection_names])
def test_names_tell_whether_weights_are_of_all_collections(trained, write, named):
    model = make_model(seed=1)
    model.load_weights(write(named(trained.state)))
    predicted = model.predict(X)
    assert_equal(model.state.params, trained.state.params)
    if named is collection_names:
        assert_equal(model.state.model_state, trained.state.model_state)
        np.testing.assert_array_equal(predicted, trained.predict(X))
    else:
        fresh = {"mean": np.zeros(5), "var": np.ones(5)}
        assert_equal(model.state.model_state, {"batch_stats": {"norm": fresh}})
    # The same, of a model that has begun.
    begun = fitted(seed=2)
    begun.load_weights(write(named(trained.state)))
    assert_equal(begun.state.params, trained.state.params)
    statistics = (trained if named is collection_names else fitted(seed=2)).state.model_state
    assert_equal(begun.state.model_state, statistics)


@pytest.mark.slow
@pytest.mark.parametrize("use", [thorough("predict"), thorough("evaluate"), "fit"])
def test_the_first_inputs_complete_a_model_in_the_same_way(trained, tmp_path, use):
    trained.save_weights(tmp_path / "weights.safetensors")
    options = {"strategy": FIRST, "seed": 1, "ema": 0.9}
    models = [ff.Model(MLP(), optax.sgd(0.0), "mse", **options) for _ in range(2)]
    for model in models:
        model.load_weights(tmp_path / "weights.safetensors", partial="(stem|norm)/.*")
    models[0].fit(X, Y, batch_size=24, verbose=0)
    if use == "fit":
        models[1].predict(X)  # Neither does using a model change what it is fitted from.
        models[1].fit(X, Y, batch_size=24, verbose=0)
    else:
        getattr(models[1], use)(*((X,) if use == "predict" else (X, Y)))
    assert_equal(models[1].state.params, models[0].state.params)
    assert models[1].step == (1 if use == "fit" else 0)


@pytest.mark.slow
def test_batches_that_come_once_are_all_used(trained, tmp_path):
    trained.save_weights(tmp_path / "weights.safetensors")

    def batches(*arrays):
        return (tuple(a[i : i + 8] for a in arrays) for i in range(0, 24, 8))

    for use in ("predict", "evaluate"):
        model = make_model(seed=1)
        model.load_weights(tmp_path / "weights.safetensors", partial=".*")
        if use == "predict":
            expected = trained.predict(X, batch_size=8)
            np.testing.assert_array_equal(model.predict(batches(X)), expected)
        else:
            found = model.evaluate(batches(X, Y))["loss"]
            assert found == trained.evaluate(X, Y, batch_size=8)["loss"]
    with pytest.raises(ValueError, match="gave no batches"):
        model = make_model()
        model.load_weights(tmp_path / "weights.safetensors", partial=".*")
        model.predict(iter([]))


def test_a_file_is_opened_when_it_is_named(tmp_path):
    model = make_model()
    for name in ("none.npz", "none.safetensors", "none"):
        with pytest.raises(FileNotFoundError):
            model.load_weights(tmp_path / name)
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    with pytest.raises(ff.importers.UnreadableFile, match=r"bad\.npz"):
        model.load_weights(tmp_path / "bad.npz")


def test_weights_that_do_not_fit_are_refused_at_the_first_use(trained, write, tmp_path):
    model = make_model()
    model.load_weights(write(plain_names(trained.state)))
    with pytest.raises(RuntimeError, match="shapes .* are not known yet: call predict"):
        _ = model.state
    names = collection_names(trained.state)
    del names["batch_stats/norm/mean"]
    model = make_model()
    model.load_weights(write(names))
    with pytest.raises(ValueError, match="batch_stats/norm/mean"):
        model.predict(X)
    trained.save_weights(tmp_path / "all.safetensors")
    other = ff.Model(nn.Dense(2), optax.sgd(0.1), "mse")
    other.load_weights(tmp_path / "all.safetensors")
    for use in (lambda: other.predict(X), lambda: other.fit(X, Y, verbose=0)):
        with pytest.raises(ValueError, match=r"(?s)params/stem/kernel.*partial= what to take"):
            use()


@pytest.mark.slow
def test_a_part_of_a_model_is_taken_from_the_file_of_that_part(write):
    body = ff.Model(Body(), optax.sgd(0.1), "mse", strategy=FIRST)
    body.fit(X, np.tile(Y, 5), batch_size=24, verbose=0)
    whole = ff.Model(Whole(), optax.sgd(0.0), "mse", strategy=FIRST)
    path = write(collection_names(body.state))
    whole.load_weights(path, prefix="body")
    whole.predict(X)
    assert_equal(whole.state.params["body"], body.state.params)
    assert_equal(whole.state.model_state["batch_stats"]["body"], *body.state.model_state.values())
    assert np.any(whole.state.params["head"]["kernel"])
    other = ff.Model(Whole(), optax.sgd(0.0), "mse", strategy=FIRST)
    other.load_weights(path, prefix="trunk")
    with pytest.raises(ValueError, match="'trunk' is not a part of the model, .* body, head"):
        other.predict(X)


def test_options_are_handed_to_the_rules_and_a_missing_one_is_named(trained, write):
    translator = ff.importers.CheckpointTranslator()

    @translator.add(r"(.*)/(\w+)")
    def rule(opts, name, value, module, part):
        return f"{module}/{part}", value.reshape(opts["n"]) if part == "scale" else value

    path = write(plain_names(trained.state))
    model = make_model()
    with pytest.raises(ValueError, match="needs the option 'n', which was not given: pass n="):
        model.load_weights(path, translator=translator)
    model.load_weights(path, translator=translator, n=5)
    model.predict(X)
    assert_equal(model.state.params, trained.state.params)


class Named(nn.Module):
    """A kernel whose dimensions have names."""

    @nn.compact
    def __call__(self, x):
        names = nn.with_partitioning(nn.initializers.ones, ("a", "b"))
        return nn.Dense(1, kernel_init=names, name="dense")(x)


def test_parameters_with_named_dimensions_are_loaded_too(write):
    model = ff.Model(Named(), optax.sgd(0.1), "mse")
    kernel = np.full((3, 1), 7, np.float32)
    model.load_weights(write({"dense/kernel": kernel, "dense/bias": np.zeros(1, np.float32)}))
    np.testing.assert_allclose(model.predict(X), 7 * Y, rtol=1e-5)
    assert (model.state.axes or {})["params/dense/kernel"] == jax.sharding.PartitionSpec("a", "b")


@pytest.mark.slow
def test_a_model_with_loaded_weights_is_exported_without_a_fit(trained, tmp_path):
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    trained.save_weights(tmp_path / "weights.safetensors")
    model = make_model(seed=1)
    model.load_weights(tmp_path / "weights.safetensors", partial=".*")
    spec = ff.export.InputSpec(("batch", 3))
    model.export(tmp_path / "mlp.stablehlo", input_spec=spec, gradients=False)
    loaded = ff.export.load(tmp_path / "mlp.stablehlo")
    np.testing.assert_allclose(loaded(X), trained.predict(X), rtol=1e-5)


# Several files, one after the other.


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="b")(nn.Dense(2, name="a")(x))


def pair(**options):
    return ff.Model(Pair(), optax.sgd(0.0), "mse", strategy=FIRST, **options)


ONE, TWO = np.ones((1, 4), np.float32), np.zeros((1, 2), np.float32)


@pytest.fixture
def parts(tmp_path):
    """Writes a file of all weights of a `Pair`, each of one value; or of one part alone."""

    def save(value, part=None):
        sizes = {"a": (4, 2), "b": (2, 2)}
        arrays = {
            f"params/{name}/{leaf}": np.full(shape, value, np.float32)
            for name, (n, m) in sizes.items()
            for leaf, shape in (("kernel", (n, m)), ("bias", (m,)))
            if part in (None, name)
        }
        path = tmp_path / f"{value}-{part}.safetensors"
        ff.checkpoints.save_weights(path, arrays)
        return path

    return save


# a = 1: 4 * 1 + 1 = 5 each; b = 2: 2 * 5 * 2 + 2 = 22.
EXPECTED = np.full((1, 2), 22.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "between", [thorough("nothing"), "predict", thorough("evaluate"), "fit", thorough("state")]
)
def test_weights_of_a_second_file_are_added_to_those_of_the_first(parts, between, capfd):
    model = pair()
    model.load_weights(parts(1), partial="a/.*")
    if between == "predict":
        model.predict(ONE)
    elif between in ("evaluate", "fit"):
        getattr(model, between)(ONE, TWO)
    elif between == "state":
        model.predict(ONE)
        model.state = model.state
    model.load_weights(parts(2), partial="b/.*")
    np.testing.assert_array_equal(model.predict(ONE), EXPECTED)
    assert capfd.readouterr().err.count("kept b/bias, b/kernel") == 1
    model.fit(ONE, TWO, verbose=0)
    np.testing.assert_array_equal(model.predict(ONE), EXPECTED)


@pytest.mark.slow
def test_a_part_is_added_to_a_whole_file_and_to_another_part(parts, tmp_path):
    model = pair()
    model.load_weights(parts(1))
    arrays = {"kernel": np.full((2, 2), 2, np.float32), "bias": np.full(2, 2, np.float32)}
    np.savez(tmp_path / "b.npz", **arrays)
    model.load_weights(tmp_path / "b.npz", prefix="b")
    np.testing.assert_array_equal(model.predict(ONE), EXPECTED)
    model = pair()
    model.load_weights(tmp_path / "b.npz", prefix="b")
    model.load_weights(parts(1), partial="a/.*")
    model.fit(ONE, TWO, verbose=0)
    np.testing.assert_array_equal(model.predict(ONE), EXPECTED)
    model = pair()
    model.load_weights(tmp_path / "b.npz", prefix="b")
    model.load_weights(parts(2))
    np.testing.assert_array_equal(model.state.params["a"]["kernel"], np.full((4, 2), 2))


def test_a_file_that_did_not_fit_is_replaced_by_the_next(parts, tmp_path):
    np.savez(tmp_path / "wrong.npz", other=np.ones(3))
    model = pair()
    model.load_weights(parts(1), partial="a/.*")
    model.load_weights(tmp_path / "wrong.npz")
    for _ in range(2):
        with pytest.raises(ValueError, match="other"):
            model.predict(ONE)
    model.load_weights(parts(2), partial="b/.*")
    np.testing.assert_array_equal(model.predict(ONE), EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [thorough("one"), "fsdp", "data_parallel", thorough("virtual")]
)
def test_loaded_weights_are_trained_under_every_strategy(parts, strategy):
    strategy = {
        "one": lambda: ff.Sharded(devices=jax.devices()[:1]),
        "fsdp": ff.Sharded.fsdp,
        "data_parallel": ff.DataParallel,
        "virtual": lambda: ff.DataParallel(virtual_replicas=8),
    }[strategy]()
    model = ff.Model(Pair(), optax.adam(0.0), "mse", strategy=strategy)
    model.load_weights(parts(1), partial="a/.*")
    model.load_weights(parts(2), partial="b/.*")
    model.fit(np.repeat(ONE, 8, 0), np.repeat(TWO, 8, 0), verbose=0)
    np.testing.assert_array_equal(model.predict(ONE), EXPECTED)


@pytest.mark.slow
def test_a_loop_begins_with_given_weights_under_a_sharded_strategy():
    class Given:
        gives_weights = True

        def __call__(self, rngs, x):
            assert not isinstance(x, jax.core.Tracer)
            layers = {"a": (4, 2), "b": (2, 2)}
            return {"params": {n: {"kernel": np.ones(s, "f4")} for n, s in layers.items()}}

    data = ff.ArrayStream(np.repeat(ONE, 8, 0), np.repeat(TWO, 8, 0), batch_size=8)
    task = ff.TrainTask(Pair().apply, optax.adam(0.0), "mse", data)
    loop = ff.TrainLoop(Given(), task, 0, n_steps=1, strategy=ff.Sharded.fsdp(), stdout=False)
    assert np.all(loop.state.params["b"]["kernel"] == 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"ema": 0.5}, {"freeze": "a/.*"}])
def test_a_folder_of_checkpoints_gives_its_weights_to_another_optimizer(tmp_path, options):
    model = ff.Model(Pair(), optax.adam(0.1), "mse", **options)
    model.fit(ONE, TWO, epochs=2, verbose=0)
    model.save(tmp_path / "run")
    other = ff.Model(Pair(), optax.sgd(0.0), "mse")
    other.load(tmp_path / "run")
    with pytest.raises(ValueError, match=r"Model\.load_weights\(folder\) takes its weights alone"):
        other.fit(ONE, TWO, verbose=0)
    other = ff.Model(Pair(), optax.sgd(0.0), "mse")
    other.load_weights(tmp_path / "run")
    other.fit(ONE, TWO, verbose=0)
    expected = model.trained().variables["params"]
    jax.tree.map(np.testing.assert_array_equal, other.state.params, expected)
    part = pair(seed=1)
    part.load_weights(tmp_path / "run", partial="a/.*")
    part.fit(ONE, TWO, verbose=0)
    found = part.state.params
    jax.tree.map(np.testing.assert_array_equal, found["a"], expected["a"])
    assert np.any(found["b"]["kernel"] != expected["b"]["kernel"])
