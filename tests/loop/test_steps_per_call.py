"""`steps_per_call="auto"`: how many steps a dispatch takes, and that results do not change."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from internals import loop_of_model
from loops import init_of
from marks import thorough

import flaxfit as ff
from flaxfit.loop._steps_per_call import automatic_number

random = np.random.default_rng(0)
X = random.normal(size=(24, 3)).astype(np.float32)
Y = X @ np.ones((3, 1), np.float32)
MODULE = nn.Dense(1)
OPTIMIZER = optax.adam(0.01)


def make_loop(data=None, module=MODULE, init=None, **options):
    data = ff.ArrayStream(X, Y, batch_size=8, shuffle=True) if data is None else data
    task = ff.TrainTask(module.apply, OPTIMIZER, "mse", data, ["mae"])
    options = {"n_steps_per_checkpoint": 12, "first_checkpoint": 12, "stdout": False, **options}
    options = {"steps_per_call": "auto", "devices": jax.devices()[:1], **options}
    return ff.TrainLoop(init or init_of(module, 3), task, 0, **options)


def dispatches(loop):
    """The steps of each dispatch of a loop that runs to its end."""
    steps = [loop.step]
    loop.dispatch_watchers.append(steps.append)
    list(loop)
    return np.diff(steps).tolist()


@pytest.mark.parametrize(
    ("work", "spacing", "n_total", "platform", "expected"),
    [
        (1e6, 28, 1000, "cpu", 28),
        (1e6, 60, 1000, "cpu", 30),
        (1e6, 1, 1000, "cpu", 1),
        (1e6, 31 * 37, 49_999, "cpu", 31),
        (1e6, 37, 49_999, "cpu", 1),
        (1e6, 37, 50_000, "cpu", 32),
        (1e6, 37, 0, "cpu", 1),
        (1e8, 40, 1000, "cpu", 20),
        (1e8, 40, 1000, "gpu", 20),
        (1.1e9, 40, 1000, "cpu", 1),
        (1.1e9, 40, 1000, "tpu", 20),
        (math.inf, 40, 50_000, "gpu", 1),
        (0, 40, 1000, "cpu", 20),
    ],
)
def test_small_steps_go_together_in_numbers_that_divide_the_spacing(
    work, spacing, n_total, platform, expected
):
    assert automatic_number(work, spacing, n_total, platform) == expected


@pytest.mark.slow
def test_a_loop_takes_what_divides_its_spacing_and_compiles_once(capsys):
    loop = make_loop(n_steps=36, stdout=True)
    assert dispatches(loop) == [12, 12, 12] and loop.steps_per_call == 12
    assert capsys.readouterr().err.count("compiled") == 1


@pytest.mark.slow
def test_steps_that_are_left_over_are_taken_one_by_one():
    assert dispatches(make_loop(n_steps=15)) == [12, 1, 1, 1]
    assert dispatches(make_loop(n_steps=14, first_checkpoint=2)) == [1, 1, 12]


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
def test_the_results_are_those_of_single_steps(n_devices):
    options = {"n_steps": 36, "devices": jax.devices()[:n_devices]}
    one = list(make_loop(steps_per_call=1, **options))
    several = list(make_loop(**options))
    assert [c.data_state for c in several] == [c.data_state for c in one]
    for a, b in zip(one, several, strict=True):
        # Some versions of XLA round the last bits in a loop otherwise than without it.
        assert a.metrics == pytest.approx(b.metrics, rel=1e-6)
        near = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-7)
        jax.tree.map(near, a.state.params, b.state.params)


@pytest.mark.slow
def test_batches_that_are_not_rows_of_arrays_are_stepped_one_by_one():
    assert dispatches(make_loop([(X[:8], Y[:8])] * 20)) == [1] * 20
    stream = ff.ArrayStream(X, Y, batch_size=8, resident=False)
    assert dispatches(make_loop(stream, n_steps=12)) == [1] * 12


def test_a_watcher_that_comes_between_two_checkpoints_sees_each_step():
    loop = make_loop(n_steps=96, n_steps_per_checkpoint=48, first_checkpoint=48)
    seen = []

    def add(step):
        if step == 24:
            loop.watchers.append(seen.append)

    loop.dispatch_watchers.append(add)
    assert [checkpoint.step for checkpoint in loop] == [48, 96]
    assert seen == [*range(25, 97)]


@pytest.mark.slow
def test_models_with_loops_of_unknown_length_take_one_step_per_dispatch():
    class Halving(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(jax.lax.while_loop(lambda x: x.max() > 1, lambda x: x / 2, x))

    assert dispatches(make_loop(module=Halving(), n_steps=12)) == [1] * 12


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's loops on a CPU")
def test_models_with_convolutions_take_one_step_per_dispatch_on_a_cpu():
    module = nn.Sequential([nn.Conv(2, (3, 3)), lambda x: x.mean((1, 2))])
    images, targets = np.ones((24, 4, 4, 1), np.float32), np.zeros((24, 2), np.float32)
    loop = make_loop(ff.ArrayStream(images, targets, batch_size=8), module, module.init, n_steps=24)
    assert dispatches(loop) == [1] * 24 and loop.steps_per_call == 1


@pytest.mark.slow
def test_fit_takes_several_steps_and_compiles_once(capsys):
    model = ff.Model(MODULE, OPTIMIZER, "mse")
    model.fit(X, Y, batch_size=2, epochs=3, verbose=2)
    assert capsys.readouterr().err.count("compiled the training step") == 1
    assert loop_of_model(model).steps_per_call == 12
    model.fit(X, Y, batch_size=2, verbose=0, steps_per_execution=1)
    assert loop_of_model(model).steps_per_call == 1


@pytest.mark.slow
def test_no_second_program_is_compiled_for_the_few_steps_that_are_left(capsys):
    x, y = np.tile(X, (4, 1))[:74], np.tile(Y, (4, 1))[:74]
    model = ff.Model(MODULE, OPTIMIZER, "mse")
    model.build(x)
    model.state = model.state.replace(step=np.int32(60_000))
    model.fit(x, y, batch_size=2, verbose=2)  # 37 steps.
    assert model.state.step == 60_037
    assert capsys.readouterr().err.count("compiled the") == 1
    options = {"n_steps_per_checkpoint": 37, "first_checkpoint": 37, "stdout": True}
    list(make_loop(ff.ArrayStream(x, y, batch_size=2, epochs=1), **options))
    assert capsys.readouterr().err.count("compiled the") == 1
