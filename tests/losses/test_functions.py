"""Every loss against NumPy or Optax, and the shapes and dtypes that it refuses."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow
from sklearn.metrics.pairwise import paired_cosine_distances

from flaxfit import losses

GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(32, 10)).astype(np.float32)
LABELS = GENERATOR.integers(0, 10, 32)
SCORES = GENERATOR.normal(size=32).astype(np.float32)
TARGETS = GENERATOR.normal(size=32).astype(np.float32)
SIGNS = np.where(TARGETS > 0, 1, -1)
ONEHOT = np.eye(10)[LABELS]


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("crossentropy", LOGITS, LABELS, -np.log(softmax(LOGITS)[np.arange(32), LABELS])),
        ("onehot_crossentropy", LOGITS, ONEHOT, -np.log(softmax(LOGITS)[np.arange(32), LABELS])),
        ("binary_crossentropy", SCORES, SIGNS > 0, np.log1p(np.exp(-SIGNS * SCORES))),
        ("mse", SCORES, TARGETS, (SCORES - TARGETS) ** 2),
        ("mae", SCORES, TARGETS, abs(SCORES - TARGETS)),
        ("log_cosh", SCORES, TARGETS, np.log(np.cosh(SCORES - TARGETS))),
        ("hinge", SCORES, SIGNS, np.maximum(0, 1 - SCORES * SIGNS)),
        (
            "huber",
            SCORES,
            TARGETS,
            np.where(
                abs(SCORES - TARGETS) < 1,
                (SCORES - TARGETS) ** 2 / 2,
                abs(SCORES - TARGETS) - 0.5,
            ),
        ),
        (
            "kl_divergence",
            LOGITS,
            softmax(LOGITS[::-1]),
            (softmax(LOGITS[::-1]) * np.log(softmax(LOGITS[::-1]) / softmax(LOGITS))).sum(-1),
        ),
        (
            "cosine_distance",
            LOGITS,
            LOGITS[::-1],
            paired_cosine_distances(LOGITS, LOGITS[::-1]),
        ),
    ],
)
def test_every_loss_gives_its_values_by_example(name, outputs, targets, expected):
    values = jax.jit(losses.resolve(name))(outputs, targets)
    assert values.shape == (32,)
    np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-5)


def test_a_prediction_that_is_right_has_an_absolute_error_without_a_slope():
    gradient = jax.jit(jax.grad(lambda outputs: losses.mae(outputs, np.zeros(3)).sum()))
    np.testing.assert_array_equal(gradient(np.array([-0.5, 0.0, 0.5])), [-1, 0, 1])


def test_losses_by_token_keep_their_axes():
    logits, labels = np.zeros((4, 6, 9), np.float32), np.ones((4, 6), np.int32)
    assert jax.eval_shape(losses.crossentropy, logits, labels).shape == (4, 6)
    assert jax.eval_shape(losses.binary_crossentropy, logits, logits).shape == (4, 6, 9)


def test_unsigned_targets_do_not_wrap_around():
    assert losses.mse(np.array([1], np.uint8), np.array([3], np.uint8)) == 4
    assert losses.hinge(np.array([0.5]), np.array([1], np.uint8)) == 0.5


@pytest.mark.parametrize("shape", [(5,), (4, 3)])
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
        "loss 'crossentropy' wants integer labels of shape (32,) for outputs of shape (32, 10), "
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
    ],
)
def test_labels_of_another_form_are_refused_with_what_to_do(outputs, labels, advice):
    with pytest.raises(ValueError, match=advice):
        losses.crossentropy(outputs, labels)


@pytest.mark.parametrize(
    "name",
    ["binary_crossentropy", "mse", "mae", "huber", "log_cosh", "hinge", "cosine_distance"],
)
def test_shapes_that_would_broadcast_are_refused(name):
    loss = losses.resolve(name)
    with pytest.raises(ValueError, match=rf"loss '{name}' wants .* got outputs \(32, 1\) and .*32"):
        loss(np.zeros((32, 1)), np.zeros(32))
    with pytest.raises(ValueError, match=r"Squeeze the (labels|targets) \(y\[..., 0\]\)"):
        loss(np.zeros(32), np.zeros((32, 1)))


def test_swapped_arguments_are_named():
    with pytest.raises(ValueError, match=r"takes outputs first: it got outputs \(32,\) and labels"):
        losses.crossentropy(LABELS, LOGITS)


def test_integer_labels_are_refused_where_one_hot_ones_are_wanted():
    with pytest.raises(ValueError, match="Use loss='crossentropy' for integer labels"):
        losses.onehot_crossentropy(LOGITS, LABELS)


def every_loss():
    """Each loss with outputs and targets that suit it."""
    n_classes = LOGITS.shape[-1]
    for name in ("mse", "mae", "huber", "log_cosh"):
        yield name, SCORES, TARGETS
    yield "crossentropy", LOGITS, LABELS
    yield "onehot_crossentropy", LOGITS, np.full(LOGITS.shape, 1 / n_classes, np.float32)
    yield "binary_crossentropy", SCORES, (TARGETS > 0).astype(np.float32)
    yield "hinge", SCORES, SIGNS.astype(np.float32)
    yield "kl_divergence", LOGITS, softmax(LOGITS[::-1])
    yield "cosine_distance", LOGITS, LOGITS[::-1].copy()


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
@pytest.mark.parametrize(("name", "outputs", "targets"), list(every_loss()))
def test_16_bits_are_computed_in_float32(name, outputs, targets, dtype):
    loss = losses.resolve(name)
    outputs = (10 * outputs).astype(dtype)
    targets = targets if targets.dtype.kind == "i" else targets.astype(dtype)
    wide = targets if targets.dtype.kind == "i" else targets.astype(np.float32)

    def both(outputs, targets):
        return jax.value_and_grad(lambda x: loss(x, targets).sum())(outputs)

    found, gradient = jax.jit(both)(outputs, targets)
    expected, wide_gradient = jax.jit(both)(outputs.astype(np.float32), wide)
    assert found.dtype == np.float32
    assert gradient.dtype == dtype
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    gradients = (each.astype(np.float32) for each in (gradient, wide_gradient))
    np.testing.assert_allclose(*gradients, rtol=jnp.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("large", [np.float16(3e4), np.float32(1e4), np.float32(-1e30)])
def test_large_logits_leave_all_digits_of_the_loss(large):
    logits = np.full((1, 2), large)
    by_label, by_row = jax.jit(losses.crossentropy), jax.jit(losses.onehot_crossentropy)
    np.testing.assert_allclose(by_label(logits, np.array([1])), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(by_row(logits, np.eye(2)[:1]), np.log(2))


def test_rows_of_zeros_have_a_cosine_distance_of_one_and_a_gradient():
    zeros = np.zeros((2, 3), np.float16)
    loss = jax.jit(losses.cosine_distance)
    np.testing.assert_array_equal(loss(zeros, zeros), [1, 1])
    gradient = jax.jit(jax.grad(lambda x: loss(x, zeros + 1).sum()))(zeros)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("loss", "outputs", "labels", "label"),
    [
        (losses.crossentropy, LOGITS, LABELS, -100),
        (losses.crossentropy, LOGITS, LABELS, 0),
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
