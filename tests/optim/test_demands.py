"""Every optimizer of optax trains, or is refused with what it needs."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit.data._batch import Batch
from flaxfit.optim import MultiOptimizer, OptimizerDef
from flaxfit.step._scan import make_step
from flaxfit.step._train_step import make_train_step

# What is refused, and what it is said to need.
REFUSED = {
    "contrib.differentially_private_aggregate": "a gradient per example",
    "contrib.dpsgd": "a gradient per example",
    "contrib.hutchinson_estimator_diag_hessian": "obj_fn",
    "contrib.momo": "value",
    "contrib.momo_adam": "value",
    "contrib.reduce_on_plateau": "value",
    "contrib.sophia": "obj_fn",
    "differentially_private_aggregate": "a gradient per example",
    "dpsgd": "a gradient per example",
    "lbfgs": "value, grad, value_fn",
    "lookahead": "parameters as optax.LookaheadParams",
    "polyak_sgd": "value",
    "scale_by_backtracking_linesearch": "value, grad, value_fn",
    "scale_by_polyak": "value",
    "scale_by_zoom_linesearch": "value, grad, value_fn",
}
# They give no updates of the shape of the parameters, or are no optimizers by themselves.
OTHERS = {"contrib.scale_by_muon", "inject_stateful_hyperparams", "measure_with_ema"}
OTHERS |= {"stateless", "stateless_with_tree_map"}
ARGUMENTS = {
    "learning_rate": 0.01,
    "step_size": 0.1,
    "max_delta": 1.0,
    "max_norm": 1.0,
    "threshold": 1.0,
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.1,
    "gamma": 0.5,
    "key": 0,
    "seed": None,
    "k": 2,
    "max_consecutive_errors": 3,
    "inner": optax.sgd(0.1),
    "fast_optimizer": optax.sgd(0.1),
    "base_optimizer": optax.sgd(0.1),
    "optimizer": optax.sgd(0.1),
    "adv_optimizer": optax.sgd(0.1),
    "tx": optax.sgd(0.1),
    "mask": False,
    "freeze_mask": False,
    "should_transform_fn": lambda step: True,
    "transforms": {"a": optax.sgd(0.1)},
    "param_labels": "a",
    "sync_period": 2,
    "slow_step_size": 0.5,
    "step_size_fn": lambda step: 0.1,
    "weight_decay": 0.01,
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "measure_name": "norm",
    "measure": optax.tree.norm,
    "max_backtracking_steps": 3,
    "max_linesearch_steps": 3,
}


def factories():
    found = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name in dir(module):
            factory = getattr(module, name)
            if (
                inspect.isfunction(factory)
                and not name.startswith("_")
                and prefix + name not in OTHERS
            ):
                returned = str(inspect.signature(factory).return_annotation)
                if "GradientTransformation" in returned:
                    found[prefix + name] = factory
    return found


FACTORIES = factories()


def made(name):
    """What a factory makes of an argument for each parameter that needs one."""
    factory = FACTORIES[name]
    if name in ("chain", "named_chain"):
        return factory(*([("a", optax.sgd(0.1))] if name == "named_chain" else [optax.sgd(0.1)]))
    if name.startswith("inject"):
        return factory(optax.sgd)(learning_rate=0.1)
    needed = {
        p.name: ARGUMENTS[p.name]
        for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of what optax will do otherwise some day.
        return factory(**needed)


PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
BATCH = Batch((np.ones((4, 3), np.float32),), (np.zeros((4, 2), np.float32),))


def apply(variables, x, **_):
    return x @ variables["params"]["w"] + variables["params"]["b"], {}


def task_of(optimizer):
    return ff.TrainTask(apply, optimizer, "mse")


@pytest.mark.parametrize("name", FACTORIES)
def test_an_optimizer_trains_or_is_refused(name):
    optimizer = made(name)
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"TrainTask cannot train.* needs {REFUSED[name]}"):
            task_of(optimizer)
        return
    task = task_of(optimizer)
    state = jax.eval_shape(lambda: ff.TrainState.create(task.optimizer, {"params": PARAMS}))
    new, _ = jax.eval_shape(make_train_step(task, axis_name=None), state, BATCH)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)


def test_all_that_is_refused_is_known():
    assert {name for name in REFUSED if name in FACTORIES} >= {"lbfgs", "polyak_sgd", "lookahead"}


WRAPPED = {
    "chain": lambda: optax.chain(optax.clip(1.0), optax.chain(optax.polyak_sgd())),
    "named chain": lambda: optax.named_chain(("a", optax.polyak_sgd())),
    "definition": lambda: OptimizerDef(optax.polyak_sgd, max_learning_rate=0.5),
    "groups": lambda: MultiOptimizer((".*", OptimizerDef(optax.polyak_sgd, scaling=0.5))),
    "partition": lambda: optax.partition({"a": optax.polyak_sgd()}, "a"),
    "masked": lambda: optax.masked(optax.polyak_sgd(), True),
    "steps": lambda: optax.MultiSteps(optax.polyak_sgd(), 2),
    "if finite": lambda: optax.apply_if_finite(optax.polyak_sgd(), 3),
    "flatten": lambda: optax.flatten(optax.polyak_sgd()),
    "schedule-free": lambda: optax.contrib.schedule_free(optax.polyak_sgd(), 0.1),
    "sam": lambda: optax.contrib.sam(optax.polyak_sgd(), optax.sgd(0.1)),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_it_is_refused_within_others(wrapped):
    with pytest.raises(ValueError, match="scale_by_polyak needs value"):
        task_of(WRAPPED[wrapped]())
    with pytest.raises(ValueError, match="scale_by_polyak needs value"):
        ff.Model((apply, apply), WRAPPED[wrapped](), "mse", clip_norm=1.0)


def test_an_opaque_sam_is_refused():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)
    with pytest.raises(ValueError, match="sam needs grad_fn"):
        task_of(sam)


def test_what_cannot_be_seen_is_explained_by_the_step():
    task = task_of(optax.inject_hyperparams(optax.polyak_sgd)(max_learning_rate=0.5))
    state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
    with pytest.raises(TypeError) as error:
        jax.eval_shape(make_train_step(task, axis_name=None), state, BATCH)
    assert "hands on nothing else" in "".join(error.value.__notes__)


def test_a_step_of_ones_own_may_hand_on_more():
    optimizer = optax.polyak_sgd()

    def step(state, batch):
        def loss(params):
            return jnp.mean((apply({"params": params}, *batch.inputs)[0] - batch.targets[0]) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradient(optimizer, grads, value=value), {"loss": value}

    task = ff.TrainTask(optimizer=optimizer, step=step)
    state = ff.TrainState.create(optimizer, {"params": PARAMS})
    jax.eval_shape(make_step(task), state, BATCH)
