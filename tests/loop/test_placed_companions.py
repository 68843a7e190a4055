"""Companions in their places: arguments of compiled programs, placed once, saved by choice."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from internals import companions_of, n_programs_of, programs_of
from loops import given
from marks import thorough

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter

WIDTH = 64
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, WIDTH)).astype(np.float32)
MODULE = nn.Dense(WIDTH, use_bias=False)
DEVICES = jax.devices()[:4]
ONE = {"devices": DEVICES[:1]}


def variables(factor=1.0, shape=(WIDTH, WIDTH)):
    return {"params": {"kernel": np.full(shape, factor, np.float32)}}


def imitate(apply, batch, rngs, teacher):
    (x,) = batch.inputs
    return ((apply(x) - teacher(x)) ** 2).mean(-1)


def task_of(factor=1.0, x=X, **options):
    options.setdefault("companions", {"teacher": (MODULE, variables(factor))})
    data = ff.ArrayStream(x, (), batch_size=8)
    return ff.TrainTask(MODULE, optax.sgd(0.0), objective=imitate, data=data, **options)


def loop_of(task, init=None, **options):
    init = init or given(lambda rngs, *x: variables(0.0))
    return ff.TrainLoop(init, task, 0, stdout=False, **(options or ONE))


def model_of(teacher):
    """A model of zeros."""
    init = given(lambda rngs, *x: variables(0.0))
    options = {"companions": {"teacher": teacher}, "save_companions": True}
    strategy = ff.DataParallel(DEVICES[:1])
    model = init, MODULE.apply
    return ff.Model(model, optax.sgd(0.0), objective=imitate, strategy=strategy, **options)


def loss_of(factor, x=X[:8]):
    """The loss of a model of zeros."""
    return pytest.approx(float(((x @ variables(factor)["params"]["kernel"]) ** 2).mean()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one", thorough("fsdp")])
def test_other_values_take_effect_without_a_compilation(strategy):
    strategies = {"one": ONE, "fsdp": {"strategy": ff.Sharded.fsdp(devices=DEVICES)}}
    loop = loop_of(task_of(1.0, save_companions=True), **strategies[strategy])
    first = loop.next_step()
    assert first.loss == loss_of(1.0)
    programs = dict(programs_of(loop))
    other = {"teacher": variables(2.0)}
    loop.restore(first.replace(companions=other))
    assert loop.next_step().loss == loss_of(2.0, X[8:])
    assert programs_of(loop) == programs


def test_what_is_written_into_a_module_takes_effect_at_the_next_checkpoint():
    target = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
    task = task_of(companions={"teacher": target})
    target.kernel.set_value(variables(1.0)["params"]["kernel"])
    loop = loop_of(task)
    assert loop.next_step().loss == loss_of(1.0)
    programs = dict(programs_of(loop))
    nnx.update(target, {"kernel": variables(2.0)["params"]["kernel"]})
    assert loop.next_step().loss == loss_of(2.0, X[8:])
    assert programs_of(loop) == programs
    target.kernel.set_value(variables(1.0, (WIDTH, 1))["params"]["kernel"])
    with pytest.raises(ValueError, match="kernel: .* in the task, .* in the module now"):
        loop.next_step()


def test_a_module_is_read_again_only_where_it_was_written_to(tmp_path):
    teachers = [nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(seed)) for seed in (1, 2)]
    first, second = map(model_of, teachers)
    first.fit(X, (), verbose=0)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.evaluate(X, ()) == first.evaluate(X, ())
    second.fit(X, (), verbose=0)
    assert second.evaluate(X, ()) == first.evaluate(X, ())
    teachers[1].kernel.set_value(variables(2.0)["params"]["kernel"])
    assert second.evaluate(X, ())["loss"] == loss_of(2.0, X)


def test_they_are_placed_once_and_outlive_what_their_owner_writes():
    own = variables(1.0)
    loop = loop_of(task_of(companions={"teacher": (MODULE, own)}))
    own["params"]["kernel"][:] = 5
    assert loop.next_step().loss == loss_of(1.0)
    placed = companions_of(loop).arguments[0][1]
    loop.next_step()
    assert companions_of(loop).arguments[0][1] is placed
    kernel = jax.device_put(variables(1.0), DEVICES[0])["params"]["kernel"]
    teacher = (MODULE, {"params": {"kernel": kernel}})
    placed = companions_of(loop_of(task_of(companions={"teacher": teacher}))).arguments[0][1]
    assert placed.unsafe_buffer_pointer() == kernel.unsafe_buffer_pointer()  # No copy.


def test_fsdp_divides_them_like_parameters():
    strategy = ff.Sharded.fsdp(devices=DEVICES)
    loop = loop_of(task_of(), strategy=strategy)
    kernel = companions_of(loop).arguments[0][1]
    own = loop.state_in_place.params["kernel"]
    assert kernel.sharding.is_equivalent_to(own.sharding, own.ndim)
    assert {shard.data.size for shard in kernel.addressable_shards} == {WIDTH * WIDTH // 4}


def test_a_rule_that_does_not_fit_names_the_companion():
    rules = [("kernel", jax.sharding.PartitionSpec("data"))]
    strategy = ff.Sharded(rules=rules, devices=DEVICES)
    odd = {"params": {"kernel": np.ones((WIDTH + 1, WIDTH), np.float32)}}
    with pytest.raises(ValueError, match="Cannot place the companion 'teacher'"):
        task = task_of(companions={"teacher": (MODULE, odd)})
        _ = companions_of(loop_of(task, strategy=strategy)).arguments


@pytest.mark.slow
def test_the_rest_of_the_data_is_computed_on_fewer_devices():
    task = task_of(x=X[:10], pad=False)
    data = ff.ArrayStream(X[:10], (), batch_size=8, epochs=1)
    loop = loop_of(dataclasses.replace(task, data=data), devices=DEVICES)
    first, last = loop
    assert (first.loss, last.loss) == (loss_of(1.0), loss_of(1.0, X[8:10]))
    task = ff.EvalTask(
        MODULE, (), [(X[:8],), (X[8:10],)], objective=imitate, companions=task.companions, pad=False
    )
    found = ff.EvalLoop(task, strategy=loop.strategy).measure(last.state)
    assert found["loss"] == loss_of(1.0, X[:10])


@pytest.mark.slow
def test_they_are_not_saved_unless_asked_for(tmp_path):
    with loop_of(task_of(1.0), callbacks=[CheckpointFileWriter(tmp_path)], **ONE) as loop:
        assert loop.next_step().companions is None
    reader = CheckpointFileReader(tmp_path, loop.state)
    assert reader.read().companions == {}
    resumed = loop_of(task_of(2.0, save_companions=True), reader)
    assert resumed.next_step().loss == loss_of(2.0, X[8:])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The reader of a run that has saved its companions at step 1."""
    folder = tmp_path_factory.mktemp("saved")
    task = task_of(1.0, save_companions=True)
    with loop_of(task, callbacks=[CheckpointFileWriter(folder)], **ONE) as loop:
        loop.next_step()
    return CheckpointFileReader(folder, loop.state)


def test_a_loop_resumes_with_those_of_its_file(saved):
    kernel = saved.read().companions["teacher"]["params"]["kernel"]
    np.testing.assert_array_equal(kernel, variables(1.0)["params"]["kernel"])
    loop = loop_of(task_of(2.0, save_companions=True), saved)
    for checkpoint in loop.snapshot(), loop.next_step():
        held = checkpoint.companions or {}
        np.testing.assert_array_equal(held["teacher"]["params"]["kernel"], kernel)
    assert checkpoint.loss == loss_of(1.0, X[8:])


@pytest.mark.parametrize(
    ("name", "wrong", "path"),
    [
        ("teacher", variables(1.0, (WIDTH, 3)), "params/kernel: float32.64, 3. in the task"),
        ("teacher", jax.tree.map(np.float16, variables()), "params/kernel: float16.64, 64."),
        (
            "teacher",
            {**variables(), "batch_stats": {"mean": np.ones(3)}},
            "batch_stats/mean: float",
        ),
        ("judge", variables(), "params/kernel: float32.64, 64. in the task, - in the checkpoint"),
    ],
)
def test_a_file_of_other_companions_is_refused_with_the_path(saved, name, wrong, path):
    def takes_any(apply, batch, rngs, **companions):
        return apply(*batch.inputs)[:, 0]

    task = ff.TrainTask(
        MODULE, optax.sgd(0.0), objective=takes_any, companions={name: (MODULE, wrong)}, data=X
    )
    with pytest.raises(ValueError, match=f"companion '{name}', {path}"):
        loop_of(task, saved)


def test_a_task_without_companions_resumes_from_a_file_that_holds_some(saved):
    task = ff.TrainTask(MODULE, optax.sgd(0.0), "mse", ff.ArrayStream(X, X, batch_size=8))
    assert loop_of(task, saved).step == 1


@pytest.mark.slow
def test_a_model_loads_those_that_it_has_saved(tmp_path):
    model, other = model_of((MODULE, variables(1.0))), model_of((MODULE, variables(2.0)))
    model.fit(X, (), verbose=0, checkpoint_dir=tmp_path / "fit")
    expected = model.evaluate(X, ())
    model.save(tmp_path / "saved")
    other.load(tmp_path / "fit")
    other.save(tmp_path / "again")
    assert other.evaluate(X, ()) == expected
    model.save_weights(weights := tmp_path / "weights.safetensors")
    other.load_weights(weights)
    assert other.fit(X, (), verbose=0)["loss"] == [pytest.approx(expected["loss"])]
    for folder in "saved", "again":
        other = model_of((MODULE, variables(2.0)))
        other.fit(X, (), verbose=0)
        other.load(tmp_path / folder)
        assert other.evaluate(X, ()) == expected


@pytest.mark.slow
def test_a_model_measures_with_those_that_it_trains_with(tmp_path):
    module = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))

    options = {"verbose": 0, "checkpoint_dir": tmp_path, "validation_data": (X, ())}
    model = model_of(module)
    before = model.fit(X, (), **options)["val_loss"]
    assert model.evaluate(X, ())["loss"] == before[0]
    resumed = model_of((MODULE, variables(2.0)))
    history = resumed.fit(X, (), epochs=2, **options)
    assert resumed.evaluate(X, ())["loss"] == history["val_loss"][1] == before[0]
    assert n_programs_of(resumed)[:2] == (1, 1)


@pytest.mark.slow
def test_the_cost_of_a_step_counts_the_call_of_a_companion():
    alone = ff.TrainTask(MODULE, optax.sgd(0.0), "mse", ff.ArrayStream(X, X, batch_size=8))
    more = loop_of(task_of()).step_flops() - loop_of(alone).step_flops()
    assert more == pytest.approx(2 * 8 * WIDTH**2, rel=0.05)


def test_an_eval_loop_shares_those_of_the_loop_that_it_is_a_callback_of(saved):
    own = {"teacher": (MODULE, variables(2.0))}
    task = task_of(companions=own)
    measured = ff.EvalTask(MODULE, (), (X, ()), objective=imitate, companions=own)
    loop = loop_of(task, saved, callbacks=[ff.EvalLoop(measured)], **ONE)
    assert loop.next_step().metrics["val_loss"] == loss_of(1.0, X)
