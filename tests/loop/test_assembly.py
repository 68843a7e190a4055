"""Items of known shapes become batches at once, and all others as they would alone."""

from collections import OrderedDict

import jax
import numpy as np
import pytest

from flaxfit import DataParallel
from flaxfit.loop._assembly import Assembler
from flaxfit.loop._padding import Padder

X, Y = np.ones((4, 2), np.float32), np.zeros(4, np.float32)


@pytest.fixture
def load():
    """Assembles items on one device."""
    feed, assemble = Padder(DataParallel(jax.devices()[:1]), pad=True), Assembler()
    return lambda *items: assemble(items, feed)


def test_items_like_those_before_are_taken_as_they_are_and_others_normalized(load):
    first, again = load((X, Y)), load((X + 1, Y))
    signature = first.portion.signature
    assert again.portion.signature == signature and again.n_examples == 4
    np.testing.assert_array_equal(again.batch.inputs[0][0], X + 1)
    np.testing.assert_array_equal(again.batch.weights[0], np.ones(4))
    assert load((X.astype(float), Y)).batch.inputs[0].dtype == np.float32
    assert load([X, Y]).portion.signature == load({"y": Y, "x": X}).portion.signature == signature
    assert load((X, Y, np.full(4, 0.5))).portion.is_weighted
    assert not load((X, Y)).portion.is_weighted
    np.testing.assert_array_equal(load((X[:3], Y[:3])).batch.weights[0], [1, 1, 1, 0])
    with pytest.raises(ValueError, match="different numbers of examples"):
        load((X, Y[:3]))
    with pytest.raises(ValueError, match="another structure than the first"):
        load((X, (Y, Y)))


def test_weights_of_the_user_are_never_taken_for_those_before(load):
    for scale in (1, 2, 3):
        np.testing.assert_array_equal(load((X, Y, Y + scale)).batch.weights[0], Y + scale)


def test_several_items_are_stacked_and_only_the_first_if_their_programs_differ(load):
    for shift in range(3):
        loaded = load((X, Y), (X + shift, Y))
        assert (loaded.n_steps, loaded.n_examples) == (2, 8)
        np.testing.assert_array_equal(loaded.batch.inputs[0][0], [X, X + shift])
        np.testing.assert_array_equal(loaded.batch.weights[0], np.ones((2, 4)))
    other = load((X, Y), (np.ones((4, 3), np.float32), Y))
    assert (other.n_steps, other.n_examples) == (1, 4)


def test_parts_by_name_stay_apart_though_the_first_batch_has_one_array_for_all(load):
    for targets in (X, X + 1, X + 1):
        batch = load(OrderedDict(y=targets, x=X)).batch
        np.testing.assert_array_equal(batch.inputs[0][0], X)
        np.testing.assert_array_equal(batch.targets[0][0], targets)


def test_names_that_cannot_be_sorted_become_texts(load):
    assert load({1: X, "b": X}).batch.inputs.keys() == {"1", "b"}
