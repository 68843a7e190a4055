"""Weights by class, of arrays and of batches."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from marks import slow

import flaxfit as ff
from flaxfit.data._class_weights import ClassWeightedStream, balanced_by_pass, weights_by_class

Y = np.array([0, 0, 0, 1, 2, 2])


def test_balanced_weights_are_those_of_scikit_learn():
    found = weights_by_class(Y, "balanced")
    np.testing.assert_allclose(found, (6 / (3 * np.bincount(Y)))[Y], rtol=1e-6)
    class_weight = pytest.importorskip("sklearn.utils.class_weight")
    np.testing.assert_allclose(found, class_weight.compute_sample_weight("balanced", Y), rtol=1e-6)


def test_balanced_weights_do_not_count_what_has_no_weight():
    found = weights_by_class(Y, "balanced", np.array([1, 0, 0, 1, 1, 1]))
    np.testing.assert_allclose(found, (4 / (3 * np.array([1, 1, 2])))[Y], rtol=1e-6)


@pytest.mark.parametrize(
    "batch",
    [
        (Y, Y),
        (Y, np.eye(3)[Y]),
        ((Y,), [Y[:, None]]),
        {"x": Y, "y": Y},
        (Y, Y, np.full(6, 2.0)),
        (Y, Y.astype(float), np.full((6, 1), 2.0)),
    ],
    ids=["labels", "one-hot", "lists", "mapping", "weights", "column"],
)
def test_the_batches_of_a_stream_are_weighted_by_label(batch):
    *_, weights = next(ClassWeightedStream(iter([batch]), {2: 3.0, 1: 0.5}))
    factor = 2 if isinstance(batch, tuple) and len(batch) == 3 else 1
    np.testing.assert_allclose(weights.ravel(), factor * np.array([1, 1, 1, 0.5, 3, 3]))


def test_a_weighted_stream_has_the_position_of_its_stream():
    stream = ClassWeightedStream(ff.ArrayStream(Y, Y, batch_size=2), {2: 3.0})
    assert len(stream) == 3 and not hasattr(stream, "next_rows")
    next(stream)
    assert stream.get_state()["batch"] == 1
    np.testing.assert_array_equal(stream.whole()[2], [1, 1, 1, 1, 3, 3])


@pytest.mark.parametrize(
    ("class_weight", "error", "message"),
    [
        ("balanced", ValueError, "needs the labels of all examples, but one batch"),
        ([1.0], TypeError, r"must map labels to weights, such as \{0: 1.0, 1: 2.5\}, got list"),
        ({"a": 1.0}, TypeError, "labels of class_weight must be integers, got 'a'"),
    ],
)
def test_class_weights_of_batches_are_by_integer(class_weight, error, message):
    with pytest.raises(error, match=message):
        ClassWeightedStream(iter([]), class_weight)


TOKENS = np.array([[2, 1], [1, 1], [0, 1], [1, 0], [0, 1], [1, 0]])


@pytest.mark.parametrize("dtype", [int, float])
def test_labels_of_tokens_are_read_alike_in_arrays_and_in_every_batch(dtype):
    y = TOKENS.astype(dtype)
    expected = np.where(TOKENS == 1, 9, 1)
    np.testing.assert_array_equal(weights_by_class(y, {1: 9.0}), expected)
    np.testing.assert_array_equal(weights_by_class(y[2:], {1: 9.0}, all_of=y), expected[2:])
    stream = ClassWeightedStream(ff.ArrayStream(y, y, batch_size=2, epochs=1), {1: 9.0})
    np.testing.assert_array_equal(np.concatenate([w for *_, w in stream]), expected)


def test_integers_that_may_be_one_hot_are_refused_in_a_first_batch():
    y = TOKENS[::-1]
    with pytest.raises(
        ValueError, match=r"cannot tell .* \(2, 2\), are one-hot rows or the labels"
    ):
        next(ClassWeightedStream(ff.ArrayStream(y, y, batch_size=2), {1: 9.0}))


def test_batches_that_are_not_one_hot_as_those_before_are_refused():
    y = TOKENS[::-1].astype(float)
    stream = ClassWeightedStream(ff.ArrayStream(y, y, batch_size=2, epochs=1), {1: 9.0})
    assert next(stream)[2].tolist() == [1, 9]
    next(stream)
    with pytest.raises(
        ValueError, match=r"of earlier batches as one-hot rows, but this batch has other targets"
    ):
        next(stream)


def test_targets_of_several_outputs_are_refused():
    with pytest.raises(ValueError, match="a single array of labels as targets y"):
        next(ClassWeightedStream(iter([(Y, (Y, Y))]), {0: 2.0}))
    with pytest.raises(ValueError, match="cannot be combined with sample_weight by output"):
        next(ClassWeightedStream(iter([(Y, Y, {"a": Y})]), {0: 2.0}))


class ByIndex:
    """Batches that are read by index only, and count the calls of their hook."""

    n_ended = 0

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]

    def on_epoch_end(self):
        self.n_ended += 1


def hugging_face(y):
    data = pytest.importorskip("datasets").Dataset.from_dict({"x": y * 1.0, "y": y})
    return data.with_format("numpy")


def mapped(y, tmp_path):
    np.save(tmp_path / "y.npy", y)
    y = np.load(tmp_path / "y.npy", mmap_mode="r")
    return ff.ArrayStream(y, y, batch_size=4, shuffle=True, drop_remainder=True)


BATCHES = [(Y[:2], Y[:2]), (Y[2:], Y[2:])]
COUNTABLE = {
    "stream": lambda path: ff.ArrayStream(Y, Y, batch_size=4, shuffle=True, drop_remainder=True),
    "mapped": lambda path: mapped(Y, path),
    "list": lambda path: BATCHES,
    "by index": lambda path: ByIndex(BATCHES),
    "Hugging Face": lambda path: hugging_face(Y),
}


@pytest.mark.parametrize("kind", COUNTABLE)
def test_balanced_labels_are_counted_in_a_pass_that_leaves_data_as_it_was(tmp_path, capsys, kind):
    data = COUNTABLE[kind](tmp_path)
    state = data.get_state() if kind in ("stream", "mapped") else None
    found = balanced_by_pass(
        data, 2, lambda item: (item["x"], item["y"]) if kind[0] == "H" else item
    )
    assert found == pytest.approx({0: 2 / 3, 1: 2, 2: 1})
    assert list(map(type, found)) == [int] * 3
    printed = capsys.readouterr().err
    assert "once to count its labels: 0: 0.6667, 1: 2, 2: 1" in printed
    assert state is None or data.get_state() == state
    assert getattr(data, "n_ended", 0) == 0


def test_balanced_labels_of_batches_do_not_count_what_has_no_weight():
    batches = [(Y, Y.astype(float), np.array([1.0, 0, 0, 1, 1, 1]))]
    assert balanced_by_pass(batches) == pytest.approx({0: 4 / 3, 1: 4 / 3, 2: 2 / 3})
    with pytest.raises(ValueError, match="cannot be combined with sample_weight by output"):
        balanced_by_pass([(Y, Y, {"a": Y})])


class Endless(ByIndex):
    def __len__(self):
        raise TypeError


@pytest.mark.parametrize(
    "data",
    [iter(BATCHES), lambda: iter(BATCHES), Endless(BATCHES), {0: BATCHES[0]}.values()],
    ids=["generator", "callable", "endless", "iterable"],
)
def test_labels_that_cannot_be_counted_without_effect_are_refused(data):
    with pytest.raises(ValueError, match=r"count them may change .* pass .label: n / .classes"):
        balanced_by_pass(data)


@pytest.mark.parametrize(
    "strategy",
    [lambda: ff.DataParallel(jax.devices()[:1]), slow(ff.DataParallel), slow(ff.Sharded)],
    ids=["one device", "data parallel", "sharded"],
)
def test_fit_on_batches_is_that_with_the_weights_by_hand_and_resumes(tmp_path, strategy):
    weights, x = {0: 2 / 3, 1: 2.0, 2: 1.0}, np.eye(3, dtype=np.float32)[Y]

    def fit(class_weight, **options):
        data = ByIndex([(x[:4], Y[:4]), (x[4:], Y[4:])])
        model = ff.Model(nn.Dense(3), optax.sgd(0.1), "crossentropy", strategy=strategy())
        options = {"shuffle": True, "epochs": 2, "verbose": 0, **options}
        history = model.fit(data, class_weight=class_weight, **options)
        return dict(history)

    def fail(checkpoint):
        if checkpoint.step == 4:
            raise KeyError

    expected = fit(weights)
    with pytest.raises(KeyError):
        fit("balanced", callbacks=[fail], checkpoint_dir=tmp_path)
    assert fit("balanced", checkpoint_dir=tmp_path) == expected
