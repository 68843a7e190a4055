"""The pieces of HTML that notebooks show: well-formed, escaped, with the facts."""

import xml.etree.ElementTree as ET

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import flaxfit as ff
from flaxfit.display import _html

PARAMS = {"dense": {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float16)}}


def text_of(node):
    return "".join(node.itertext())


def rows_of(table):
    return [[text_of(cell) for cell in row] for row in table]


def test_a_card_escapes_its_texts_and_takes_its_parts_as_they_are():
    page = ET.fromstring(_html.card("<b> & co", ["1 < 2", "", "'x'"], "<p>below</p>"))
    assert page.findtext("b") == "<b> & co"
    assert page.findtext("small") == "1 < 2 · 'x'"
    assert page.findtext("p") == "below"


def test_a_table_escapes_its_cells():
    page = ET.fromstring(_html.table([["<td>", "&"]], head=["a", '"']))
    assert rows_of(page) == [["a", '"'], ["<td>", "&"]]
    assert [cell.tag for cell in page[0]] == ["th", "th"]


def test_arrays_are_listed_by_path_below_a_summary_and_named_where_they_have_names():
    axes = {"params/dense/kernel": PartitionSpec("embed", None)}
    page = ET.fromstring(_html.arrays("params", PARAMS, axes))
    assert page.findtext("summary") == "params: 8 numbers in 2 arrays"
    assert rows_of(page.find("table")) == [
        ["path", "dtype", "shape", "axes"],
        ["dense/bias", "float16", "(2,)", ""],
        ["dense/kernel", "float32", "(3, 2)", "embed, None"],
    ]


def test_plain_numbers_keys_and_arrays_that_are_not_read_yet_are_listed_too():
    def refuse():
        raise AssertionError("It was read.")

    lazy = ff.importers.LazyThreadPoolArray((4,), np.dtype("int8"), refuse)
    tree = {"a": 1.0, "key": jax.random.key(0), "lazy": lazy}
    page = ET.fromstring(_html.arrays("model_state", tree))
    assert rows_of(page.find("table"))[1:] == [
        ["a", "float", "()"],
        ["key", "key<fry>", "()"],
        ["lazy", "int8", "(4,)"],
    ]


def test_the_list_of_a_very_large_model_is_cut_and_says_so():
    tree = {f"layer_{i:04}": np.ones(2) for i in range(1203)}
    page = ET.fromstring(_html.arrays("params", tree))
    assert len(page.find("table")) == 201
    assert page.findtext("small") == "and 1,003 more arrays"


@pytest.fixture(scope="module")
def state():
    return ff.TrainState.create(
        optax.adam(0.1), {"params": PARAMS, "stats": {"mean": np.ones(2, np.float32)}}
    )


def test_a_train_state_shows_its_step_its_sizes_and_its_arrays(state):
    page = ET.fromstring(state.replace_step(1200)._repr_html_())
    assert page.findtext("b") == "TrainState at step 1,200"
    assert page.findtext("small") == "8 params · params 28 B · model_state 8 B · opt_state 60 B"
    names = [text_of(each).split(":")[0] for each in page.iter("summary")]
    assert names == ["params", "model_state", "opt_state"]
    page = ET.fromstring(state.for_inference()._repr_html_())
    assert page.findtext("b") == "InferenceState at step 0"
    assert page.findtext("small") == "8 params · params 28 B · model_state 8 B"


def test_a_state_whose_step_cannot_be_read_is_shown_without_it(state):
    abstract = ET.fromstring(jax.eval_shape(lambda: state)._repr_html_())
    step = jax.numpy.int32(3)
    step.delete()
    donated = ET.fromstring(state.replace(step=step)._repr_html_())
    assert abstract.findtext("b") == donated.findtext("b") == "TrainState"
    assert text_of(abstract.find("small")) == text_of(donated.find("small"))


def test_a_model_shows_itself_before_and_after_it_was_trained():
    x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
    one = ff.DataParallel(jax.devices()[:1])
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", {"a<b": "mae"}, strategy=one)
    before = ET.fromstring(model._repr_html_())
    assert before.findtext("b") == "Dense"
    facts = "metrics a<b · 1 cpu device · no weights yet: call fit or load"
    assert before.findtext("small") == facts
    model.fit(x, 2 * x, epochs=2, batch_size=8, verbose=0)
    after = ET.fromstring(model._repr_html_())
    assert after.findtext("b") == "Dense at step 4"
    assert after.findtext("small") == "2 params · metrics a<b · 1 cpu device"
    assert after.findtext("div/b").startswith("Dense: 2 epochs, 4 steps")
    assert after.findtext("details/summary") == "params: 2 numbers in 2 arrays"


def test_nothing_in_a_page_has_to_run_or_to_be_fetched(state):
    page = state._repr_html_()
    assert not [word for word in ("<script", "http", "onclick", "<style") if word in page]
