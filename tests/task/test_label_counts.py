"""Labels out of range that come after the first batch: left out, counted, and refused in words."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from loops import init_of, waves
from marks import slow, thorough
from strategies import one_device

import flaxfit as ff
from flaxfit.losses._checks import in_range, out_of_range
from flaxfit.step._metric_totals import compute

rng = np.random.default_rng(5)
X = rng.normal(size=(32, 4)).astype(np.float32)
Y = rng.integers(0, 3, 32).astype(np.int32)
MODULE = nn.Dense(3, kernel_init=waves)


def spoilt(rows, label):
    y = Y.copy()
    y[rows] = label
    return y


def batches(x, y, *weights, size=8):
    """A stream, of which only the first batch is checked on the host."""
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        yield (x[rows], y[rows], *(w[rows] for w in weights))


def make_loop(data, strategy=None, *, n=4, n_steps=4, options=None, **task):
    task = {"loss": "crossentropy", "metrics": ["accuracy"]} | task
    task = ff.TrainTask(MODULE.apply, optax.sgd(0.1), data=data, **task)
    options = {"stdout": False, "strategy": strategy, **(options or {})}
    init = init_of(MODULE, 4)
    return ff.TrainLoop(init, task, 0, X[:1], n, n_steps, first_checkpoint=n, **options)


def kernel(loop):
    return np.asarray(loop.state.params["kernel"])


@pytest.mark.parametrize(
    ("label", "strategy", "options", "task"),
    [
        thorough(-1, one_device, {}, {}, id="one"),
        thorough(3, one_device, {}, {}, id="above"),
        slow(2**31 - 1, one_device, {"steps_per_call": 2}, {}, id="several steps"),
        slow(3, one_device, {}, {"accumulate": 2}, id="accumulate"),
        pytest.param(-1, ff.DataParallel, {}, {}, id="four"),
        thorough(-1, lambda: ff.DataParallel(virtual_replicas=8), {}, {}, id="virtual"),
        thorough(3, ff.Sharded.fsdp, {}, {}, id="fsdp"),
    ],
)
def test_a_later_batch_is_refused_at_the_next_checkpoint_and_its_labels_are_left_out(
    label, strategy, options, task
):
    seen = []
    options = {**options, "callbacks": [seen.append]}
    loop = make_loop(batches(X, spoilt([17, 30], label)), strategy(), options=options, **task)
    with pytest.raises(ValueError) as error:
        next(loop)
    message = str(error.value)
    assert "Found 2 labels out of range in steps 1 to 4: they must be 0..2 for 3 outputs" in message
    assert not seen
    # What it trained on are the same rows with a loss of 0.
    kept = np.where(np.isin(np.arange(32), [17, 30]), 0, 1).astype(np.float32)

    def masked(logits, targets):
        return (targets < 3) * optax.softmax_cross_entropy_with_integer_labels(logits, targets % 3)

    other = make_loop(
        batches(X, np.where(kept == 1, Y, Y + 3)), strategy(), loss=masked, metrics=()
    )
    next(other)
    np.testing.assert_allclose(kernel(loop), kernel(other), rtol=1e-6, atol=1e-7)


def test_it_goes_on_with_other_data():
    loop = make_loop(batches(X, spoilt(20, -1)), n=1)
    assert [next(loop).step, next(loop).step] == [1, 2]
    for _ in range(2):  # No checkpoint passes it by.
        with pytest.raises(ValueError, match=r"Found 1 label out of range in step 3: .*0..2"):
            next(loop)
    loop.data = batches(X, Y)
    assert next(loop).step == 4


@pytest.mark.slow
def test_rows_of_weight_zero_may_hold_any_label():
    weights = np.ones(32, np.float32)
    weights[[3, 19, 20]] = 0
    found = [
        make_loop(batches(X, y, weights), one_device()).next_checkpoint().metrics["loss"]
        for y in (Y, spoilt([3, 19, 20], -7))
    ]
    assert found[0] == found[1]


def test_padding_is_not_counted():
    x, y = np.concatenate([X, X[:3]]), np.concatenate([spoilt([], 0), spoilt(0, -1)[:3]])
    loop = make_loop(batches(x, y), n=5, n_steps=5)
    with pytest.raises(ValueError, match="Found 1 label out of range in steps 1 to 5"):
        next(loop)


@pytest.mark.parametrize(
    ("loss", "labels", "message"),
    [
        slow("binary_crossentropy", (0.0, 2.0), "must be 0..1 for loss 'binary_crossentropy'"),
        thorough("onehot_crossentropy", (0.0, -1.0), "must be 0..1 for loss 'onehot_crossentropy'"),
        ("hinge", (1.0, 0.0), "must be -1 or 1 for loss 'hinge'"),
    ],
)
def test_labels_of_other_losses_are_counted(loss, labels, message):
    y = np.full((32, 3), labels[0], np.float32)
    y[17, 1] = labels[1]
    with pytest.raises(ValueError, match=f"Found 1 label out of range.*{message}"):
        next(make_loop(batches(X, y), loss=loss, metrics=()))


def test_soft_labels_may_be_rounded():
    y = np.full((2, 3), 1 + 1e-6, np.float32)
    assert not out_of_range(ff.losses.onehot_crossentropy, y, y).any()


@pytest.mark.slow
def test_a_model_refuses_them_and_goes_on():
    model = ff.Model(MODULE, optax.sgd(0.1), "crossentropy", ["accuracy"], strategy=one_device())
    wrong = list(batches(X, spoilt(20, 3)))
    with pytest.raises(ValueError, match="Found 1 label out of range in steps 1 to 4"):
        model.fit(wrong, verbose=0)
    model.fit(list(batches(X, Y)), verbose=0)
    assert model.step == 8
    message = "Found 1 label out of range in the data that was measured: they must be 0..2"
    task = ff.EvalTask(MODULE.apply, [], wrong, loss="crossentropy")
    virtual = ff.EvalLoop(task, strategy=ff.DataParallel(virtual_replicas=4))
    for measure in (
        lambda: model.evaluate(wrong),
        lambda: model.fit(X, Y, validation_data=wrong, verbose=0),
        lambda: virtual.measure(model.state),
    ):
        with pytest.raises(ValueError, match=message):
            measure()


class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, x):
        kind, is_large = (nn.Dense(n, kernel_init=waves)(x) for n in (3, 1))
        return {"kind": kind, "is_large": is_large[:, 0]}


@pytest.mark.slow
def test_outputs_are_counted_each_with_its_weights():
    module, large = TwoHeads(), (Y > 1).astype(np.float32)
    large[[14, 15]] = 5  # Of the last device.
    by_output = np.ones(32, np.float32)
    by_output[15] = 0
    y, weights = {"kind": Y, "is_large": large}, {"is_large": by_output}
    data = (jax.tree.map(lambda a, i=i: a[i : i + 8], (X, y, weights)) for i in range(0, 32, 8))
    loss = {"kind": "crossentropy", "is_large": "binary_crossentropy"}
    task = ff.TrainTask(module.apply, optax.sgd(0.1), loss, data)
    loop = ff.TrainLoop(init_of(module, 4), task, 0, None, 4, 4, first_checkpoint=4, stdout=False)
    with pytest.raises(ValueError, match=r"Found 1 label .* 0..1 .* \(output 'is_large'\)"):
        next(loop)


@pytest.mark.slow
def test_tasks_that_take_turns_are_named():
    sgd = optax.sgd(0.1)
    good, wrong = (
        ff.TrainTask(MODULE.apply, sgd, "crossentropy", batches(X, y)) for y in (Y, spoilt(9, 4))
    )
    task = ff.MultiTask({"good": good, "wrong": wrong})
    loop = ff.TrainLoop(init_of(MODULE, 4), task, 0, X[:1], 8, 8, first_checkpoint=8, stdout=False)
    with pytest.raises(
        ValueError, match="Found 1 label of task 'wrong' out of range in steps 1 to"
    ):
        next(loop)


@pytest.mark.slow
def test_labels_by_token_are_left_out_by_token():
    logits, labels = rng.normal(size=(2, 3, 4)), np.array([[0, -1, 3], [4, 2, 1]])

    def loss(x):
        values = in_range(ff.losses.crossentropy, x, labels)
        return values.sum(), values

    (_, values), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits)
    np.testing.assert_array_equal(values == 0, [[False, True, False], [True, False, False]])
    np.testing.assert_array_equal((gradient == 0).all(-1), values == 0)
    assert np.isfinite(gradient).all()


@pytest.mark.slow
def test_a_step_of_ones_own_reports_them():
    task = ff.TrainTask(MODULE.apply, optax.sgd(0.1), "crossentropy")
    state = make_loop(batches(X, Y), one_device()).state
    _, sums = jax.jit(ff.make_train_step(task))(state, ff.Batch((X,), (spoilt([1, 2], 3),)))
    with pytest.raises(ValueError, match="Found 2 labels out of range: they must be 0..2"):
        compute(sums, task.metrics)
