"""The cross-entropies: digits, labels of all kinds, and their options."""

import pickle

import jax
import numpy as np
import optax
import pytest
from marks import slow

from flaxfit import losses

GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(32, 10)).astype(np.float32)
LABELS = GENERATOR.integers(0, 10, 32)
SCORES = GENERATOR.normal(size=32).astype(np.float32)
TARGETS = GENERATOR.normal(size=32).astype(np.float32)
ONEHOT = np.eye(10)[LABELS]


def test_losses_by_token_keep_their_axes():
    logits, labels = np.zeros((4, 6, 9), np.float32), np.ones((4, 6), np.int32)
    assert jax.eval_shape(losses.crossentropy, logits, labels).shape == (4, 6)
    assert jax.eval_shape(losses.binary_crossentropy, logits, logits).shape == (4, 6, 9)


@pytest.mark.parametrize("shape", [slow((5,)), (4, 3)])
def test_crossentropy_and_its_gradient_are_those_of_optax(shape):
    logits = GENERATOR.normal(size=(*shape, 7)).astype(np.float32) * 30
    labels = GENERATOR.integers(0, 7, shape)
    logits[..., 3][labels != 3] = -np.inf  # A class that is ruled out.

    def gradient(loss):
        return jax.jit(jax.grad(lambda x: (loss(x, labels) * np.arange(shape[-1])).sum()))(logits)

    theirs = optax.softmax_cross_entropy_with_integer_labels
    with jax.enable_x64(True):
        exact = jax.jit(theirs)(logits.astype(np.float64), labels)
    np.testing.assert_allclose(jax.jit(losses.crossentropy)(logits, labels), exact, 1e-6, 1e-7)
    expected = gradient(theirs)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(gradient(losses.crossentropy), expected, rtol=1e-6, atol=1e-7)


RULED_OUT = np.where(np.arange(10) == (LABELS[:, None] + 1) % 10, -np.inf, LOGITS)
RULED_OUT = RULED_OUT.astype(np.float32)


@pytest.mark.parametrize("loss", [losses.onehot_crossentropy, slow(losses.kl_divergence)])
def test_a_class_that_is_ruled_out_does_not_count_in_one_hot_labels(loss):
    def of(loss, labels):
        return jax.jit(jax.value_and_grad(lambda x: loss(x, labels).sum()))(RULED_OUT)

    for found, expected in zip(of(loss, ONEHOT), of(losses.crossentropy, LABELS), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert loss(np.float32([[0, -np.inf]]), np.float32([[0, 1]])) == np.inf


@pytest.mark.parametrize(
    "loss", [losses.binary_crossentropy, slow(losses.binary_focal_crossentropy)]
)
def test_infinite_scores_are_right_or_infinitely_wrong(loss):
    scores, labels = np.float32([-np.inf, np.inf]), np.float32([0, 1])
    values, pull = jax.vjp(lambda x: loss(x, labels), scores)
    np.testing.assert_array_equal(values, 0)
    np.testing.assert_array_equal(pull(np.ones_like(scores))[0], 0)
    np.testing.assert_array_equal(losses.binary_crossentropy(-scores, labels), np.inf)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_labels_that_are_out_of_range_are_no_class(dtype):
    labels = np.array([0, -1, 10, 9, -11], dtype)
    values = jax.jit(losses.crossentropy)(LOGITS[:5], labels)
    assert np.isnan(values).tolist() == [False, True, True, False, True]


def test_wide_labels_are_not_cut_to_a_class():
    with jax.enable_x64(True):
        labels = np.array([2**32 + 1, 2**32 - 1, 1])
        values = jax.jit(losses.crossentropy)(LOGITS[:3], labels)
        assert np.isnan(values).tolist() == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "n_classes"), [("uint8", 256), ("uint8", 300), ("int8", 1000), ("uint16", 65_536)]
)
def test_labels_may_be_of_a_type_that_does_not_hold_the_number_of_classes(dtype, n_classes):
    logits = GENERATOR.normal(size=(3, n_classes)).astype(np.float32)
    labels = np.array([0, 50, 127], dtype)
    theirs = jax.jit(optax.softmax_cross_entropy_with_integer_labels)
    expected = theirs(logits, labels.astype(int))
    np.testing.assert_allclose(jax.jit(losses.crossentropy)(logits, labels), expected, rtol=1e-6)


def test_optax_itself_broadcasts_in_silence():
    column = SCORES[:, None]
    assert optax.softmax_cross_entropy(LOGITS, column).shape == (32,)
    assert optax.sigmoid_binary_cross_entropy(column, SCORES).shape == (32, 32)


def test_a_column_of_labels_is_refused_in_words():
    with pytest.raises(ValueError) as error:
        losses.crossentropy(LOGITS, np.zeros((32, 1), np.int64))
    assert str(error.value) == (
        "loss 'crossentropy' expects integer labels of shape (32,) for outputs of shape (32, 10), "
        "got labels (32, 1) int64. Squeeze them (y[:, 0]), or use loss='onehot_crossentropy' for "
        "one-hot labels."
    )


@pytest.mark.parametrize(
    ("outputs", "labels", "advice"),
    [
        (LOGITS, np.zeros(32, np.float32), r"got labels \(32,\) float32. Cast them: y.astype"),
        (LOGITS, np.zeros(32, bool), r"got labels \(32,\) bool. Cast them: y.astype"),
        (LOGITS, ONEHOT, "Use loss='onehot_crossentropy' for one-hot labels"),
        (LOGITS, np.zeros(31, int), "one label per row of outputs"),
        (LOGITS[:, :1], np.zeros(32, int), "use loss='binary_crossentropy'"),
        (SCORES, np.zeros(32, int), r"one output per class.*got outputs \(32,\)"),
        (LABELS, LOGITS, r"takes outputs first: it got outputs \(32,\) and labels"),
    ],
)
def test_labels_of_another_form_are_refused_with_what_to_do(outputs, labels, advice):
    with pytest.raises(ValueError, match=advice):
        losses.crossentropy(outputs, labels)
    with pytest.raises(ValueError, match="Use loss='crossentropy' for integer labels"):
        losses.onehot_crossentropy(LOGITS, LABELS)


@pytest.mark.parametrize("large", [np.float16(3e4), np.float32(1e4), np.float32(-1e30)])
def test_large_logits_leave_all_digits_of_the_loss(large):
    logits = np.full((1, 2), large)
    by_label, by_row = jax.jit(losses.crossentropy), jax.jit(losses.onehot_crossentropy)
    np.testing.assert_allclose(by_label(logits, np.array([1])), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(by_row(logits, np.eye(2)[:1]), np.log(2))


@pytest.mark.parametrize(
    ("loss", "outputs", "labels", "label"),
    [
        (losses.crossentropy, LOGITS, LABELS, -100),
        slow(losses.crossentropy, LOGITS, LABELS, 0),
        (losses.binary_crossentropy, SCORES, (TARGETS > 0).astype(np.int32), -1),
    ],
    ids=["outside", "a class", "binary"],
)
def test_an_ignored_label_has_no_weight_no_value_and_no_gradient(loss, outputs, labels, label):
    labels = labels.copy()
    labels[::3] = label
    ignoring, counts = loss(ignore_label=label), labels != label
    values, weights = jax.jit(ignoring)(outputs, labels)
    np.testing.assert_array_equal(weights, counts)
    np.testing.assert_array_equal(
        values, np.where(counts, jax.jit(loss)(outputs, labels * counts), 0)
    )
    gradient = jax.jit(jax.grad(lambda x: ignoring(x, labels)[0].sum()))(outputs)
    assert not gradient[~counts].any() and gradient[counts].any()
    repeated = jax.jit(pickle.loads(pickle.dumps(ignoring)))(outputs, labels)
    np.testing.assert_array_equal(repeated[0], values)


def softmax(logits):
    return np.asarray(jax.jit(jax.nn.softmax)(logits))


@pytest.mark.slow
def test_smoothed_labels_are_those_of_optax():
    smooth = optax.smooth_labels(np.eye(10, dtype=np.float32)[LABELS], 0.2)
    expected = optax.softmax_cross_entropy(LOGITS, smooth)
    by_label = losses.crossentropy(label_smoothing=0.2)(LOGITS, LABELS)
    by_row = losses.onehot_crossentropy(label_smoothing=0.2)(LOGITS, np.eye(10)[LABELS])
    np.testing.assert_allclose(by_label, expected, rtol=1e-5)
    np.testing.assert_allclose(by_row, expected, rtol=1e-6)
    bits = losses.binary_crossentropy(label_smoothing=0.2)(SCORES, TARGETS > 0)
    shares = np.where(TARGETS > 0, 0.9, 0.1).astype(np.float32)
    np.testing.assert_allclose(bits, losses.binary_crossentropy(SCORES, shares), rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "shares", "labels", "logits"),
    [
        (losses.crossentropy, softmax(LOGITS), LABELS, LOGITS),
        (losses.onehot_crossentropy, softmax(LOGITS), np.eye(10)[LABELS], LOGITS),
        (losses.binary_crossentropy, 1 / (1 + np.exp(-SCORES)), TARGETS > 0, SCORES),
        (losses.kl_divergence, softmax(LOGITS), softmax(LOGITS[::-1]), LOGITS),
    ],
)
def test_probabilities_give_the_loss_of_their_logits(loss, shares, labels, logits):
    values = loss(from_logits=False)(shares, labels)
    np.testing.assert_allclose(values, loss(logits, labels), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_certain_probabilities_have_a_value_and_a_gradient():
    certain, labels = np.eye(3, dtype=np.float32), np.array([0, 0, 2])

    def total(shares):
        return losses.crossentropy(from_logits=False)(shares, labels).sum()

    values, gradient = jax.jit(jax.value_and_grad(total))(certain)
    np.testing.assert_allclose(values, -np.log(1e-7), rtol=1e-5)
    assert np.isfinite(gradient).all()


@pytest.mark.slow
def test_probabilities_and_a_label_to_ignore_go_together():
    loss = losses.crossentropy(from_logits=False, ignore_label=-1, label_smoothing=0.1)
    values, weights = jax.jit(loss)(softmax(LOGITS), np.where(LABELS == 3, -1, LABELS))
    np.testing.assert_array_equal(weights, LABELS != 3)
    expected = jax.jit(losses.crossentropy(label_smoothing=0.1))(LOGITS, LABELS)
    np.testing.assert_allclose(values, np.where(LABELS == 3, 0, expected), rtol=1e-5)
