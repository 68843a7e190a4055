"""The compiled update: one or several steps in one program, and batches of data on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxfit as ff
from flaxfit.data._batch import Batch
from flaxfit.step._metric_totals import zero_totals
from flaxfit.step._scan import gather, make_update

X = np.arange(12, dtype=np.float32)
BATCHES = [Batch((X[i : i + 4],), ()) for i in (0, 4, 8)]
STATE = ff.TrainState.create(optax.sgd(0.1), {"params": np.float32(0)}, key=0)
TOTALS = zero_totals({"loss": (np.float32(0), np.float32(0))})


def adding(state, batch):
    """A step of the user's own, whose parameter is the sum of all that it has seen."""
    total = batch.inputs[0].sum()
    return state.replace(params=state.params + total), {"loss": (total, np.float32(4))}


TASK = ff.TrainTask(step=adding)


def test_several_steps_in_one_program_are_those_one_after_the_other():
    state, totals = STATE, TOTALS
    for batch in BATCHES:
        state, totals, _ = make_update(TASK)(state, totals, batch)
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *BATCHES)
    at_once, totals_at_once, grads = make_update(TASK, n_steps=3)(STATE, TOTALS, stacked)
    assert float(at_once.params) == float(state.params) == X.sum()
    assert int(at_once.step) == int(state.step) == 3 and grads is None
    assert totals["float32"][0].tolist() == totals_at_once["float32"][0].tolist() == [X.sum(), 12]


def test_an_update_gathers_the_examples_of_its_batch_from_the_data():
    data, rows = Batch((jnp.asarray(X),), ()), Batch((np.array([11, 0]),), ())
    state, *_ = make_update(TASK)(STATE, TOTALS, data, rows)
    assert float(state.params) == 11


def test_the_kept_gradients_are_those_of_the_last_step():
    def apply(variables, x, **options):
        return variables["params"] * x, {}

    task = ff.TrainTask(apply, optax.sgd(0.0), lambda outputs: outputs)
    options = {"grad_norm": False, "keep_grads": True}
    sums = jax.eval_shape(lambda: ff.make_train_step(task, grad_norm=False)(STATE, BATCHES[0])[1])
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *BATCHES)
    *_, grads = make_update(task, n_steps=3, **options)(STATE, zero_totals(sums), stacked)
    assert float(grads) == X[8:].mean()


def test_weights_of_the_data_and_of_the_batch_are_multiplied():
    rows = np.array([2, 1])
    weighted = Batch((X,), (), np.arange(12, dtype=np.int32))
    data = jax.tree.map(jnp.asarray, weighted)
    padding = Batch((rows,), (), np.array([1, 0], np.float32))
    assert gather(data, Batch((rows,), ())).weights.tolist() == [2, 1]
    assert gather(data, padding).weights.tolist() == [2, 0]
    assert gather(data._replace(weights=None), padding).weights.tolist() == [1, 0]
    assert gather(data._replace(weights=None), Batch((rows,), ())).weights is None
