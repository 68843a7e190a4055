"""The record that a loop yields."""

import xml.etree.ElementTree as ET

import numpy as np
import optax
import pytest

import flaxfit as ff


def make_checkpoint(**options):
    params = {"dense": {"kernel": np.ones((3, 2), np.float32)}}
    state = ff.TrainState(np.int32(4), params, optax.EmptyState(), {"stats": {}}, None)
    return ff.Checkpoint(step=4, state=state, metrics={"loss": 0.5}, **options)


def test_its_parts_have_the_names_of_the_field():
    checkpoint = make_checkpoint(last_grads={"dense": 1})
    assert checkpoint.loss == 0.5
    assert checkpoint.model_params is checkpoint.state.params
    assert checkpoint.model_state == {"stats": {}}
    assert checkpoint.optimizer_state == optax.EmptyState()
    assert checkpoint.grads == {"dense": 1}


def test_it_is_changed_by_copies_only():
    checkpoint = make_checkpoint()
    with pytest.raises(AttributeError, match=r"changed copy, checkpoint.replace\(stop=...\)"):
        checkpoint.stop = True
    assert checkpoint.replace(stop=True).stop and not checkpoint.stop
    added = checkpoint.with_metrics({"mae": 1.0}, "val_")
    assert added.metrics == {"loss": 0.5, "val_mae": 1.0} and checkpoint.metrics == {"loss": 0.5}


def test_it_shows_its_numbers_and_not_its_matrices():
    checkpoint = make_checkpoint(n_completed_steps=8, elapsed_time=2.0)
    checkpoint = checkpoint.with_metrics({"confusion": np.eye(2)})
    assert checkpoint.scalars == {"loss": 0.5}
    assert repr(checkpoint) == "Checkpoint(step=4, loss=0.5, 4 steps/s, 6 params)"


def test_its_page_has_the_facts_the_numbers_and_the_arrays_but_no_matrices():
    checkpoint = make_checkpoint(n_completed_steps=8, elapsed_time=2.0, compile_time=0.5)
    checkpoint = checkpoint.with_metrics({"a < b": 0.25, "confusion": np.eye(2)})
    page = ET.fromstring(checkpoint._repr_html_())
    assert page.findtext("b") == "Checkpoint at step 4"
    assert page.findtext("small") == "8 steps · 2.0s · 4 steps/s · compiled in 500 ms · 6 params"
    rows = [[cell.text for cell in row] for row in page.findall("table/tr")]
    assert rows == [["loss", "0.5000"], ["a < b", "0.2500"]]
    assert page.findtext("details/summary") == "params: 6 numbers in 1 array"


def test_a_checkpoint_of_nothing_has_a_page_too():
    page = ET.fromstring(ff.Checkpoint(step=3, state=None, metrics={})._repr_html_())
    assert "".join(page.itertext()) == "Checkpoint at step 30 steps · 0 ms"
