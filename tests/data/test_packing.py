import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import drawn
from marks import thorough

import flaxfit as ff
from flaxfit.data import pack

rng = np.random.default_rng(0)
LENGTH = 12
SEQUENCES = [rng.integers(1, 20, n) for n in (7, 3, 13, 2, 9, 5, 5, 8, 1, 4, 11, 0, 6, 10)]


def segments(stream):
    """The tokens, positions, targets and weights of each segment, row by row."""
    inputs, targets, weights = stream.pick(slice(None))
    found = []
    for row, ids in enumerate(inputs["segment_ids"]):
        for segment in range(1, ids.max() + 1):
            parts = (inputs["tokens"], inputs["positions"], targets, weights)
            found.append([part[row, ids == segment].tolist() for part in parts])
    return found


def test_segments_are_the_sequences_with_the_next_token_as_target():
    expected = [
        [each[:-1].tolist(), [*range(len(each) - 1)], each[1:].tolist(), [1.0] * (len(each) - 1)]
        for each in SEQUENCES
        if len(each) > 1
    ]
    assert sorted(segments(pack(SEQUENCES, LENGTH))) == sorted(expected)


def test_each_sequence_goes_into_the_first_row_with_room():
    rows = []
    for n in (len(each) - 1 for each in SEQUENCES if len(each) > 1):
        fitting = (row for row in rows if sum(row) + n <= LENGTH)
        row = next(fitting, None)
        if row is None:
            rows.append(row := [])
        row.append(n)
    ids = pack(SEQUENCES, LENGTH).pick(slice(None))[0]["segment_ids"]
    expected = [
        np.pad(np.repeat(range(1, len(row) + 1), row), (0, LENGTH - sum(row))) for row in rows
    ]
    np.testing.assert_array_equal(ids, expected)


def test_padding_is_zero_everywhere():
    inputs, targets, weights = pack(SEQUENCES, LENGTH).pick(slice(None))
    empty = inputs["segment_ids"] == 0
    assert empty.any()
    for part in (*inputs.values(), targets, weights):
        assert not part[empty].any()


def test_targets_and_weights_stay_with_their_tokens():
    labels = [10 * each for each in SEQUENCES]
    scales = [each / 2 for each in SEQUENCES]
    found = segments(pack(SEQUENCES, 13, targets=labels, weights=scales))
    assert sum(len(tokens) for tokens, *_ in found) == sum(map(len, SEQUENCES))
    for tokens, _, targets, weights in found:
        np.testing.assert_array_equal(targets, 10 * np.array(tokens))
        np.testing.assert_array_equal(weights, np.array(tokens) / 2)


def test_without_targets_a_weight_is_that_of_the_token_as_a_target():
    inputs, targets, weights = pack([[5, 6, 7]], 4, weights=[[0.1, 0.2, 0.3]]).pick(slice(None))
    np.testing.assert_array_equal(weights, np.float32([[0.2, 0.3, 0, 0]]))


def test_splitting_keeps_every_token_and_its_target():
    found = segments(pack([np.arange(1, 12)], 4, split=True))
    assert [tokens for tokens, *_ in found] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert [targets for _, _, targets, _ in found] == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11]]
    assert [positions for _, positions, *_ in found] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_fresh_stream_continues_after_any_batch(shuffle):
    def stream():
        return pack(iter(SEQUENCES), LENGTH, batch_size=2, shuffle=shuffle, seed=3, epochs=2)

    expected = list(stream())
    assert len(expected) > 6
    for n in range(len(expected)):
        first, second = stream(), stream()
        for _ in range(n):
            next(first)
        second.set_state(json.loads(json.dumps(first.get_state())))
        rest = list(second)
        assert len(rest) == len(expected) - n
        jax.tree.map(np.testing.assert_array_equal, rest, expected[n:])


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([[1, 2], [0.5]], {}, r"token ids, got sequences\[1\] of shape \(1,\) and dtype float64"),
        ([1, 2], {}, r"token ids, got sequences\[0\] of shape \(\)"),
        ("ab", {}, r"token ids, got sequences\[0\] of shape \(\) and dtype <U1"),
        ([[[1, 2]]], {}, r"token ids, got sequences\[0\] of shape \(1, 2\)"),
        ([], {}, "Cannot pack 0 sequences, none of which has a target"),
        ([[], [3]], {}, "Cannot pack 2 sequences, none of which has a target"),
        ([[1], range(6)], {}, r"sequences\[1\] into rows of 4, since it takes 5 places"),
        ([[1, 2]], {"targets": []}, "There are 1 sequences but 0 targets"),
        ([[1, 2]], {"targets": [[1]]}, r"targets\[0\] must hold one number for each token"),
        ([[1, 2]], {"weights": [[1, 2, 3]]}, r"of shape \(2,\), got the shape \(3,\)"),
        ([[1, 2]], {"length": 0}, "length must be 1 or more"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_words(sequences, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pack(sequences, **{"length": 4, **options})


class Transformer(nn.Module):
    """A layer of causal attention within segments only."""

    @nn.compact
    def __call__(self, tokens, segment_ids, positions):
        x = nn.Embed(20, 8)(tokens) + nn.Embed(LENGTH, 8)(positions)
        mask = nn.combine_masks(
            nn.make_attention_mask(segment_ids, segment_ids, jnp.equal), nn.make_causal_mask(tokens)
        )
        return nn.Dense(20)(x + nn.MultiHeadDotProductAttention(2)(x, mask=mask))


@pytest.fixture(scope="module")
def unpacked():
    """Parameters, and the loss and gradient of sequences in a row each, written by hand."""
    sequences = [each for each in SEQUENCES if len(each) > 1]
    n = np.array([len(each) - 1 for each in sequences])
    padded = np.stack([np.pad(each, (0, LENGTH + 1 - len(each))) for each in sequences])
    inputs = {
        "tokens": padded[:, :-1],
        "segment_ids": np.ones_like(padded[:, :-1]),
        "positions": np.broadcast_to(np.arange(LENGTH), padded[:, :-1].shape),
    }
    params = drawn(Transformer(), **inputs)(None)["params"]

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        logits = Transformer().apply({"params": params}, **inputs)
        values = optax.softmax_cross_entropy_with_integer_labels(logits, padded[:, 1:])
        return jnp.where(np.arange(LENGTH) < n[:, None], values, 0).sum() / n.sum()

    return params, *loss(params)


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
def test_a_packed_transformer_has_the_loss_and_gradient_of_the_unpacked_one(unpacked, n_devices):
    params, loss, grads = unpacked
    stream = pack(SEQUENCES, LENGTH)
    assert stream.n_examples % 4, "the test wants a batch that has to be padded"
    task = ff.TrainTask(Transformer(), optax.sgd(1.0), "crossentropy", stream)
    state = ff.TrainState.create(task.optimizer, {"params": params})
    loop = ff.TrainLoop(state, task, devices=jax.devices()[:n_devices], stdout=False)
    checkpoint = loop.next_step()
    np.testing.assert_allclose(checkpoint.loss, loss, rtol=1e-6)
    stepped = jax.tree.map(lambda p, g: p - g, params, grads)
    for got, expected in zip(
        *map(jax.tree.leaves, (checkpoint.model_params, stepped)), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-6)
