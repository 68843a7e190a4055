"""The training step of Flax's language model (lm1b): as in a loop by hand."""

import functools
import pydoc_data.topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import ByHand, assert_agree, drawn, n_lines
from loops import assert_equal
from marks import thorough

import flaxfit as ff

LENGTH, VOCABULARY, N_STEPS, SMOOTHING = 24, 128, 4, 0.1
COLUMNS = ("inputs", "inputs_position", "inputs_segmentation")


def packed_rows(n):
    """Rows of two lines of text each, as characters, with padding after the second."""
    text = "\n".join(pydoc_data.topics.topics.values())
    lines = [line.strip().encode("ascii", "ignore") for line in text.splitlines()]
    lines = [list(line) for line in lines if 4 < len(line) < LENGTH // 2][: 2 * n]
    rows = np.zeros((3, n, LENGTH), np.int32)
    for i, pair in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        parts = [np.concatenate(pair), np.concatenate([np.arange(len(each)) for each in pair])]
        parts.append(np.repeat([1, 2], [len(each) for each in pair]))
        rows[:, i, : len(parts[0])] = parts
    return dict(zip(COLUMNS, rows, strict=True))


ROWS = packed_rows(8 * N_STEPS)
BATCHES = [{name: x[i::N_STEPS] for name, x in ROWS.items()} for i in range(N_STEPS)]


class Decoder(nn.Module):
    """One layer of a causal transformer that predicts each token from those before it."""

    train: bool = False

    @nn.compact
    def __call__(self, inputs, inputs_position, inputs_segmentation):
        dropped = nn.Dropout(0.1, deterministic=not self.train)
        starts = inputs_position == 0
        x = jnp.where(starts, 0, jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1])
        x = nn.Embed(VOCABULARY, 16)(x) + nn.Embed(LENGTH, 16)(inputs_position)
        same = nn.make_attention_mask(inputs_segmentation, inputs_segmentation, jnp.equal)
        mask = nn.combine_masks(same, nn.make_causal_mask(inputs))
        attention = nn.MultiHeadDotProductAttention(2, use_bias=False)
        x += dropped(attention(nn.LayerNorm()(x), mask=mask))
        x += dropped(nn.Dense(16)(nn.relu(nn.Dense(32)(nn.LayerNorm()(x)))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def rate(step):
    """A warm-up, then a decay by the root of the step."""
    return 0.01 * jnp.minimum(1.0, step / 2) / jnp.sqrt(jnp.maximum(step, 2))


OPTIMIZER = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)


HIGH, LOW = 1 - SMOOTHING, SMOOTHING / (VOCABULARY - 1)
LEAST = -(HIGH * np.log(HIGH) + (VOCABULARY - 1) * LOW * np.log(LOW + 1e-20))


def by_hand(state, n=1):
    """The loss and accuracy of each step by hand, with dropout as on n devices."""

    def forward(params, batch, number):
        parts = [{name: x.reshape(n, -1, LENGTH)[i] for name, x in batch.items()} for i in range(n)]
        keys = [jax.random.fold_in(ff.step_key(state.key, number, i), 0) for i in range(n)]
        apply = functools.partial(Decoder(train=True).apply, {"params": params})
        pairs = zip(parts, keys, strict=True)
        return jnp.concatenate([apply(**part, rngs={"dropout": key}) for part, key in pairs])

    def measure(params, number, batch):
        inputs, weights = batch["inputs"], jnp.float32(batch["inputs"] > 0)
        logits = forward(params, batch, number)
        soft = jnp.where(jax.nn.one_hot(inputs, VOCABULARY) > 0, HIGH, LOW)
        entropies = -jnp.sum(soft * nn.log_softmax(logits), -1) - LEAST
        right = (logits.argmax(-1) == inputs) * weights
        return tuple(jnp.sum(each) / jnp.sum(weights) for each in (entropies * weights, right))

    hand = ByHand(OPTIMIZER, state.params, measure)
    for number, batch in enumerate(BATCHES):
        hand.step(number, batch)
    return hand


def port(init, **options):
    """The same training by flaxfit."""

    def loss(logits, inputs):
        soft = jax.nn.one_hot(inputs, VOCABULARY) * (HIGH - LOW) + LOW
        return optax.softmax_cross_entropy(logits, soft) - LEAST, inputs > 0

    def accuracy(logits, inputs):
        return logits.argmax(-1) == inputs, inputs > 0

    columns = {"inputs": COLUMNS, "targets": "inputs"}
    task = ff.TrainTask(Decoder(), OPTIMIZER, loss, BATCHES, {"accuracy": accuracy}, **columns)
    return ff.TrainLoop(init, task, 0, n_steps=N_STEPS, stdout=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, thorough(4)])
def test_the_language_model_trains_as_in_a_loop_by_hand(n):
    loop = port(drawn(Decoder(), **BATCHES[0]), devices=jax.devices()[:n])
    hand = by_hand(loop.state, n)
    found = [[checkpoint.loss, checkpoint.metrics["accuracy"]] for checkpoint in loop]
    np.testing.assert_allclose(found, hand.found, rtol=1e-6)
    (assert_equal if n == 1 else assert_agree)(loop.state.params, hand.params)


def test_the_port_is_short():
    assert n_lines(port) <= 30
