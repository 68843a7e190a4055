"""Throughput, against numbers by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops import make_weight_loop

import flaxfit as ff
from flaxfit.callbacks import Throughput
from flaxfit.callbacks._throughput import _peak_flops

tokens = np.zeros((48, 10), np.int32)
labels = np.zeros(48, np.int32)
X = np.ones((8, 1), np.float32)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        ones = nn.initializers.ones
        x = nn.Embed(16, 8, embedding_init=ones)(x).reshape(len(x), -1)
        return nn.Dense(4, kernel_init=ones)(x)


def run(throughput, strategy=None, n=48, batch_size=16, **options):
    data = ff.ArrayStream(tokens[:n], labels[:n], batch_size=batch_size, epochs=1)
    task = ff.TrainTask(Classifier().apply, optax.sgd(0.1), "crossentropy", data, **options)
    options = {"n_steps_per_checkpoint": 2, "strategy": strategy, "stdout": False}
    loop = ff.TrainLoop(Classifier().init, task, 0, callbacks=[throughput], **options)
    return loop, list(loop)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [ff.DataParallel(), ff.Sharded({"data": 2, "model": 2})], ids=["replicas", "mesh"]
)
def test_speed_is_that_of_training_and_utilisation_that_of_all_devices(strategy):
    loop, checkpoints = run(Throughput(peak_flops=1e9), strategy)
    assert len(strategy.devices) == len(jax.devices()) > 1
    for c, n in zip(checkpoints, (16, 32), strict=True):
        np.testing.assert_allclose(c.metrics["examples_per_second"], n / c.elapsed_time)
        np.testing.assert_allclose(c.metrics["tokens_per_second"], 10 * n / c.elapsed_time)
        flops = loop.step_flops(16) / 16 * c.metrics["examples_per_second"]
        np.testing.assert_allclose(c.metrics["flops_per_second"], flops)
        np.testing.assert_allclose(c.metrics["mfu"], flops / (1e9 * len(strategy.devices)))


def test_what_the_user_knows_better_is_used_and_an_unknown_peak_gives_no_utilisation():
    metrics = next(make_weight_loop([Throughput()])).metrics
    assert "mfu" not in metrics and metrics["flops_per_second"] > 0
    throughput = Throughput(tokens_per_example=3, flops_per_example=1e6)
    metrics = next(make_weight_loop([throughput])).metrics
    assert metrics["tokens_per_second"] == 3 * metrics["examples_per_second"]
    assert metrics["flops_per_second"] == 1e6 * metrics["examples_per_second"]


@pytest.mark.slow
def test_operations_can_be_counted_for_batches_that_parts_do_not_divide():
    _, (c, _) = run(Throughput(), n=30, batch_size=15, accumulate=2)
    assert c.metrics["flops_per_second"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, 1e6])
def test_recomputation_is_no_work_of_the_model(given):
    def classify(v, x, **_):
        return jax.checkpoint(lambda w: jnp.tanh(x * w) * w)(v["params"]), {}

    task = ff.TrainTask(classify, optax.sgd(0.1), "mse", [(X, X)] * 2)

    def init(rngs, x):
        return {"params": np.ones(1, np.float32)}

    throughput = Throughput(peak_flops=1e9, flops_per_example=given)
    (c, *_) = ff.TrainLoop(init, task, 0, callbacks=throughput, stdout=False)
    utilisation, other = ("hfu", "mfu") if given is None else ("mfu", "hfu")
    peak = 1e9 * len(jax.devices())
    assert c.metrics[utilisation] == c.metrics["flops_per_second"] / peak
    assert other not in c.metrics


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("TPU v5 lite", 197e12),
        ("cpu", None),
        ("NVIDIA L400", None),
        ("NVIDIA H100X", None),
        ("TPU v50", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_devices_go_by_whole_words_of_their_kind_the_longest_first(kind, peak):
    assert _peak_flops(kind) == peak


def test_without_a_loop_there_is_nothing_to_measure(checkpoint_at):
    with pytest.raises(ValueError, match="must be in the callbacks of a loop"):
        Throughput()(checkpoint_at(1, loss=1.0))
