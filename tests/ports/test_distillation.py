"""A student that follows a frozen teacher and the labels: as in a loop by hand."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import ByHand, assert_agree, drawn
from marks import thorough
from sklearn.datasets import load_digits

import flaxfit as ff

N_STEPS, BATCH, WARMTH = 4, 16, 2.0
DIGITS, LABELS = (each[: N_STEPS * BATCH] for each in load_digits(return_X_y=True))
DIGITS, LABELS = np.float32(DIGITS / 16), np.int32(LABELS)


class Network(nn.Module):
    width: int
    train: bool = False

    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=not self.train)(hidden))


STUDENT, TEACHER, OPTIMIZER = Network(8), Network(32), optax.adam(0.01)
INIT = drawn(STUDENT, DIGITS[:1])
TAUGHT = drawn(TEACHER, DIGITS[:1])(None)
teach = jax.jit(TEACHER.apply)


def by_hand(state, n):
    """The loss of each step by hand, with dropout as on n devices."""

    def loss_of(params, number, x, labels):
        keys = [jax.random.fold_in(ff.step_key(state.key, number, i), 0) for i in range(n)]
        apply = functools.partial(STUDENT.clone(train=True).apply, {"params": params})
        parts = zip(jnp.split(x, n), keys, strict=True)
        logits = jnp.concatenate([apply(part, rngs={"dropout": key}) for part, key in parts])
        odds = nn.softmax(teach(TAUGHT, x) / WARMTH)
        hard = -jnp.sum(jax.nn.one_hot(labels, 10) * nn.log_softmax(logits), -1)
        soft = jnp.sum(odds * (jnp.log(odds) - nn.log_softmax(logits / WARMTH)), -1)
        return jnp.mean(hard + WARMTH**2 * soft)

    hand = ByHand(OPTIMIZER, state.params, loss_of)
    for number in range(N_STEPS):
        rows = slice(BATCH * number, BATCH * (number + 1))
        hand.step(number, DIGITS[rows], LABELS[rows])
    return hand


def distillation(apply, batch, rngs, teacher):
    (images,), (labels,) = batch.inputs, batch.targets
    logits, soft = apply(images), nn.softmax(teacher(images) / WARMTH)
    followed = ff.losses.kl_divergence(logits / WARMTH, soft)
    return ff.losses.crossentropy(logits, labels) + WARMTH**2 * followed


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, thorough(4)])
def test_a_student_learns_from_a_teacher_as_in_a_loop_by_hand(n):
    data = ff.ArrayStream(DIGITS, LABELS, batch_size=BATCH)
    options = {"objective": distillation, "companions": {"teacher": (TEACHER, TAUGHT)}}
    task = ff.TrainTask(STUDENT, OPTIMIZER, data=data, **options)
    devices = jax.devices()[:n]
    loop = ff.TrainLoop(INIT, task, 0, n_steps=N_STEPS, stdout=False, devices=devices)
    hand = by_hand(loop.state, n)
    assert [checkpoint.loss for checkpoint in loop] == pytest.approx(hand.found, rel=1e-6)
    assert_agree(loop.state.params, hand.params)
