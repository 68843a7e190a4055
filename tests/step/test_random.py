"""The random keys of a step: functions of its position."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np

import flaxfit as ff
from flaxfit.step._random import eval_key, rngs_of

KEY = jax.random.key(3)


def numbers(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_each_step_and_replica_has_a_key_of_its_own_which_can_be_derived_outside():
    positions = [*itertools.product(range(4), (0, 1))]
    assert len({numbers(ff.step_key(KEY, *position)) for position in positions}) == 8
    expected = jax.random.fold_in(jax.random.fold_in(KEY, 5), 2)
    assert ff.step_key(KEY, 5, 2) == expected


def test_evaluation_has_keys_of_its_own_by_state_batch_and_replica():
    states = [SimpleNamespace(key=KEY, step=step) for step in (0, 1)]
    places = itertools.product(states, range(3), (0, 1))
    evaluation = [numbers(eval_key(*place)) for place in places]
    # The parts of a training step are numbered from 0.
    training = [numbers(jax.random.fold_in(ff.step_key(KEY, 0), part)) for part in range(3)]
    assert len({*evaluation, *training}) == len(evaluation) + len(training)


def test_each_stream_has_a_key_by_its_place_among_the_names():
    rngs = rngs_of(("dropout", "noise"), KEY)
    assert list(rngs) == ["dropout", "noise"]
    assert [*rngs.values()] == [jax.random.fold_in(KEY, i) for i in (0, 1)]
    assert rngs_of((), KEY) == {}
