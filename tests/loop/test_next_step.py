"""A step on a batch that the user gives: exact, counted, and none of the data's."""

import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import init_of
from marks import quick

import flaxfit as ff

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype("f4")
Y = RNG.normal(size=(24, 1)).astype("f4")
MODULE = nn.Dense(1)
FORMS = {
    "arrays on the devices": lambda: (X, Y),
    "arrays on the host": lambda: ff.ArrayStream(X, Y, batch_size=8, resident=False),
    "a list": lambda: [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 24, 8)] * 2,
}


def make_loop(data=None, **options):
    task = ff.TrainTask(MODULE.apply, optax.adam(0.1), "mse", data, ["mae"])
    return ff.TrainLoop(init_of(MODULE, 3), task, 0, stdout=False, **options)


def weights(loop):
    return np.asarray(loop.state.params["kernel"])


@pytest.mark.slow
def test_it_is_the_step_that_a_stream_of_these_batches_would_take():
    batches = [(X[:8], Y[:8]), (X[8:13], Y[8:13]), (X[:7], Y[:7], np.arange(7, dtype="f4"))]
    alone = make_loop(input_sample=X[:1])
    given = [alone.next_step(batch) for batch in batches]
    streamed = list(make_loop(batches))
    for one, other in zip(given, streamed, strict=True):
        assert one.step == other.step
        assert one.metrics == pytest.approx(other.metrics, rel=1e-5)
    np.testing.assert_allclose(
        weights(alone), np.asarray(streamed[-1].state.params["kernel"]), rtol=1e-5
    )


@pytest.mark.parametrize("form", quick("arrays on the host", of=FORMS))
def test_the_data_stays_where_it_is(form):
    given = (X[:5], Y[:5])
    loop = make_loop(FORMS[form](), n_steps=5)
    expected = make_loop(
        [given, *((X[i : i + 8], Y[i : i + 8]) for i in (0, 8)), given, (X[16:], Y[16:])]
    )
    if form == "arrays on the devices":  # Whose batches have 32 examples: all there are.
        loop.data = ff.ArrayStream(X, Y, batch_size=8)
    steps = [loop.next_step(given), loop.next_step(), loop.next_step(), loop.next_step(given)]
    steps.append(loop.next_step())
    assert [step.metrics["mae"] for step in steps] == pytest.approx(
        [step.metrics["mae"] for step in expected], rel=1e-5
    )


@pytest.mark.slow
def test_a_checkpoint_of_a_given_step_knows_the_position_in_the_data():
    loop = make_loop(ff.ArrayStream(X, Y, batch_size=8, shuffle=True))
    loop.next_step()
    checkpoint = loop.next_step((X[:4], Y[:4]))
    other = make_loop(ff.ArrayStream(X, Y, batch_size=8, shuffle=True))
    other.restore(checkpoint)
    again = other.next_step((X[4:8], Y[4:8])).replace(state=None)
    assert again.data_state == checkpoint.data_state
    loop.next_step((X[4:8], Y[4:8]))
    assert other.next_step().loss == loop.next_step().loss


def test_it_goes_on_after_the_data_has_ended_and_past_the_last_step():
    loop = make_loop([(X, Y)])
    assert [checkpoint.step for checkpoint in loop] == [1]
    with pytest.raises(ff.EndOfData):
        loop.next_step()
    assert loop.next_step((X, Y)).step == 2
    with pytest.raises(ff.EndOfData):
        loop.next_step()


@pytest.mark.slow
def test_a_batch_that_cannot_be_padded_runs_on_the_devices_that_divide_it():
    def loss(outputs, targets):
        return ((outputs - targets) ** 2).mean()

    task = ff.TrainTask(MODULE.apply, optax.sgd(0.1), loss)
    loop = ff.TrainLoop(MODULE.init, task, 0, X[:1], stdout=False)
    for n in 8, 3:
        kernel, bias = (np.asarray(loop.state.params[name]) for name in ("kernel", "bias"))
        expected = np.mean((X[:n] @ kernel + bias - Y[:n]) ** 2)
        assert loop.next_step((X[:n], Y[:n])).loss == pytest.approx(expected, rel=1e-5)


def test_weights_of_each_batch_are_checked():
    loop = make_loop(input_sample=X[:1])
    loop.next_step((X[:8], Y[:8], np.ones(8)))
    with pytest.raises(ValueError, match="This batch holds weights, which .* -1.0 in row 2"):
        loop.next_step((X[:8], Y[:8], np.array([1, 1, -1, 1, 1, 1, 1, 1])))
    assert loop.step == 1


def test_a_loop_without_data_says_how_to_give_it():
    with pytest.raises(ValueError, match=r"no data: give TrainTask\(data=...\), or train on"):
        make_loop()
    with pytest.raises(ValueError, match="no data"):
        list(make_loop(input_sample=X))
