"""The training step of Flax's Gemma, on packed text: as in a loop by hand."""

import itertools
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import ByHand, assert_agree, n_lines
from flax import nnx
from marks import thorough

import flaxfit as ff

N_STEPS, BATCH, LENGTH, WIDTH = 4, 8, 24, 16
WORDS = [topic.split()[:20] for topic in pydoc_data.topics.topics.values()]
IDS = {word: i + 1 for i, word in enumerate(sorted({word for each in WORDS for word in each}))}
SEQUENCES = [[IDS[word] for word in words] for words in WORDS]


def batches():
    return ff.data.pack(SEQUENCES, LENGTH, batch_size=BATCH, shuffle=True)


class Gemma(nnx.Module):
    """One layer, with a gated network and one table for what is read and what is written."""

    def __init__(self, rngs):
        self.table = nnx.Embed(len(IDS) + 1, WIDTH, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.before, self.between, self.after = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(3))
        self.attend = nnx.MultiHeadAttention(2, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.gate, self.up, self.down = (
            nnx.Linear(*sizes, use_bias=False, rngs=rngs)
            for sizes in ((WIDTH, 32), (WIDTH, 32), (32, WIDTH))
        )

    def __call__(self, tokens, segment_ids, positions):
        same = nnx.make_attention_mask(segment_ids, segment_ids, jnp.equal)
        mask = nnx.combine_masks(same, nnx.make_causal_mask(tokens))
        x = self.table(tokens) * WIDTH**0.5 + self.place(positions)
        x += self.attend(self.before(x), mask=mask)
        y = self.between(x)
        x += self.down(nnx.gelu(self.gate(y)) * self.up(y))
        return self.table.attend(self.after(x))


RATE = optax.warmup_cosine_decay_schedule(0, 0.01, 2, 8)


def by_hand(model):
    """The loss of each step by hand."""
    definition, params = nnx.split(model)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(RATE))

    def loss_of(params, inputs, targets, weights):
        logits = nnx.merge(definition, params)(**inputs)
        soft = jax.nn.one_hot(targets, len(IDS) + 1)
        values = -jnp.sum(soft * nnx.log_softmax(logits), -1)
        return jnp.sum(values * weights) / jnp.sum(weights)

    hand = ByHand(optimizer, params, loss_of)
    for batch in itertools.islice(batches(), N_STEPS):
        hand.step(*batch)
    return hand


def port(model, **options):
    """The same training by flaxfit."""
    task = ff.TrainTask(model, optax.adamw(RATE), "crossentropy", batches(), clip_norm=0.5)
    return ff.TrainLoop(model, task, 0, n_steps=N_STEPS, stdout=False, **options)


@pytest.fixture(scope="module")
def model():
    """A model with random weights, which compiles no program."""
    definition, shapes = nnx.split(nnx.eval_shape(lambda: Gemma(nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def draw(s):
        return jnp.asarray(rng.normal(0, 0.2, s.shape), s.dtype)

    return nnx.merge(definition, jax.tree.map(draw, shapes))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, thorough(4)])
def test_packed_text_trains_as_in_a_loop_by_hand(model, n):
    hand = by_hand(model)
    loop = port(model, devices=jax.devices()[:n])
    assert [checkpoint.loss for checkpoint in loop] == pytest.approx(hand.found, rel=1e-6)
    assert_agree(loop.state.params, hand.params)


def test_the_port_is_short():
    assert n_lines(port) <= 30
