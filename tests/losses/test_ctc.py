"""CTC: lengths of labels, and the shapes that it refuses."""

import itertools

import jax
import numpy as np
import pytest
import scipy.special

from flaxfit import losses


def by_enumeration(logits, labels):
    """The likelihood of all paths of classes that spell the labels."""
    logs = scipy.special.log_softmax(logits, -1)
    found = []
    for path in itertools.product(range(logits.shape[1]), repeat=len(logits)):
        spelled = [key for key, _ in itertools.groupby(path) if key]
        if spelled == [label for label in labels if label]:
            found.append(sum(logs[step, key] for step, key in enumerate(path)))
    return -scipy.special.logsumexp(found)


@pytest.mark.slow
def test_ctc_sums_over_all_alignments():
    logits = np.random.default_rng(0).normal(size=(4, 4, 3)).astype(np.float32)
    labels = np.array([[1, 2, 0], [1, 1, 0], [2, 0, 0], [0, 0, 0]])
    expected = [by_enumeration(*each) for each in zip(logits, labels, strict=True)]
    np.testing.assert_allclose(jax.jit(losses.ctc)(logits, labels), expected, rtol=1e-5)


@pytest.mark.parametrize("labels", [np.zeros(4, int), np.zeros((3, 2), int), np.zeros((4, 2))])
def test_other_shapes_and_types_are_refused(labels):
    with pytest.raises(ValueError, match="'ctc' expects outputs of shape .batch, steps, classes."):
        losses.ctc(np.zeros((4, 5, 3)), labels)
