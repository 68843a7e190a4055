"""Tasks and loops of modules, where functions were."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from marks import slow, thorough

import flaxfit as ff
from flaxfit.callbacks import Norms
from flaxfit.checkpoints import CheckpointFileReader
from flaxfit.export import InputSpec, from_state
from flaxfit.modules import from_nnx
from flaxfit.optim import MultiOptimizer, OptimizerDef

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.lora = nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=rngs), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.lora(x)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(nn.Dense(3)(x)))


def make_task(module, optimizer=None, **options):
    return ff.TrainTask(module, optimizer or optax.sgd(0.1), "mse", (X, Y), **options)


def make_loop(init, task, **options):
    options = {"devices": jax.devices()[:1], "n_steps": 2, "stdout": False, **options}
    return ff.TrainLoop(init, task, 0, **options)


def last(loop):
    *_, checkpoint = loop
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda: Net(nnx.Rngs(0)), thorough(lambda: Net), slow(Linen)],
    ids=["instance", "class", "linen"],
)
def test_a_loop_of_a_module_equals_that_of_its_functions(make):
    module = make()
    if isinstance(module, nn.Module):
        both = ff.modules.train_and_eval(module)[0]
    else:
        both = from_nnx(module, train=True)
    expected = last(make_loop(both.init, make_task(both.apply)))
    checkpoint = last(make_loop(module, make_task(module)))
    assert checkpoint.metrics == expected.metrics
    jax.tree.map(np.testing.assert_array_equal, checkpoint.state.params, expected.state.params)


@pytest.mark.slow
def test_a_checkpoint_gives_the_module_of_its_step_in_evaluation_mode():
    net = Net(nnx.Rngs(0))
    modules = [each.module() for each in make_loop(net, make_task(net, ema=0.5))]
    assert all(isinstance(each, Net) for each in modules)
    first, second = (np.asarray(each.out.kernel[...]) for each in modules)
    assert (first != second).any()  # It is a copy, which further steps do not use up.

    checkpoint = last(make_loop(net, make_task(net)))
    measured = ff.EvalLoop(ff.EvalTask(net, ["mse"], (X, Y))).measure(checkpoint.state)
    error = np.mean((np.asarray(checkpoint.module()(X)) - Y) ** 2)
    assert measured["mse"] == pytest.approx(float(error), rel=1e-5)
    bound = last(make_loop(Linen(), make_task(Linen()))).module()
    assert bound(X, train=False).shape == (32, 1)


@pytest.mark.slow
def test_a_checkpoint_without_a_loop_has_no_module():
    with pytest.raises(ValueError, match="does not come from a loop"):
        ff.Checkpoint(step=0, state=None, metrics={}).module()
    functions = from_nnx(Net, train=True)

    def apply(*args, **named):
        return functions.apply(*args, **named)

    with pytest.raises(ValueError, match="made of functions"):
        last(make_loop(functions.init, make_task(apply))).module()


@pytest.mark.slow
def test_readers_states_and_exports_take_modules(tmp_path):
    net = Net(nnx.Rngs(0))
    loop = make_loop(CheckpointFileReader(tmp_path, net), make_task(net))
    assert last(loop).step == 2
    state = ff.init_state(net, optax.sgd(0.1), 0, X)
    np.testing.assert_array_equal(state.params["out"]["kernel"], net.out.kernel[...])
    module = from_state(state, net, InputSpec(("batch", 4)))
    (method,) = module.jax_methods.values()
    net.eval()
    np.testing.assert_allclose(method(X), net(X), atol=1e-6)


def test_what_initializes_nothing_is_refused():
    with pytest.raises(TypeError, match="init_state needs a module or a function .*, got int: 3"):
        ff.init_state(3, optax.sgd(0.1), 0, X)


@pytest.mark.slow
def test_groups_and_norms_are_chosen_by_type():
    rate = OptimizerDef(optax.sgd, learning_rate=0.1)
    optimizer = MultiOptimizer((nnx.LoRAParam, rate), (nnx.PathContains("out"), rate))
    task = make_task(Net(nnx.Rngs(0)), optimizer, norms=nnx.LoRAParam)
    loop = make_loop(
        task.apply and Net(nnx.Rngs(0)), task, callbacks=[Norms(nnx.PathContains("out"))]
    )
    before = jax.tree.map(np.asarray, loop.state.params)
    checkpoint = last(loop)
    assert "grad_norm/LoRAParam" in checkpoint.metrics
    assert any(name.startswith("param_norm/PathContains") for name in checkpoint.metrics)
    base = checkpoint.state.params["lora"]["base_module"]["kernel"]
    np.testing.assert_array_equal(base, before["lora"]["base_module"]["kernel"])
    assert (np.asarray(checkpoint.state.params["out"]["kernel"]) != before["out"]["kernel"]).any()
    assert set(loop.hyperparams) >= {"LoRAParam"}


class Other(nnx.Module):
    """Holds types of variables where `Net` holds others."""

    def __init__(self, rngs):
        self.lora = nnx.Linear(4, 2, rngs=rngs)
        self.out = nnx.LoRA(2, 2, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.lora(x))


@pytest.mark.slow
def test_filters_of_a_task_whose_module_is_replaced_select_in_the_new_one():
    rate = OptimizerDef(optax.sgd, learning_rate=0.1)
    optimizer = MultiOptimizer((nnx.LoRAParam, rate))
    options = {"freeze": nnx.Not(nnx.LoRAParam), "norms": nnx.LoRAParam, "clip_norm": 1.0}
    task = make_task(Net(nnx.Rngs(0)), optimizer, **options)
    other = Other(nnx.Rngs(0))
    replaced = dataclasses.replace(task, apply=other)
    assert dataclasses.replace(task, rngs=()).freeze[0] is task.freeze[0]

    checkpoint = last(make_loop(other, replaced))
    expected = last(make_loop(other, make_task(other, optimizer, **options)))
    assert checkpoint.metrics == expected.metrics
    jax.tree.map(np.testing.assert_array_equal, checkpoint.state.params, expected.state.params)

    plain = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="freeze: .*LoRAParam.* selects no parameter"):
        dataclasses.replace(make_task(other, freeze=nnx.LoRAParam), apply=plain)
    with pytest.raises(TypeError, match="freeze: .*LoRAParam.* and the model is not an NNX module"):
        dataclasses.replace(task, apply=nn.Dense(1))


def test_a_filter_within_another_transformation_is_refused():
    optimizer = optax.chain(MultiOptimizer((nnx.LoRAParam, optax.sgd(0.1))))
    with pytest.raises(TypeError, match="LoRAParam.*only a task with an NNX module can resolve"):
        net = Net(nnx.Rngs(0))
        last(make_loop(net, make_task(net, optimizer)))


@pytest.mark.slow
def test_frozen_types_can_be_changed_between_steps():
    net = Net(nnx.Rngs(0))
    loop = make_loop(net, make_task(net), n_steps=None)
    loop.next_step()
    loop.freeze = nnx.LoRAParam
    before = np.asarray(loop.state.params["lora"]["lora_a"])
    loop.next_step()
    np.testing.assert_array_equal(loop.state.params["lora"]["lora_a"], before)


def test_an_nnx_optimizer_is_taken_by_its_transformation(capsys):
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
    ff.task._options._say_tx.cache_clear()
    task = make_task(net, optimizer)
    assert last(make_loop(net, task)).step == 2
    assert make_task(net, optimizer).optimizer is optimizer.tx
    assert capsys.readouterr().err.count("its transformation, optimizer.tx") == 1
    with pytest.raises(ValueError, match="trains wrt=.*LoRAParam.*freeze=nnx.Not"):
        make_task(net, nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.LoRAParam))


def test_streams_that_a_module_does_not_have_are_named():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5, rng_collection="noise", rngs=rngs)

        def __call__(self, x):
            return self.dropout(x)

    net = Noisy(nnx.Rngs(params=0, noise=1))
    assert make_task(net, rngs="noise").rngs == ("noise",)
    for make in (
        lambda: make_task(net, rngs="nose"),
        lambda: ff.EvalTask(net, ["mse"], rngs="nose"),
    ):
        with pytest.raises(
            ValueError, match="rngs contains nose, but the module has the streams noise"
        ):
            make()
    make_task(Noisy(nnx.Rngs(0)), rngs="any")  # Its only stream takes every key.


def test_norms_of_one_name_are_refused():
    filters = [lambda path, value: "out" in path, lambda path, value: "lora" in path]
    with pytest.raises(ValueError, match="norms has several filters of one name, <lambda>"):
        make_task(Net(nnx.Rngs(0)), norms=filters)
