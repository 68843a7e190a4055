"""The training step of Flax's addition of numbers as text (seq2seq): as in a loop by hand."""

import itertools

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

N_STEPS, BATCH, DIGITS = 4, 16, 2
PAD, END, START = 0, 1, 2
CHARACTERS = "0123456789+"
VOCABULARY = len(CHARACTERS) + 3


def encoded(text, length):
    ids = [CHARACTERS.index(each) + 3 for each in text]
    return np.pad(ids + [END], (0, length - len(ids) - 1))


def sums(seed=0):
    """Batches of questions such as "12+7", and of their answers, without an end."""
    rng = np.random.default_rng(seed)
    while True:
        pairs = rng.integers(0, 10**DIGITS, (BATCH, 2))
        questions = [encoded(f"{a}+{b}", 2 * DIGITS + 2) for a, b in pairs]
        answers = [[START, *encoded(str(a + b), DIGITS + 2)] for a, b in pairs]
        yield {"question": np.array(questions), "answer": np.array(answers)}


class Seq2seq(nn.Module):
    """An encoder, whose state a decoder starts from; it is given the true characters so far."""

    @nn.compact
    def __call__(self, question, answer):
        encoder, decoder = (nn.RNN(nn.LSTMCell(16), return_carry=b) for b in (True, False))
        lengths = jnp.argmax(question == END, 1) + 1
        carry, _ = encoder(jax.nn.one_hot(question, VOCABULARY), seq_lengths=lengths)
        found = decoder(jax.nn.one_hot(answer[:, :-1], VOCABULARY), initial_carry=carry)
        return nn.Dense(VOCABULARY)(found)


OPTIMIZER = optax.adam(0.003)


def by_hand(params):
    """The loss and the accuracy of each step by hand."""

    def measure(params, batch):
        logits, answer = Seq2seq().apply({"params": params}, **batch), batch["answer"]
        labels = jax.nn.one_hot(answer[:, 1:], VOCABULARY)
        lengths = jnp.argmax(answer[:, 1:] == END, 1)[:, None] + 1
        mask = jnp.arange(answer.shape[1] - 1) < lengths
        entropies = -jnp.sum(nn.log_softmax(logits) * labels, -1)
        right = mask & (logits.argmax(-1) == answer[:, 1:])
        return jnp.mean(jnp.where(mask, entropies, 0)), jnp.sum(right) / jnp.sum(mask)

    hand = ByHand(OPTIMIZER, params, measure)
    for batch in itertools.islice(sums(), N_STEPS):
        hand.step(batch)
    return hand


def port(init, **options):
    """The same training by flaxfit."""

    def is_counted(labels):
        return jnp.arange(labels.shape[1]) <= jnp.argmax(labels == END, 1, keepdims=True)

    def loss(logits, answer):
        labels = answer[:, 1:]
        return jnp.where(is_counted(labels), ff.losses.crossentropy(logits, labels), 0)

    def accuracy(logits, answer):
        labels = answer[:, 1:]
        return logits.argmax(-1) == labels, is_counted(labels)

    columns = {"inputs": ("question", "answer"), "targets": "answer"}
    task = ff.TrainTask(Seq2seq(), OPTIMIZER, loss, sums(), {"accuracy": accuracy}, **columns)
    return ff.TrainLoop(init, task, 0, n_steps=N_STEPS, stdout=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("n", [thorough(1), 4])
def test_additions_are_learned_as_in_a_loop_by_hand(n):
    loop = port(drawn(Seq2seq(), **next(sums())), devices=jax.devices()[:n])
    hand = by_hand(loop.state.params)
    found = [[checkpoint.loss, checkpoint.metrics["accuracy"]] for checkpoint in loop]
    np.testing.assert_allclose(found, hand.found, rtol=1e-6)
    (assert_equal if n == 1 else assert_agree)(loop.state.params, hand.params)


def test_the_port_is_short():
    assert n_lines(port) <= 30
