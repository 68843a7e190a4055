"""What a training loop says of itself, and what can be set on it."""

import dataclasses
import xml.etree.ElementTree as ET

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import init_of

import flaxfit as ff

X = np.full((8, 3), 0.125, np.float32)


@pytest.fixture
def loop():
    task = ff.TrainTask(nn.Dense(1), optax.sgd(0.1), "mse", (X, X[:, :1]))
    options = {"n_steps": 10, "n_steps_per_checkpoint": 5, "stdout": False}
    return ff.TrainLoop(init_of(nn.Dense(1), 3), task, 0, devices=jax.devices()[:1], **options)


def test_a_notebook_shows_where_a_loop_is_and_which_steps_yield_checkpoints(loop):
    page = ET.fromstring(loop._repr_html_())
    assert page.findtext("b") == "TrainLoop at step 0/10" and page.find("table") is None
    assert page.findtext("small") == (
        "4 params · 1 cpu device · checkpoints at step 1, 6, … (first_checkpoint=1, "
        "n_steps_per_checkpoint=5)"
    )
    first = ET.fromstring(loop.next_checkpoint()._repr_html_())
    assert "first_checkpoint=1: one step is trained before the first" in first.findtext("small", "")
    second = ET.fromstring(loop.next_checkpoint()._repr_html_())
    assert "first_checkpoint" not in second.findtext("small", "")
    page = ET.fromstring(loop._repr_html_())
    assert page.findtext("b") == "TrainLoop at step 6/10"
    assert [row[0].text for row in page.findall("table/tr")] == ["loss"]
    assert page.findtext("details/summary") == "params: 4 numbers in 2 arrays"


def test_a_snapshot_on_new_data_has_nothing_of_the_data_before(loop):
    loop.next_checkpoint()
    loop.data = ff.ArrayStream(X[:4], X[:4, :1], batch_size=4)
    snapshot = loop.snapshot()
    assert snapshot.step == 1 and snapshot.n_completed_steps == 0
    assert snapshot.data_state == loop.data.get_state()
    assert snapshot.running["batch_size"] == 0


def test_the_repr_of_a_loop_is_one_line_without_data_or_weights(loop):
    assert repr(loop) == (
        f"TrainLoop(mse, step=0, n_steps=10, n_steps_per_checkpoint=5, {loop.strategy}, 4 params)"
    )


def test_options_of_the_task_are_not_set_by_assignment(loop):
    for name in ("optimizer", "loss", "clip_norm", "metrics"):
        words = rf"no {name} to set: use .*replace\(loop.task, {name}=...\)"
        with pytest.raises(AttributeError, match=words):
            setattr(loop, name, None)
    with pytest.raises(AttributeError, match=r"use loop.set_hyperparams\(learning_rate=...\)"):
        loop.learning_rate = 0.1
    task = dataclasses.replace(loop.task, clip_norm=1.0)  # As the error says.
    other = ff.TrainLoop(loop.state, task, strategy=loop.strategy, stdout=False)
    assert other.next_step().step == 1
    loop.freeze, loop.notes = ".*bias", ["ours"]
    assert (loop.task.freeze, loop.notes) == ((".*bias",), ["ours"])
