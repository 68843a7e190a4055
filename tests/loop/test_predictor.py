"""The predictor: outputs in the order of the data, a row per example, as NumPy arrays."""

import jax
import numpy as np
import optax
import pytest
from internals import n_programs_of
from loops import given, some_devices

import flaxfit as ff
from flaxfit.loop._predictor import Predictor

X = np.arange(26, dtype=np.float32).reshape(13, 2)
STATE = ff.InferenceState(np.int32(0), np.float32(3), {})
STRATEGY = ff.DataParallel(jax.devices()[:2])


def scaled(variables, x, **options):
    return {"scaled": variables["params"] * x, "first": x[:, 0]}


@pytest.fixture(scope="module")
def predict():
    return Predictor(ff.EvalTask(scaled, []))


@pytest.mark.parametrize(
    "data",
    [
        lambda: ff.ArrayStream(X, batch_size=4),
        lambda: [X[:4], X[4:8], X[8:12], X[12:]],
        lambda: ff.ArrayStream(X, X, batch_size=4, shuffle=False, resident=False),
    ],
    ids=["arrays", "batches", "with targets"],
)
def test_outputs_come_in_order_and_without_padding(predict, data):
    outputs = predict(STATE, data(), STRATEGY)
    np.testing.assert_array_equal(outputs["scaled"], 3 * X)
    np.testing.assert_array_equal(outputs["first"], X[:, 0])
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(outputs))


def test_data_may_be_written_to_between_the_batches_of_an_iteration():
    # Of 64-byte alignment, which JAX reads in place.
    x = np.frombuffer(bytearray(4 * 16 * 12 + 64), np.uint8)
    x = x[-x.ctypes.data % 64 :][: 4 * 16 * 12].view(np.float32).reshape(24, 8)
    x[:] = 1
    means = []
    for batch, outputs in Predictor(ff.EvalTask(scaled, [])).over(
        STATE, ff.ArrayStream(x, batch_size=2), STRATEGY
    ):
        means.append(outputs["scaled"].mean())
        batch.inputs[0][:] = 5
        x[:] = 5
    assert means[:2] == [3, 3] and {*means} == {3, 15} and sorted(means) == means


def test_a_model_is_traced_once_for_batches_of_the_same_shape():
    traces = []

    def counted(variables, x):
        traces.append(x.shape)
        return variables["params"] * x

    predict = Predictor(ff.EvalTask(counted, []))
    predict(STATE, [X[:4], X[4:8]], STRATEGY)
    n_traces = len(traces)
    predict(STATE.replace(params=np.float32(5)), ff.ArrayStream(X, batch_size=4), STRATEGY)
    assert len(traces) == n_traces


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("n_devices", some_devices(3))
def test_any_number_of_rows_is_predicted_in_order_by_one_program(n_devices):
    x = np.random.default_rng(0).normal(size=(25, 3)).astype(np.float32)

    @given
    def init(rngs, x):
        return {"params": np.array([0.3, 0.1, -0.4], np.float32)}

    def apply(variables, x, mutable=False, **_):
        outputs = x @ variables["params"]
        return outputs if mutable is False else (outputs, {})

    strategy = ff.DataParallel(jax.devices()[:n_devices])
    model = ff.Model((init, apply), optax.sgd(0.0), "mse", strategy=strategy)
    model.fit(x[:12], x[:12, 0], batch_size=12, verbose=0)
    whole = model.predict(x, batch_size=24)
    for n in range(1, 26):
        np.testing.assert_array_equal(model.predict(x[:n], batch_size=24), whole[:n])
    assert n_programs_of(model)[2] == 1


def test_random_streams_need_a_training_state():
    predict = Predictor(ff.EvalTask(scaled, [], rngs=("dropout",)))
    with pytest.raises(ValueError, match=r"Predictor\(rngs=.*needs the random key of a TrainState"):
        predict(STATE, [X], STRATEGY)
