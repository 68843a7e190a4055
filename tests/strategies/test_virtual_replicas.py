"""Virtual replicas: training gives the same bits on any number of devices, and goes on so."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import init_of
from marks import thorough
from strategies import assert_same_bits

import flaxfit as ff

RNG = np.random.default_rng(0)
X = RNG.normal(size=(42, 12)).astype(np.float32)
Y = RNG.integers(0, 3, 42)
W = RNG.uniform(0, 2, 42).astype(np.float32)


class Net(nn.Module):
    """Statistics of its own, for which no batch can be padded; dropout; a softmax.

    The gradient of a softmax divides by the same number twice.
    """

    train: bool = True
    attends: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=not self.train, momentum=0.9)(nn.Dense(12)(x))
        x = x.reshape(-1, 3, 4)
        if self.attends:
            x = nn.softmax(x @ x.swapaxes(1, 2)) @ x
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not self.train)(nn.relu(x.sum(1))))


def make_loop(n, n_steps=6, *, init=None, callbacks=(), virtual_replicas=8, is_small=False):
    """A run on the first `n` devices, measured at each checkpoint unless it is to be small."""
    net, held = Net(attends=not is_small), (X[:21], Y[:21])
    fresh = init_of(net, 12)
    if not is_small:
        task = ff.EvalTask(Net(train=False).apply, ["accuracy"], held, loss="crossentropy")
        callbacks = [ff.EvalLoop(task), *callbacks]
    stream = ff.ArrayStream(X, Y, batch_size=16, shuffle=True)
    task = ff.TrainTask(net.apply, optax.adamw(0.01), "crossentropy", stream, ["recall"])
    return ff.TrainLoop(
        fresh if init is None else init(fresh),
        task,
        0,
        n_steps=n_steps,
        n_steps_per_checkpoint=2,
        first_checkpoint=2,
        strategy=ff.DataParallel(jax.devices()[:n], virtual_replicas=virtual_replicas),
        callbacks=callbacks,
    )


def train(*arguments, **options):
    """The state that a run ends with, and its metrics."""
    loop = make_loop(*arguments, **options)
    metrics = [checkpoint.metrics for checkpoint in loop]
    return loop.state, metrics


@functools.cache
def whole(n, virtual_replicas=8, *, is_small=False):
    return train(n, virtual_replicas=virtual_replicas, is_small=is_small)


@functools.cache
def weighted(n, steps_per_call=1):
    """The state and the metrics of a run whose batches are padded, with many options."""
    stream = ff.ArrayStream(X, Y, W, batch_size=13, shuffle=True)
    options = {"clip_norm": 0.1, "ema": 0.9, "skip_nonfinite": True, "accumulate": 2}
    net = nn.Dense(3)
    options |= {"rngs": (), "freeze": "bias"}
    task = ff.TrainTask(net.apply, optax.adam(0.1), "crossentropy", stream, **options)
    loop = ff.TrainLoop(
        init_of(net, 12),
        task,
        0,
        n_steps=5,
        n_steps_per_checkpoint=2,
        steps_per_call=steps_per_call,
        strategy=ff.DataParallel(jax.devices()[:n], virtual_replicas=4),
        stdout=False,
    )
    metrics = [checkpoint.metrics for checkpoint in loop]
    return loop.state, metrics


@pytest.mark.slow
def test_weights_padding_clipping_and_averages_are_the_same_to_the_bit():
    assert_same_bits(weighted(1), weighted(4))


@pytest.mark.slow
def test_dropout_is_that_of_a_replica_wherever_it_runs():
    def apply(variables, x, *, rngs, mutable):
        return x * variables["params"] + jax.random.normal(rngs["dropout"], x.shape), {}

    def first_loss(n):
        stream = ff.ArrayStream(X[:16], X[:16], batch_size=16)
        task = ff.TrainTask(apply, optax.sgd(0.1), "mse", stream)
        strategy = ff.DataParallel(jax.devices()[:n], virtual_replicas=4)
        init = {"params": np.ones(12, np.float32)}
        loop = ff.TrainLoop(lambda rngs, x: init, task, 0, strategy=strategy, stdout=False)
        return loop.next_step().loss, loop.state.key

    (one, key), (four, _) = first_loss(1), first_loss(4)
    keys = [jax.random.fold_in(ff.step_key(key, 0, replica), 0) for replica in range(4)]
    noise = np.stack([jax.random.normal(key, (4, 12)) for key in keys])
    assert one == four == pytest.approx((noise**2).mean(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "replicas"), [((2, 1), 2), thorough((4, 2, 1), 8)])
def test_a_run_goes_on_to_the_bit_on_other_numbers_of_devices(devices, replicas, tmp_path, capfd):
    def reader(init):
        return ff.checkpoints.CheckpointFileReader(tmp_path, init)

    is_small = len(devices) == 2
    expected, metrics = whole(devices[0], replicas, is_small=is_small)
    assert {"batch_stats"} == expected.model_state.keys()
    state, found = None, []
    # The third and the sixth batch are smaller.
    for n, n_steps in zip(devices, (2, 4, 6)[-len(devices) :], strict=True):
        options = {"virtual_replicas": replicas, "is_small": is_small}
        save = ff.checkpoints.CheckpointFileWriter(tmp_path)
        state, of_part = train(n, n_steps, init=reader, callbacks=[save], **options)
        found += of_part
    assert_same_bits((state, found), (expected, metrics))
    assert "bit for bit" not in capfd.readouterr().err
    make_loop(4, init=reader, virtual_replicas=4, is_small=is_small)
    said = capfd.readouterr().err
    assert f"virtual_replicas was {replicas}, now is 4" in said


@pytest.mark.slow
def test_several_steps_are_taken_in_one_dispatch():
    (_, single), (_, several) = weighted(1), weighted(1, steps_per_call=2)
    assert len(several) == len(single) == 3
    for name, value in single[-1].items():
        assert several[-1][name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize(
    "n, virtual_replicas, message",
    [
        (1, 6, "must be a power of two, such as 8, got 6"),
        (1, 0, "must be a power of two, such as 8, got 0"),
        (3, 8, r"Cannot divide 8 virtual replicas over 3 devices.*devices=jax.devices\(\)\[:2\]"),
        (4, 2, r"Cannot divide 2 virtual replicas over 4 devices.*devices=jax.devices\(\)\[:2\]"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(n, virtual_replicas, message):
    with pytest.raises(ValueError, match=message):
        ff.DataParallel(jax.devices()[:n], virtual_replicas=virtual_replicas)


def test_a_model_that_reduces_over_the_replicas_is_refused():
    net = nn.BatchNorm(use_running_average=False, axis_name="replica")
    task = ff.TrainTask(net.apply, optax.sgd(0.1), "mse", (X, X))
    strategy = ff.DataParallel(virtual_replicas=8)
    loop = ff.TrainLoop(net.init, task, 0, strategy=strategy, stdout=False)
    with pytest.raises(ValueError, match='Cannot use the axis "replica" in the model, the loss'):
        loop.next_step()


def test_a_batch_that_cannot_be_padded_must_divide_by_them():
    def apply(variables, x, **_):
        return x * variables["params"], {}

    data = iter([(X[:12], X[:12])])
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", data, pad=False)
    state = ff.TrainState.create(task.optimizer, {"params": np.ones(12, np.float32)})
    strategy = ff.DataParallel(jax.devices()[:2], virtual_replicas=8)
    loop = ff.TrainLoop(state, task, strategy=strategy)
    message = "Cannot split a batch of 12 examples over 8 virtual replicas.*or fewer virtual"
    with pytest.raises(ValueError, match=message):
        loop.next_step()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_narrow_takes_as_many_virtual_replicas_as_divide_the_examples(n):
    strategy = ff.DataParallel(jax.devices()[:n], virtual_replicas=8)
    assert [strategy.narrow(rows).n_devices for rows in (16, 12, 6, 5)] == [8, 4, 2, 1]
    assert [len(strategy.narrow(rows).devices) for rows in (6, 5)] == [min(n, 2), 1]
    assert strategy.narrow(8) is strategy and strategy.narrow(12) is strategy.narrow(4)
