"""Items of known shapes become batches at once, and all others as they would alone."""

from collections import OrderedDict

import jax
import numpy as np
import pytest
from internals import batch_of
from jax.sharding import SingleDeviceSharding

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
    signature = first.prepared.signature
    assert again.prepared.signature == signature and again.n_examples == 4
    np.testing.assert_array_equal(batch_of(again).inputs[0], X + 1)
    np.testing.assert_array_equal(batch_of(again).weights, np.ones(4))
    assert batch_of(load((X.astype(float), Y))).inputs[0].dtype == np.float32
    assert load([X, Y]).prepared.signature == load({"y": Y, "x": X}).prepared.signature == signature
    assert load((X, Y, np.full(4, 0.5))).prepared.is_weighted
    assert not load((X, Y)).prepared.is_weighted
    np.testing.assert_array_equal(batch_of(load((X[:3], Y[:3]))).weights, [1, 1, 1, 0])
    with pytest.raises(ValueError, match="different numbers of examples"):
        load((X, Y[:3]))
    with pytest.raises(ValueError, match="another structure than the first"):
        load((X, (Y, Y)))


def test_weights_of_the_user_are_never_taken_for_those_before(load):
    for scale in (1, 2, 3):
        np.testing.assert_array_equal(batch_of(load((X, Y, Y + scale))).weights, Y + scale)


def test_several_items_are_stacked_and_only_the_first_if_their_programs_differ(load):
    for shift in range(3):
        loaded = load((X, Y), (X + shift, Y))
        assert (loaded.n_steps, loaded.n_examples) == (2, 8)
        np.testing.assert_array_equal(batch_of(loaded).inputs[0], [X, X + shift])
        np.testing.assert_array_equal(batch_of(loaded).weights, np.ones((2, 4)))
    other = load((X, Y), (np.ones((4, 3), np.float32), Y))
    assert (other.n_steps, other.n_examples) == (1, 4)


@pytest.mark.parametrize("n", [1, 2])
def test_arrays_on_devices_are_known_stay_there_and_come_to_the_one_that_computes(n):
    first, other = jax.devices()[:2]
    feed, assemble, n_normalized = Padder(DataParallel([first]), pad=True), Assembler(), 0

    def prepare(item):
        nonlocal n_normalized
        n_normalized += 1
        return feed(item)

    for shift, device in enumerate((first, first, other)):
        items = [jax.device_put((X + shift + i, Y), device) for i in range(n)]
        (inputs,) = batch_of(assemble(items, prepare)).inputs
        assert isinstance(inputs, jax.Array) and inputs.devices() == {first}
        expected = np.stack([X + shift + i for i in range(n)])
        np.testing.assert_array_equal(inputs, expected if n > 1 else expected[0])
    assert n_normalized == 1 and assemble([(X, Y)] * n, prepare).n_steps == n
    mixed = [(X, Y), jax.device_put((X, Y), other), jax.device_put((X, Y), first)]
    assert batch_of(assemble(mixed, feed)).inputs[0].shape == (3, 4, 2)
    pinned = jax.device_put((X, Y), SingleDeviceSharding(first, memory_kind="pinned_host"))
    assert batch_of(assemble([pinned] * n, feed)).inputs[0].sharding.memory_kind == "device"


def test_parts_by_name_stay_apart_though_the_first_batch_has_one_array_for_all(load):
    for targets in (X, X + 1, X + 1):
        batch = batch_of(load(OrderedDict(y=targets, x=X)))
        np.testing.assert_array_equal(batch.inputs[0], X)
        np.testing.assert_array_equal(batch.targets[0], targets)


def test_names_that_cannot_be_sorted_become_texts(load):
    assert batch_of(load({1: X, "b": X})).inputs.keys() == {"1", "b"}
