from typing import Any

import jax
import numpy as np
import optax
import pytest
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


def test_losses_by_token_keep_their_axes():
    logits, labels = np.zeros((4, 6, 9), np.float32), np.ones((4, 6), np.int32)
    assert jax.eval_shape(losses.crossentropy, logits, labels).shape == (4, 6)
    assert jax.eval_shape(losses.binary_crossentropy, logits, logits).shape == (4, 6, 9)


def test_unsigned_targets_do_not_wrap_around():
    assert losses.mse(np.array([1], np.uint8), np.array([3], np.uint8)) == 4
    assert losses.hinge(np.array([0.5]), np.array([1], np.uint8)) == 0.5


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("sparse_categorical_crossentropy", "crossentropy"),
        ("categorical_crossentropy", "onehot_crossentropy"),
        ("bce", "binary_crossentropy"),
        ("squared_error", "mse"),
        ("mean_squared_error", "mse"),
        ("mean_absolute_error", "mae"),
    ],
)
def test_the_names_of_keras_are_known(alias, name):
    assert losses.resolve(alias) is losses.resolve(name) is getattr(losses, name)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="no loss 'crossentrpy'. Did you mean crossentropy"):
        losses.resolve("crossentrpy")
    with pytest.raises(ValueError, match="no loss 'zzz'. Did you mean .*mse, mae"):
        losses.resolve("zzz")


def test_a_function_is_its_own_loss_hashable_or_not():
    class Unhashable(list):
        def __call__(self, outputs, targets):
            return outputs

    for loss in (optax.squared_error, lambda outputs, targets: outputs, Unhashable()):
        assert losses.resolve(loss) is loss


@pytest.mark.parametrize("shape", [(5,), (4, 3)])
def test_crossentropy_and_its_gradient_are_those_of_optax(shape):
    logits = GENERATOR.normal(size=(*shape, 7)).astype(np.float32) * 30
    labels = GENERATOR.integers(0, 7, shape)
    logits[..., 3][labels != 3] = -np.inf  # A class that is ruled out.

    def gradient(loss):
        return jax.jit(jax.grad(lambda x: (loss(x, labels) * np.arange(shape[-1])).sum()))(logits)

    theirs = optax.softmax_cross_entropy_with_integer_labels
    ours, expected = (jax.jit(loss)(logits, labels) for loss in (losses.crossentropy, theirs))
    np.testing.assert_array_equal(ours, expected)
    expected = gradient(theirs)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(gradient(losses.crossentropy), expected, rtol=1e-6, atol=1e-7)


def test_labels_that_are_out_of_range_are_treated_as_optax_does():
    labels = np.array([0, -1, 10, 9, -11])
    values = jax.jit(losses.crossentropy)(LOGITS[:5], labels)
    theirs = optax.softmax_cross_entropy_with_integer_labels(LOGITS[:5], labels)
    np.testing.assert_array_equal(values, theirs)
    assert np.isnan(values).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("dtype", "n_classes"), [("uint8", 256), ("uint8", 300), ("int8", 1000), ("uint16", 65_536)]
)
def test_labels_may_be_of_a_type_that_does_not_hold_the_number_of_classes(dtype, n_classes):
    logits = GENERATOR.normal(size=(3, n_classes)).astype(np.float32)
    labels = np.array([0, 50, 127], dtype)
    theirs = jax.jit(optax.softmax_cross_entropy_with_integer_labels)
    expected = theirs(logits, labels.astype(int))
    np.testing.assert_array_equal(jax.jit(losses.crossentropy)(logits, labels), expected)


def test_what_is_no_loss_is_refused():
    number: Any = 0.5
    with pytest.raises(TypeError, match="must be a name or a function.*got float: 0.5"):
        losses.resolve(number)


@pytest.mark.parametrize(
    ("loss", "optax_loss", "targets"),
    [
        (losses.crossentropy, optax.softmax_cross_entropy_with_integer_labels, LABELS),
        (losses.onehot_crossentropy, optax.softmax_cross_entropy, ONEHOT),
        (losses.binary_crossentropy, optax.sigmoid_binary_cross_entropy, ONEHOT),
    ],
)
def test_the_common_losses_of_optax_are_checked(loss, optax_loss, targets):
    checked = losses.resolve(optax_loss)
    assert checked is loss
    ours, expected = (jax.jit(each)(LOGITS, targets) for each in (checked, optax_loss))
    np.testing.assert_array_equal(ours, expected)
    with pytest.raises(ValueError, match=r"labels \(32, 1\)"):
        checked(LOGITS, np.ones((32, 1), int))


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


def test_integer_labels_are_refused_where_one_hot_ones_are_wanted():
    with pytest.raises(ValueError, match="Use loss='crossentropy' for integer labels"):
        losses.onehot_crossentropy(LOGITS, LABELS)


@pytest.mark.parametrize(
    ("loss", "labels", "message"),
    [
        ("crossentropy", [3, 12, 4], r"label 12 is out of range for 10 outputs \(labels must be 0"),
        ("crossentropy", [3, -1, 12], "label -1 is out of range for 10 outputs"),
        (optax.softmax_cross_entropy_with_integer_labels, [10], "label 10 is out of range"),
        ("binary_crossentropy", [0.0, 2.0], "label 2.0 is out of range for loss 'binary_cross"),
        ("binary_crossentropy", [0.0, np.nan], "label nan is out of range"),
        ("onehot_crossentropy", [[0.0, -1.0]], "label -1.0 is out of range for loss 'onehot"),
        ("hinge", [1, 0], r"label 0 is out of range for loss 'hinge'.*Make 2 \* y - 1"),
    ],
)
def test_labels_out_of_range_are_refused(loss, labels, message):
    outputs = (jax.ShapeDtypeStruct((32, 10), np.float32),)
    with pytest.raises(ValueError, match=message):
        losses.check_values(loss, outputs, (np.array(labels),))


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        ("crossentropy", np.arange(10)),
        ("crossentropy", np.zeros((0,), int)),
        ("binary_crossentropy", np.array([0, 0.3, 1])),
        ("hinge", np.array([-1, 1])),
        ("mse", np.array([-5, 100])),
        (lambda outputs, targets: outputs, np.array([-5, 100])),
    ],
)
def test_labels_in_range_pass(loss, labels):
    losses.check_values(loss, (LOGITS,), (labels,))


def test_values_of_several_outputs_are_left_to_the_loss():
    losses.check_values(lambda a, b, y: a, (LOGITS, LOGITS), (np.array([99]),))
    losses.check_values("crossentropy", (LOGITS,), ())


def test_a_loss_that_broadcast_is_refused_with_both_shapes():
    values = np.square(np.zeros((32, 1)) - np.zeros(32))
    with pytest.raises(ValueError) as error:
        losses.check_loss_shape(values.shape, (np.zeros((32, 1)),), (np.zeros(32),), 32)
    assert str(error.value) == (
        "the loss returned shape (32, 32); expected () or (32,). A (32, 1) output against (32,) "
        "targets broadcasts: reshape one of them."
    )


@pytest.mark.parametrize(
    ("values", "outputs", "targets"),
    [
        ((), (32, 10), (32,)),
        ((32,), (32, 10), (32,)),
        ((32, 1), (32, 1), (32, 1)),
        ((32, 10), (32, 10), (32, 1)),
        ((32, 32), (32, 32, 9), (32, 32)),
        ((32, 7), (32, 7, 9), (32, 7)),
        ((32, 32), (32, 32), (32,)),
    ],
)
def test_losses_by_example_or_by_token_pass(values, outputs, targets):
    losses.check_loss_shape(values, (np.zeros(outputs),), (np.zeros(targets),), 32)


@pytest.mark.parametrize("values", [(10,), (1,), (31, 32)])
def test_values_that_are_not_by_example_are_refused(values):
    with pytest.raises(ValueError, match=r"expected \(\) or \(32,\). Return one value per example"):
        losses.check_loss_shape(values, (LOGITS,), (LABELS,), 32)
