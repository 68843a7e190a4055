"""Every form of a batch that a stream may yield, and the forms that it may not."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.data._batch import Batch, call, detached, n_examples, normalize, parts_of

X, Y, W = np.zeros((4, 3), np.float32), np.zeros(4, np.int32), np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("item", "inputs", "targets", "weights"),
    [
        (X, 1, 0, False),
        ((X,), 1, 0, False),
        ((X, Y), 1, 1, False),
        ([X, Y], 1, 1, False),
        ((X, ()), 1, 0, False),
        (((X, X), (Y, Y)), 2, 2, False),
        ([[X, X], Y], 2, 1, False),
        ((X, Y, W), 1, 1, True),
        ({"x": X, "y": Y}, 1, 1, False),
        ({"inputs": X, "targets": Y, "weights": W}, 1, 1, True),
        ({"x": X}, 1, 0, False),
        ({"x": X, "y": Y, "w": None}, 1, 1, False),
        ((X, Y, None), 1, 1, False),
        ((X, None), 1, 0, False),
        ((X, None, W), 1, 0, True),
    ],
)
def test_all_forms_become_inputs_targets_and_weights(item, inputs, targets, weights):
    batch = normalize(item)
    assert (len(batch.inputs), len(batch.targets)) == (inputs, targets)
    assert (batch.weights is not None) == weights
    assert n_examples(batch) == 4
    assert normalize(batch) is batch


def test_weights_by_output_stay_a_mapping():
    for item in (X, Y, {"a": W.astype(int)}), Batch((X,), (Y,), {"a": W}):
        batch = normalize(item)
        assert batch.weights.keys() == {"a"} and batch.weights["a"].dtype == np.float32
        jax.tree.map(np.testing.assert_array_equal, normalize(batch), batch)
    assert normalize((X, Y, {})).weights is None


def test_other_mappings_are_keyword_inputs():
    assert normalize({"image": X, "mask": Y}).inputs.keys() == {"image", "mask"}
    batch = normalize(({"image": X}, Y))
    assert call(lambda v, *, image: (v, image.shape), "v", batch.inputs) == ("v", (4, 3))


def test_a_mapping_in_a_tuple_is_one_positional_input():
    (inputs,) = normalize((({"image": X},), Y)).inputs
    assert inputs["image"] is X


def test_wide_numbers_are_narrowed_and_narrow_ones_not_copied():
    batch = normalize((X.astype(np.float64), Y.astype(np.int64)))
    assert batch.inputs[0].dtype == np.float32 and batch.targets[0].dtype == np.int32
    batch = normalize((X, jnp.asarray(Y)))
    assert batch.inputs[0] is X and batch.targets[0].dtype == jnp.int32


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        *((item, TypeError, "A batch must") for item in ("text", None, 3, (X, "a"), [1.0, 2.0])),
        ((X, np.array(["a"] * 4)), TypeError, "Cannot train on an array of dtype"),
        ((X, np.array(3.0)), TypeError, r"got the scalar 3\.0"),
        (([[0.0, 1.0]], X), TypeError, r"got the scalar 0\.0\. Lists .* np\.asarray"),
        ((X, Y, W, W), TypeError, "got 4 parts"),
        ((), TypeError, "got 0 parts"),
        ((X, Y[:3]), ValueError, r"different numbers of examples.*\(4, 3\).*\(3,\)"),
        ((X, Y, W[:2]), ValueError, "different numbers of examples"),
        ((X[:0], Y[:0]), ValueError, "no examples"),
        ((X, Y.astype(np.int64) + 2**32), ValueError, "to 4294967296, which do not fit int32"),
        (
            (X, Y, np.ones(())),
            ValueError,
            r"weights must hold one number per example.*or .*\(batch, tokens\).* the scalar",
        ),
        ((X, Y, {"a": {"b": W}}), TypeError, r"weights\['a'\] must be an array of weights"),
        (Batch(X, Y), TypeError, r"write Batch\(\(x,\), \(y,\)\)"),
    ],
    ids=str,
)
def test_what_is_no_batch_is_refused_in_words(item, error, message):
    with pytest.raises(error, match=message):
        normalize(item)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float16])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 4, 2)], ids=str)
def test_weights_may_be_masks_of_any_shape_and_have_the_precision_of_sums(shape, dtype):
    weights = normalize((X, Y, np.ones(shape, dtype))).weights
    assert (weights.shape, weights.dtype) == (shape, np.float32)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ("x y", (0, 1, None)),
        ("image label", (0, 1, None)),
        ("label image", (1, 0, None)),
        ("features labels", (0, 1, None)),
        ("x y sample_weight", (0, 1, 2)),
        ("inputs", (0, None, None)),
    ],
)
def test_a_named_tuple_whose_fields_name_the_parts_is_a_batch(fields, parts):
    kind = collections.namedtuple("Item", fields)
    assert parts_of(kind(*range(len(kind._fields)))) == parts


@pytest.mark.parametrize("fields", ["nodes edges", "x adjacency", "image features", "label weight"])
def test_any_other_named_tuple_is_one_input(fields):
    item = collections.namedtuple("Item", fields)(1, 2)
    assert parts_of(item) == (item,)


def test_a_detached_item_does_not_change_with_its_source():
    x = np.zeros(2)
    for item in ({"x": x}, {"x": x, 1: x}):  # JAX cannot sort the keys of the second.
        copy = detached(item)
        x += 1
        assert copy["x"].tolist() == (x - 1).tolist()


def test_a_whole_batch_may_be_any_tree_of_arrays_and_numbers():
    graph, values = {"nodes": np.zeros((5, 2)), "edges": np.zeros((9, 2), np.int64)}, np.zeros(7)
    item = ((graph, 0.5, values), (Y,))
    batch = normalize(item, is_whole=True)
    assert jax.tree.map(np.shape, batch.inputs) == ({"nodes": (5, 2), "edges": (9, 2)}, (), (7,))
    assert batch.inputs[1].dtype == np.float32 and batch.inputs[0]["edges"].dtype == np.int32
    for wrong in (item, ((X, 2), (Y,))):
        with pytest.raises((TypeError, ValueError), match="TrainTask.pad=False.*Sharded"):
            normalize(wrong)
    with pytest.raises(ValueError, match="holds no examples"):
        normalize(((), ()), is_whole=True)


@pytest.mark.parametrize(
    ("batch", "n"),
    [
        (Batch((X, np.float32(2))), 4),
        (Batch((X, Y[:2]), (Y[:3],)), 3),
        (Batch((X,), (Y[:3], Y[:2])), 3),
        (Batch((X, Y[:2]), (Y[:3],), W[:1]), 1),
        (Batch((X, Y[:2])), 1),
        (Batch((np.float32(2),)), 1),
    ],
)
def test_the_examples_of_a_whole_batch_are_those_of_its_weights_or_targets(batch, n):
    assert n_examples(batch) == n
