"""What a TrainLoop starts from: a model, a state or a checkpoint file."""

import shutil

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from loops import (
    OPTIMIZER,
    Normalized,
    Regressor,
    X,
    assert_equal,
    given,
    make_loop,
    make_task,
    make_weight_loop,
    waves,
)
from marks import slow, thorough

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter
from flaxfit.loop._placed_state import PlacedState


@pytest.mark.slow
@pytest.mark.parametrize("key", [thorough(jax.random.key(3)), jax.random.PRNGKey(3), slow(3)])
def test_a_key_is_typed_or_raw_or_a_seed(key):
    expected = make_loop(rnkey=jax.random.key(3)).next_step()
    assert make_loop(rnkey=key).next_step().loss == expected.loss


@pytest.mark.parametrize(
    ("marked", "debug"),
    [
        (given, False),
        (lambda init: init, False),
        slow(given, True),
        thorough(lambda init: init, True),
    ],
)
def test_arrays_that_an_init_returns_stay_valid(marked, debug):
    weight = jnp.ones(1)
    init = marked(lambda rngs, x: {"params": weight})
    options = {"devices": jax.devices()[:1], "stdout": False, "debug": debug}
    loop = ff.TrainLoop(init, make_weight_loop().task, 0, **options)
    loop.next_step()
    assert weight == 1 and loop.state.params != 1


def test_a_state_that_nobody_else_holds_is_taken_over_without_a_copy():
    held, params = PlacedState(ff.DataParallel(jax.devices()[:1])), {"a": jnp.ones(2)}
    held.place(ff.TrainState.create(OPTIMIZER, {"params": params}, key=0), may_donate=True)
    assert held.value.params["a"].unsafe_buffer_pointer() == params["a"].unsafe_buffer_pointer()


def test_an_input_sample_stands_in_for_the_first_batch():
    def batches():
        yield pytest.fail("the data was read")

    loop = make_loop(data=batches(), input_sample=X[:2])
    assert loop.step == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rnkey": None}, ValueError, "needs a random key"),
        ({"strategy": ff.DataParallel()}, ValueError, "either devices or a strategy"),
        (
            {"task": make_task(rngs=("noise",)), "collections": ["dropout"]},
            ValueError,
            "either collections or",
        ),
        (
            {"task": make_task(mutable=False), "mutable_collections": ["a"]},
            ValueError,
            "either mutable_coll",
        ),
        (
            {"devices": None, "strategy": "ddp"},
            TypeError,
            r"such as flaxfit.DataParallel\(\) .*, got 'ddp'",
        ),
        ({"devices": None, "strategy": ff.Sharded}, TypeError, "got <class .*Sharded'>"),
        ({"task": optax.sgd(0.1)}, TypeError, "needs a task, .*, got GradientTransformation"),
    ],
)
def test_arguments_that_are_missing_wrong_or_exclude_each_other_are_refused(
    options, error, message
):
    with pytest.raises(error, match=message):
        make_loop(**options)


def test_the_ancestors_arguments_become_fields_of_the_task():
    loop = make_loop(
        collections={"init": ["params"], "apply": ["noise"]}, mutable_collections=False
    )
    assert loop.task.rngs == ("noise",) and loop.task.mutable is False


def test_a_module_stands_for_its_init():
    module = nn.Dense(1, kernel_init=waves)
    task = ff.TrainTask(module, OPTIMIZER, "mse", (X, X[:, :1]))
    loops = [ff.TrainLoop(init, task, 0, stdout=False) for init in (module, module.init)]
    assert_equal(*(loop.state.params for loop in loops))


def test_a_reader_is_asked_for_a_checkpoint_and_a_fresh_start_said(capsys):
    class Reader:
        target = staticmethod(Regressor().init)

        def __init__(self, found=None):
            self.found = found

        def read(self, template):
            self.template = template
            return self.found

    reader = Reader()
    loop = ff.TrainLoop(reader, make_task(), 0)
    assert "starting fresh" in capsys.readouterr().err
    assert jax.tree.map(jnp.shape, reader.template.params) == jax.tree.map(
        jnp.shape, loop.state.params
    )
    with pytest.raises(ValueError, match="needs a random key"):
        ff.TrainLoop(reader, make_task())


@pytest.mark.slow
def test_a_run_is_resumed_from_its_checkpoint_files(tmp_path, capsys):
    def make(**options):
        module = Normalized(dropout=0.3)
        reader = CheckpointFileReader(tmp_path / "run", module.init)
        with ff.TrainLoop(
            reader, make_task(module), 0, n_steps_per_checkpoint=4, **options
        ) as loop:
            return list(loop)

    writer = CheckpointFileWriter(tmp_path / "run")
    make(n_steps=6, callbacks=[writer])
    assert "starting fresh" in capsys.readouterr().err
    *_, resumed = make(n_steps=12)
    assert "restored step 6" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    *_, whole = make(n_steps=12)
    assert (resumed.step, resumed.n_completed_steps) == (12, whole.n_completed_steps)
    assert_equal(resumed.state, whole.state)
