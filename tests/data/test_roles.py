"""Which columns of a mapping are the inputs, the targets and the weights of a batch."""

import collections

import jax
import numpy as np
import pytest

from flaxfit.data._batch import Batch, normalize
from flaxfit.data._roles import Roles

X, MASK, Y = np.ones((4, 3), np.float32), np.ones((4, 3), bool), np.arange(4)
IMAGES = {"image": X, "label": Y, "id": list("abcd")}
TEXTS = {"input_ids": X, "attention_mask": MASK, "labels": Y, "loss_mask": MASK, "text": ["", ""]}
Pair = collections.namedtuple("Pair", "image, label, id")


def assert_same(item, expected):
    assert jax.tree.structure(item) == jax.tree.structure(expected)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (item, expected)), strict=True))


@pytest.mark.parametrize(
    ("roles", "columns", "expected"),
    [
        (Roles("image", "label"), IMAGES, ((X,), (Y,), None)),
        (Roles(targets="label", call=("image",)), IMAGES, ({"image": X}, (Y,), None)),
        (Roles("image"), IMAGES, ((X,), (Y,), None)),
        (Roles("image", ()), IMAGES, ((X,), (), None)),
        (Roles("image", "image"), IMAGES, ((X,), (X,), None)),
        (Roles({"x": "image"}, {"head": "label"}), IMAGES, ({"x": X}, ({"head": Y},), None)),
        (Roles(targets="label"), {"image": X, "label": Y}, ((X,), (Y,), None)),
        (Roles(("z", "label"), "image"), {"z": MASK, **IMAGES}, ((MASK, Y), (X,), None)),
        (Roles("image", "label"), Pair(X, Y, ["a"]), ((X,), (Y,), None)),
        (
            Roles(["input_ids", "attention_mask"], weights="loss_mask"),
            TEXTS,
            ((X, MASK), (Y,), MASK),
        ),
        (
            Roles(weights={"a": "loss_mask"}, call=("input_ids", "attention_mask")),
            TEXTS,
            ({"input_ids": X, "attention_mask": MASK}, (Y,), {"a": MASK}),
        ),
    ],
)
def test_columns_are_taken_by_name_and_the_rest_is_passed_by(roles, columns, expected):
    assert_same(roles(columns), expected)
    assert_same(roles([columns]), expected)


@pytest.mark.parametrize(
    "item",
    [
        (X, Y, [MASK, None]),
        {"x": X, "y": Y, "w": (MASK, None)},
        Batch((X,), (Y,), [MASK, None]),
        {"image": X, "label": Y, "weight": [MASK, None]},
    ],
)
def test_a_list_of_weights_is_in_the_order_of_the_outputs(item):
    roles = Roles(call=("x",), outputs=("output_0", "output_1"))
    assert_same(roles(item)[2], {"output_0": MASK})
    with pytest.raises(ValueError, match="weights for 2 outputs, and the model has losses for 1"):
        Roles(call=("x",), outputs=("kind",))(item)
    by_example = (X, Y, [1.0, 2.0, 3.0, 4.0])
    assert roles(by_example) is by_example


@pytest.mark.parametrize(
    ("call", "columns", "expected"),
    [
        (("x",), {"image": X, "label": Y}, ((X,), (Y,), None)),
        (("x",), {"x": X, "label": Y, "weight": Y}, ({"x": X}, (Y,), Y)),
        (("a", "b"), {"a": X, "b": MASK, "labels": Y}, ({"a": X, "b": MASK}, (Y,), None)),
        (("x",), {"features": X}, ((X,), (), None)),
    ],
)
def test_usual_names_need_no_word_where_the_call_would_fail(call, columns, expected):
    assert_same(Roles(call=call)(columns), expected)


@pytest.mark.parametrize(
    ("call", "item"),
    [
        (None, {"image": X, "label": Y}),
        (("image", "label"), {"image": X, "label": Y}),
        (("image",), {"image": X}),
        (("a",), {"x": X, "y": Y}),
        (("a",), {"inputs": X, "targets": Y, "weights": Y}),
        (("a",), (X, Y)),
        (("a",), ({"image": X, "label": Y}, Y)),
        (("a",), Pair(X, Y, Y)),
        (("a",), {0: X, 1: Y}),
        (("a",), X),
        (("a",), []),
    ],
)
def test_what_had_a_meaning_keeps_it(call, item):
    assert Roles(call=call)(item) is item
    assert Roles(call=call).inputs_of(item) is item


@pytest.mark.parametrize("item", [X, (X, Y), [X, Y], ({"a": X}, Y), Batch(({"image": X},)), []])
def test_items_without_names_are_taken_as_they_are(item):
    assert Roles("image", "label")(item) is item


def test_inputs_need_no_targets():
    for roles in Roles("image", "label"), Roles(targets="label"), Roles(call=("x",)):
        assert_same(roles.inputs_of({"image": X}), ((X,), (), None))
    assert_same(Roles(targets="label").inputs_of({"image": X, "label": Y}), ((X,), (), None))


def test_a_data_set_has_lists_of_numbers_made_arrays():
    data = {"image": X, "label": [0, 1, 2, 3], "id": list("abcd")}
    batch = normalize(Roles("image", "label").of_data_set(data))
    np.testing.assert_array_equal(batch.targets[0], Y)
    assert Roles("image", "label").of_data_set(data, has_targets=False) is X
    swapped = Roles({"image": "label", "label": "image"}, ())
    for found in swapped.of_data_set(data), (swapped.of_data_set(data, has_targets=False),):
        batch = normalize(swapped(found[:1]))  # The item of a stream.
        np.testing.assert_array_equal(batch.inputs["image"], Y)
        assert batch.inputs["label"] is X
    batches = [data]
    assert Roles("image").of_data_set(batches) is batches


@pytest.mark.parametrize(
    ("roles", "columns", "message"),
    [
        (Roles("pixels"), IMAGES, "column 'pixels', .* its inputs: .* 'image', 'label', 'id'"),
        (Roles("image", {"a": "class"}), IMAGES, "lacks the column 'class', .* in its targets"),
        (Roles("image", weights="mask"), IMAGES, "lacks the column 'mask', .* in its weights"),
        (Roles(call=("x",)), IMAGES, "'image', 'label', 'id' of .* takes 'x'.* inputs='image'"),
        (Roles(call=("x", "y")), {"x": X, "id": Y}, "Cannot tell .* 'x', 'id' .* takes 'x', 'y'"),
        (Roles(call=("x",)), {"x": X, "image": X}, "the roles of the columns 'x', 'image'"),
        (Roles(targets="label"), IMAGES, "which of the columns 'image', 'id' are inputs"),
        (
            Roles("image"),
            {**IMAGES, "target": Y},
            r"which .* 'label', 'target' are the targets.*targets=\(\) for none",
        ),
    ],
)
def test_what_is_missing_or_unclear_is_refused_in_words(roles, columns, message):
    with pytest.raises(ValueError, match=message):
        roles(columns)


@pytest.mark.parametrize("role", ["inputs", "targets", "weights"])
@pytest.mark.parametrize("given", [X, 3, [X], {"a": X}, {"a": ["b"]}])
def test_what_is_no_name_is_refused(role, given):
    with pytest.raises(TypeError, match=f"Owner: {role} names the columns"):
        Roles(**{role: given}).check("Owner")
    with pytest.raises(TypeError, match="Owner: weights names the columns"):
        Roles(weights=("a", "b")).check("Owner")
