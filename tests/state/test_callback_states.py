"""What callbacks remember: JSON and arrays in one state, divided in a checkpoint and joined."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

from flaxfit.callbacks import ProgressBar
from flaxfit.state._callback_states import collect, put_back


class Remembers:
    def __init__(self, state=None):
        self.state = state

    def __call__(self, checkpoint):
        return None

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


STATES = [
    {"n": 3, "losses": [1.0, 2.0]},
    {"n": 3, "params": {"w": np.ones(2)}, "model_state": FrozenDict()},
    {"params": {"w": jnp.ones(2)}, "step": jnp.int32(4), "opt_state": (jnp.zeros(1), ())},
    {"params": None, "step": 7, "model_state": {}, "key": []},
    [{"loss": 1.0}, {"loss": 0.5}],
]


@pytest.mark.parametrize("state", STATES)
def test_a_state_is_divided_into_json_and_fields_and_joined_again(state):
    states, arrays = collect([Remembers(state)])
    json.dumps(states)
    assert set(states) == {"Remembers"} and set(arrays) <= {"Remembers"}
    fresh = Remembers()
    assert put_back([fresh], states, arrays) == []
    assert jax.tree.structure(fresh.state) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, fresh.state, state)


def test_arrays_that_are_no_fields_of_a_state_are_left_to_json():
    states, arrays = collect([Remembers({"seen": np.arange(3)})])
    assert states["Remembers"]["seen"].tolist() == [0, 1, 2] and arrays == {}


def test_states_without_a_callback_and_callbacks_without_a_state_are_named():
    first, second = Remembers({"n": 1}), Remembers({"n": 2})
    states, arrays = collect([first, second])
    assert list(states) == ["Remembers", "Remembers-2"]
    assert put_back([Remembers()], states, arrays) == [
        "no callback takes the saved state of Remembers-2"
    ]
    assert put_back([Remembers()], {}, {}) == [
        "Remembers starts from scratch: the checkpoint holds no state of it"
    ]


def test_a_display_may_come_and_go():
    bars = [ProgressBar(), ProgressBar(monitor="val_loss")]
    states, arrays = collect(bars)
    assert list(states) == ["ProgressBar", "ProgressBar-2"]
    assert put_back([], states, arrays) == put_back(bars, {}, {}) == []
