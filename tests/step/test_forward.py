"""The forward passes of a task: losses and metrics are computed in float32, whatever the module."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import flaxfit as ff
from flaxfit.step._forward import forward, forward_eval
from flaxfit.step._metric_totals import compute

rng = np.random.default_rng(3)
LOGITS = (20 * rng.normal(size=(8, 5))).astype(jnp.bfloat16)
LABELS = rng.integers(0, 5, 8).astype(np.int32)
STATE = ff.TrainState(jnp.int32(0), jnp.ones(()), (), {}, jax.random.key(0))


def apply(variables, x, **options):
    outputs = x * variables["params"].astype(x.dtype)
    return (outputs, {}) if "mutable" in options else outputs


def crossentropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels) + 0


def half_squared(outputs, targets):
    assert outputs.dtype == targets.dtype == jnp.float32
    return jnp.square(outputs - targets).astype(jnp.float16)


def passes(loss, x, y, metrics=("mse",), compiled=jax.jit):
    """The metrics of a forward pass in training and in evaluation."""
    batch = ff.Batch((x,), (y,))
    task = ff.TrainTask(apply, optax.sgd(0.1), loss, metrics=metrics)
    trained = compiled(lambda batch: forward(task, STATE, batch, STATE.key).sums)(batch)
    task = ff.EvalTask(lambda v, x: apply(v, x), metrics, loss=loss)
    measured = compiled(lambda batch: forward_eval(task, STATE, batch, None).sums)(batch)
    return [compute(sums, task.metrics) for sums in (trained, measured)]


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        slow("crossentropy", "bfloat16"),
        slow("crossentropy", "float8_e4m3fn"),
        slow(crossentropy, "float16"),
    ],
)
def test_losses_and_metrics_of_narrow_outputs_are_computed_in_float32(loss, dtype):
    x = LOGITS.astype(dtype)
    # Operation by operation, as XLA fuses those of other dtypes in other ways.
    measured = functools.partial(
        passes, y=LABELS, metrics=("perplexity", "accuracy"), compiled=lambda function: function
    )
    assert measured(loss, x) == measured(loss, x.astype(np.float32))


def test_targets_of_16_bits_are_compared_in_float32():
    x, y = (rng.normal(size=9).astype(np.float16) for _ in range(2))
    expected = np.square(x.astype(np.float64) - y).mean()
    for found in passes("mse", x, y):
        assert found["loss"] == pytest.approx(expected, rel=1e-6)
        assert found["mse"] == pytest.approx(expected, rel=1e-6)


def test_values_of_16_bits_are_added_up_in_float32():
    x = np.full(4096, 40, np.float16)
    for found in passes(half_squared, x, 0 * x):
        assert found["loss"] == 1600
    for found in passes(lambda o, t: half_squared(o, t).mean(), x, 0 * x):
        assert found["loss"] == 1600


def test_losses_by_output_are_computed_in_float32():
    x = np.array([[3e4, 3e4]], np.float16)

    def two(variables, x, **options):
        outputs = {"a": x, "b": x}
        return (outputs, {}) if "mutable" in options else outputs

    task = ff.TrainTask(two, optax.sgd(0.1), {"a": "crossentropy", "b": "mse"})
    batch = ff.Batch((x,), ({"a": np.array([1]), "b": x},))
    sums = jax.jit(lambda batch: forward(task, STATE, batch, STATE.key).sums)(batch)
    found = compute(sums, task.metrics)
    assert found["a_loss"] == pytest.approx(np.log(2))
    assert found["loss"] == pytest.approx(np.log(2))


def test_sown_losses_of_16_bits_are_added_up_in_float32():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            for value in (2048, 1, 1, 1):
                self.sow("losses", "penalty", jnp.asarray(value, jnp.float16))
            self.sow("losses", "rows", jnp.full(70_000, 2, jnp.float16))
            return x

    task = ff.TrainTask(Sowing().apply, optax.sgd(0.1), "mse")
    batch = ff.Batch((np.ones(1, np.float32),), (np.ones(1, np.float32),))
    state = STATE.replace(params={})
    assert forward(task, state, batch, state.key).penalty == 142_051


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = np.array([1 + 1e-12, 2.0])
        for found in passes("mse", x, np.floor(x)):
            assert found["loss"] == pytest.approx(5e-25, rel=1e-3)
