"""Columns by name in `fit`, `evaluate` and `predict`, from every kind of data."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from marks import slow

import flaxfit as ff

X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
NAMES = [f"row {i}" for i in range(len(X))]
COLUMNS = {"image": X, "label": Y, "name": NAMES}
NAMED = {"inputs": "image", "targets": "label"}


def make_model(**options):
    module = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    options = {"strategy": ff.DataParallel(jax.devices()[:1]), **options}
    return ff.Model(module, optax.sgd(0.5), "crossentropy", ["accuracy"], **options)


def rows():
    return [{name: column[i] for name, column in COLUMNS.items()} for i in range(len(X))]


def batches():
    parts = [slice(i, i + 8) for i in range(0, len(X), 8)]
    return [{name: column[part] for name, column in COLUMNS.items()} for part in parts]


def hugging_face():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    return datasets.Dataset.from_dict({**COLUMNS, "image": X.tolist()})


def tensorflow():
    tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    return tf.data.Dataset.from_tensor_slices(COLUMNS).batch(8)


def grain():
    grain = pytest.importorskip("grain", reason="grain is not installed")
    return grain.MapDataset.source(rows()).batch(8)


def torch():
    pytest.importorskip("torch", reason="torch is not installed")
    import torch.utils.data

    return torch.utils.data.DataLoader(rows(), batch_size=8)


SOURCES = [
    lambda: COLUMNS,
    slow(batches),
    slow(lambda: batches),
    hugging_face,
    tensorflow,
    grain,
    torch,
]
IDS = ["mapping", "list", "callable", "datasets", "tf.data", "grain", "torch"]


@pytest.fixture(scope="module")
def expected():
    model = make_model()
    history = model.fit(X, Y, batch_size=8, shuffle=False, epochs=2, verbose=0)
    return history["loss"], model.evaluate(X, Y, batch_size=8), model.predict(X, batch_size=8)


@pytest.mark.parametrize("make", SOURCES, ids=IDS)
def test_every_kind_of_data_has_its_columns_taken_by_name(make, expected):
    losses, metrics, outputs = expected
    model, data, sizes = make_model(**NAMED), make(), {}
    if make in (SOURCES[0], hugging_face):
        sizes = {"batch_size": 8}
    options = {"shuffle": False} if sizes else {}
    history = model.fit(data, epochs=2, validation_data=data, verbose=0, **sizes, **options)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-6)
    assert model.evaluate(data, **sizes) == pytest.approx(metrics, rel=1e-6)
    assert history["val_loss"][-1] == pytest.approx(metrics["loss"], rel=1e-6)
    np.testing.assert_allclose(model.predict(data, **sizes), outputs, rtol=1e-5, atol=1e-6)


def test_usual_names_need_no_word_and_pairs_of_arrays_no_names(expected):
    model, named, options = make_model(), make_model(**NAMED), {"batch_size": 8}
    fit = {"shuffle": False, "epochs": 2, "verbose": 0, **options}
    assert model.fit({"image": X, "label": Y}, **fit)["loss"] == expected[0]
    assert model.evaluate({"image": X, "label": Y}, **options) == expected[1]
    named.fit(X, Y, **fit)
    for each, data in (
        (model, {"image": X, "label": Y}),
        (model, {"image": X}),
        (named, X),
    ):
        np.testing.assert_array_equal(each.predict(data, **options), expected[2])


@pytest.mark.slow
@pytest.mark.parametrize("data", [slow(COLUMNS), batches()], ids=["mapping", "batches"])
def test_a_fresh_model_evaluates_and_predicts_them(data):
    named, plain = make_model(**NAMED), make_model()
    assert named.evaluate(data) == pytest.approx(plain.evaluate(X, Y), rel=1e-6)
    np.testing.assert_allclose(named.predict(data), plain.predict(X), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_options_of_arrays_apply_to_a_mapping_of_them(expected):
    weights = np.where(np.arange(len(X)) % 3, 1.0, 2.0).astype(np.float32)
    options = {"epochs": 2, "validation_split": 0.25, "class_weight": {1: 3.0}, "verbose": 0}
    plain, named = make_model(), make_model(**NAMED, weights="weight")
    plain = plain.fit(X, Y, sample_weight=weights, **options)
    named = named.fit({**COLUMNS, "weight": weights}, **options)
    assert named["loss"] == plain["loss"] and named["val_loss"] == plain["val_loss"]


@pytest.mark.slow
def test_searches_and_summaries_take_them(capsys):
    optimizer = ff.optim.OptimizerDef(optax.sgd, learning_rate=0.1)
    module = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    model = ff.Model(module, optimizer, "crossentropy", **NAMED)
    model.summary(COLUMNS)
    assert "Linear · 8 params" in capsys.readouterr().out
    assert len(model.find_lr(COLUMNS, n_steps=10).losses) == 10


def test_what_is_left_over_without_a_word_is_refused():
    for call in (
        lambda model: model.fit(COLUMNS, verbose=0),
        lambda model: model.evaluate(COLUMNS),
        lambda model: model.predict(COLUMNS),
        lambda model: model.fit(batches(), verbose=0),
    ):
        with pytest.raises(ValueError, match="columns 'image', 'label', 'name'.*inputs='image'"):
            call(make_model())


def test_a_frame_has_its_columns_taken_by_name_beside_others_of_text():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    x, y = X[:, 0], Y.astype(np.float32)
    frame = pandas.DataFrame({"name": NAMES, "size": x, "label": y})
    found = []
    for data in {"name": NAMES, "size": x, "label": y}, frame:
        scale = ff.modules.from_function(
            lambda params, x: params["w"] * x, lambda key, x: {"w": jax.numpy.ones(())}
        )
        model = ff.Model(scale, optax.sgd(0.1), "mse", inputs="size", targets="label")
        history = model.fit(data, validation_data=data, verbose=0)
        found.append(
            (history["val_loss"], model.evaluate(data), *model.predict(data), *model.predict(frame))
        )
    assert found[0] == found[1]


class Difference(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(np.ones((), np.float32))

    def __call__(self, a, b):
        return self.scale[...] * (a - 10 * b)


@pytest.mark.parametrize("inputs", [{"a": "b", "b": "a"}, {"a": "c", "b": "a"}])
def test_columns_named_like_other_arguments_are_taken_once(inputs):
    columns = dict(zip("abc", X.T, strict=True))
    a, b = (columns[name] for name in inputs.values())
    expected, data = a - 10 * b, {**columns, "label": b}
    model = ff.Model(Difference(), optax.sgd(0.0), "mse", inputs=inputs, targets="label")
    loss = pytest.approx(np.mean((expected - b) ** 2), rel=1e-5)
    assert model.train_on_batch(data) == loss
    for found in (
        model.predict(data),
        model.predict(columns),
        model.predict_on_batch(data),
        next(model.predictions(data))[1],
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    targetless = ff.Model(Difference(), optax.sgd(0.0), lambda outputs: outputs, inputs=inputs)
    mean = pytest.approx(np.mean(expected), rel=1e-5)
    assert targetless.evaluate(columns)["loss"] == mean
    assert targetless.fit(columns, verbose=0)["loss"] == [mean]
