"""Checks of labels, and of the shape of what a loss returns."""

import jax
import numpy as np
import optax
import pytest

from flaxfit import losses

GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(32, 10)).astype(np.float32)
LABELS = GENERATOR.integers(0, 10, 32)


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
    losses.check_values(loss, (LOGITS, LOGITS), (np.array([99]),))  # It is left to the loss.
    losses.check_values(loss, (LOGITS,), ())


def test_a_loss_that_broadcast_is_refused_with_both_shapes():
    values = np.square(np.zeros((32, 1)) - np.zeros(32))
    with pytest.raises(ValueError) as error:
        losses.check_loss_shape(values.shape, (np.zeros((32, 1)),), (np.zeros(32),), 32)
    assert str(error.value) == (
        "the loss returned shape (32, 32); expected () or (32,). Outputs (32, 1) broadcast "
        "against targets (32,): reshape one of them."
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


def test_an_ignored_label_is_in_range_and_others_are_not():
    loss = losses.crossentropy(ignore_label=-100)
    losses.check_values(loss, LOGITS, np.where(LABELS > 4, -100, LABELS))
    with pytest.raises(
        ValueError, match=r"label -1 is .*must be 0..9 or -100\). Out of range: 1 of 33"
    ):
        losses.check_values(loss, LOGITS, np.append(LABELS, -1))
    with pytest.raises(ValueError, match=r"losses.crossentropy\(ignore_label=-100\)"):
        losses.check_values("crossentropy", LOGITS, np.where(LABELS > 4, -100, LABELS))
