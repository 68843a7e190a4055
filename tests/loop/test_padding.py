"""The Padder brings batches to the regular size, or finds the devices that they divide over."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import given
from marks import slow, thorough, usual
from strategies import strategies

import flaxfit as ff
from flaxfit import DataParallel
from flaxfit.data._batch import Batch
from flaxfit.loop._padding import Padder, pad_batch

X, Y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6, dtype=np.float32)


def make(n_devices=4, **options):
    return Padder(DataParallel(jax.devices()[:n_devices]), **{"pad": True, **options})


def test_batches_are_padded_to_a_multiple_of_the_devices_and_to_the_regular_size():
    feed = make()
    for n, weights in [(6, [1] * 6 + [0] * 2), (3, [1] * 3 + [0] * 5), (8, [1] * 8)]:
        prepared = feed((np.resize(X, (n, 2)), np.resize(Y, n)))
        assert prepared.n_examples == n and not prepared.is_weighted
        assert prepared.batch.weights.tolist() == weights


def test_batches_that_all_have_the_regular_size_need_no_weights():
    assert make(2, is_even=True)((X, Y)).batch.weights is None
    assert make(4, is_even=True)((X, Y)).batch.weights.sum() == 6


def test_each_part_of_the_share_of_a_device_has_examples_of_its_own():
    assert make(2, parts=2)((X, Y)).batch.weights.tolist() == [1] * 6 + [0] * 2
    with pytest.raises(ValueError, match=r"over 2 devices in 2 parts each \(6 % 4 = 2\)"):
        make(2, parts=2, pad=False)((X, Y))


def test_without_padding_a_remainder_runs_on_fewer_devices_and_a_regular_batch_must_divide():
    feed = make(2, pad=False, why_not="the task has pad=False")
    assert feed((X, Y)).batch.weights is None
    rest = feed((X[:3], Y[:3]))
    assert rest.strategy.n_devices == 1 and rest.n_examples == 3
    words = "6 examples over 4 devices .*nor pad it: the task has pad=False.*batch size of 4 or 8"
    with pytest.raises(ValueError, match=words):
        make(4, pad=False, why_not="the task has pad=False")((X, Y))


def test_a_padded_row_is_a_real_one_of_weight_zero_for_every_output():
    batch = pad_batch(Batch((X,), (Y,), {"a": Y, "b": 2 * Y}), 8)
    np.testing.assert_array_equal(batch.inputs[0][6:], X[[0, 0]])
    np.testing.assert_array_equal(batch.weights["b"], [*(2 * Y), 0, 0])


def test_batches_of_other_structures_are_refused_unless_each_has_a_program_of_its_own():
    feed, mixed = make(), make(is_mixed=True)
    feed((X, Y))
    mixed((X, Y))
    assert len(mixed((X, (Y, Y))).batch.targets) == 2
    with pytest.raises(ValueError, match="another structure than the first one"):
        feed((X, (Y, Y)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", usual("data-parallel", "FSDP", of=strategies(4)))
def test_a_penalty_of_the_model_sees_no_padded_rows(strategy):
    """The mean over all rows of the means of both batches, of 8 and 7 rows."""

    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            z = x @ self.param("w", nn.initializers.ones, (3, 1))
            self.sow("losses", "size", jnp.mean(z**2))
            return z

    x = np.random.default_rng(0).normal(size=(15, 3)).astype("f4")
    model = ff.Model(Sowing(), optax.sgd(0.0), "mse", strategy=strategies(4)[strategy]())
    fit = model.fit(x, np.zeros((15, 1), "f4"), batch_size=8, shuffle=False, verbose=0)
    squares = x.sum(1) ** 2
    assert fit["loss"][0] == pytest.approx(squares.mean(), rel=1e-5)
    assert fit["penalty"][0] == pytest.approx(squares.mean())


WEIGHTS = np.array([0.3, 0.1, -0.4], np.float32)
ROWS = np.random.default_rng(2).normal(size=(25, 3)).astype(np.float32)
SUMS = (ROWS @ np.array([1.0, -2.0, 0.5])).astype(np.float32)


def scalar_loss(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


def loop_of(
    n=25, loss="mse", batch_size=6, n_devices=4, *, data=None, counts=False, pad=True, **options
):
    """A loop over some rows; a model that counts what it has seen takes no padded row."""

    @given
    def init(rngs, x):
        return {"params": WEIGHTS} | ({"stats": {"seen": np.zeros(3, "f4")}} if counts else {})

    def apply(variables, x, **_):
        seen = {"stats": {"seen": variables["stats"]["seen"] + x.mean(0)}} if counts else {}
        return x @ variables["params"], seen

    data = data or ff.ArrayStream(ROWS[:n], SUMS[:n], batch_size=batch_size, epochs=1)
    task = ff.TrainTask(options.pop("apply", apply), optax.sgd(0.1), loss, data, pad=pad)
    devices = jax.devices()[:n_devices]
    return ff.TrainLoop(init, task, 0, devices=devices, n_steps_per_checkpoint=1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("n", [thorough(1), thorough(3), 6, thorough(7)])
def test_less_data_than_a_batch_is_a_remainder_where_it_cannot_be_padded(n):
    expected = np.mean((ROWS[:n].astype(np.float64) @ WEIGHTS - SUMS[:n]) ** 2)
    for n_devices in (1, 2, 4):
        for options in ({"loss": scalar_loss}, {"counts": True}):
            (found,) = loop_of(n, batch_size=8, n_devices=n_devices, stdout=False, **options)
            assert found.loss == pytest.approx(expected, rel=1e-6)
        data = ff.ArrayStream(ROWS[:n], SUMS[:n], batch_size=8, epochs=1)
        task = ff.EvalTask(lambda v, x: x @ v["params"], [], data, loss=scalar_loss)
        evaluate = ff.EvalLoop(task, strategy=DataParallel(jax.devices()[:n_devices]))
        found = evaluate.measure(ff.InferenceState(np.int32(0), WEIGHTS, {}))
        assert found["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_regular_batch_that_cannot_be_split_or_padded_is_refused():
    with pytest.raises(ValueError, match=r"6 examples over 4 devices .*batch size of 4 or 8"):
        next(loop_of(loss=scalar_loss, stdout=False))


def test_a_task_without_padding_runs_remainders_at_their_own_size():
    sizes = []

    def loss(outputs, targets):
        sizes.append(outputs.shape[0])
        return (outputs - targets) ** 2

    *_, last = loop_of(13, loss, 8, pad=False, stdout=False)
    assert last.step == 2 and {5, 2} <= {*sizes}
    with pytest.raises(ValueError, match="pad=False"):
        next(loop_of(6, loss, data=[(ROWS[:6], SUMS[:6])], pad=False, stdout=False))


def test_a_padded_row_is_a_real_one_and_said_once(capsys):
    # The gradient of a norm is NaN at zero, even times a weight of zero.
    def norm(variables, x, **options):
        return jnp.sqrt(jnp.sum((x * variables["params"]) ** 2, -1)), {}

    *_, last = loop_of(apply=norm)
    assert np.isfinite(last.state.params).all()
    words = "6 examples does not divide over 4 devices: padded to 8 with rows of weight 0"
    assert capsys.readouterr().err.count(words) == 1


class Shortened(ff.ArrayStream):
    """Arrays of a whole number of batches, whose third batch comes shorter or with weights."""

    n_delivered, has_weights = 0, False

    def __next__(self):
        x, y = super().__next__()
        self.n_delivered += 1
        if self.n_delivered != 3:
            return x, y
        return (x, y, np.arange(8, dtype=np.float32)) if self.has_weights else (x[:5], y[:5])


@pytest.mark.parametrize("has_weights", [False, slow(True)])
def test_a_class_of_the_users_own_may_change_its_batches(has_weights):
    def shortened():
        stream = Shortened(ROWS[:24], SUMS[:24], batch_size=8, epochs=1, resident=False)
        stream.has_weights = has_weights
        return stream

    streams = shortened(), list(shortened())
    found, expected = ([c.loss for c in loop_of(data=data, stdout=False)] for data in streams)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
