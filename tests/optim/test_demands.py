"""Every optimizer of optax trains as in a loop by hand, or is refused with what it needs."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow, thorough, usual

import flaxfit as ff
from flaxfit import make_train_step
from flaxfit.data._batch import Batch
from flaxfit.optim import MultiOptimizer, OptimizerDef
from flaxfit.step._scan import make_step

# What is refused, and what it is said to need.
REFUSED = {
    "contrib.differentially_private_aggregate": "a gradient per example",
    "contrib.dpsgd": "a gradient per example",
    "differentially_private_aggregate": "a gradient per example",
    "dpsgd": "a gradient per example",
    "lookahead": "parameters as optax.LookaheadParams",
}
# What others are passed, in a loop by hand too.
PASSED = {
    "contrib.hutchinson_estimator_diag_hessian": ["obj_fn"],
    "contrib.momo": ["value"],
    "contrib.momo_adam": ["value"],
    "contrib.reduce_on_plateau": ["value"],
    "contrib.sophia": ["obj_fn"],
    "lbfgs": ["value", "grad", "value_fn"],
    "polyak_sgd": ["value"],
    "scale_by_backtracking_linesearch": ["value", "grad", "value_fn"],
    "scale_by_polyak": ["value"],
    "scale_by_zoom_linesearch": ["value", "grad", "value_fn"],
}
# They give no updates of the shape of the parameters, or are no optimizers by themselves.
OTHERS = {"contrib.scale_by_muon", "inject_stateful_hyperparams", "measure_with_ema"}
OTHERS |= {"stateless", "stateless_with_tree_map"}
OPTIMIZERS = ["inner", "fast_optimizer", "base_optimizer", "optimizer", "adv_optimizer", "tx"]
ARGUMENTS = {
    **dict.fromkeys(OPTIMIZERS, optax.sgd(0.1)),
    **dict.fromkeys(["learning_rate", "weight_decay"], 0.01),
    **dict.fromkeys(["step_size", "clipping", "eta", "noise_multiplier"], 0.1),
    **dict.fromkeys(["gamma", "slow_step_size"], 0.5),
    **dict.fromkeys(["max_delta", "max_norm", "threshold", "l2_norm_clip"], 1.0),
    **dict.fromkeys(["k", "sync_period"], 2),
    **dict.fromkeys(
        ["max_consecutive_errors", "max_backtracking_steps", "max_linesearch_steps"], 3
    ),
    **dict.fromkeys(["mask", "freeze_mask"], False),
    "decay": 0.9,
    "key": 0,
    "seed": None,
    "should_transform_fn": lambda step: True,
    "transforms": {"a": optax.sgd(0.1)},
    "param_labels": "a",
    "step_size_fn": lambda step: 0.1,
    "measure_name": "norm",
    "measure": optax.tree.norm,
}


def factories():
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, factory in inspect.getmembers(module, inspect.isfunction):
            returned = str(inspect.signature(factory).return_annotation)
            is_public = not name.startswith("_") and prefix + name not in OTHERS
            if is_public and "GradientTransformation" in returned:
                yield prefix + name, factory


FACTORIES = dict(factories())


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


rng = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.ones(2)}
BATCH = Batch(
    (rng.normal(size=(4, 3)).astype(np.float32),), (rng.normal(size=(4, 2)).astype(np.float32),)
)


def apply(variables, x, **_):
    return jnp.tanh(x @ variables["params"]["w"]) + variables["params"]["b"], {}


def loss(params):
    return jnp.mean((apply({"params": params}, *BATCH.inputs)[0] - BATCH.targets[0]) ** 2)


def trained_by_hand(optimizer, names=(), n_steps=2, compiled=lambda step: step):
    """The parameters after steps with the arguments of these names."""

    @compiled
    def step(params, state):
        value, grad = jax.value_and_grad(loss)(params)
        known = {"value": value, "grad": grad, "value_fn": loss, "obj_fn": loss}
        known["grad_fn"] = lambda params, i: jax.grad(loss)(params)
        extra = {name: known[name] for name in names}
        updates, state = optimizer.update(grad, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(n_steps):
        params, state = step(params, state)
    return params


def trained(task, n_steps=2, compiled=lambda step: step):
    """The parameters after as many steps of a task."""
    step = compiled(make_train_step(task))
    state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
    for _ in range(n_steps):
        state, _ = step(state, BATCH)
    return state.params


def assert_same(found, expected):
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)


def task_of(optimizer):
    return ff.TrainTask(apply, optimizer, "mse")


@pytest.mark.slow
def test_no_other_optimizer_is_refused():
    for name in {*FACTORIES} - {*REFUSED}:
        task = task_of(made(name))
        state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
        jax.eval_shape(make_train_step(task), state, BATCH)


# The usual ones, and those that have an argument or a form of parameters or state of their own.
TYPICAL = (*REFUSED, *PASSED, "adamw", "chain", "contrib.muon", "inject_hyperparams", "partition")


COSTLY = ("contrib.muon", "contrib.sophia", "lbfgs", "scale_by_zoom_linesearch")


@pytest.mark.parametrize(
    "name", [slow(case) if case in COSTLY else case for case in usual(*TYPICAL, of=FACTORIES)]
)
def test_an_optimizer_trains_or_is_refused(name):
    optimizer = made(name)
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"TrainTask cannot train.* needs {REFUSED[name]}"):
            trained(task_of(optimizer))
        return
    compiled = {"compiled": jax.jit} if name in COSTLY else {}
    found = trained(task_of(optimizer), **compiled)
    assert_same(found, trained_by_hand(optimizer, PASSED.get(name, ()), **compiled))


def test_all_that_is_refused_or_passed_more_is_known():
    assert {*REFUSED, *PASSED} & {*FACTORIES} >= {"lbfgs", "polyak_sgd", "lookahead"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_definition_of_an_optimizer_that_no_step_can_call_is_refused():
    options = {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0}
    dpsgd = OptimizerDef(optax.contrib.dpsgd, static=options, learning_rate=0.1, **options)
    with pytest.raises(ValueError, match="cannot train.* needs a gradient per example"):
        trained(task_of(dpsgd))


polyak = optax.polyak_sgd
WRAPPED = {
    "chain": lambda: optax.chain(optax.clip(1.0), optax.chain(polyak())),
    "named chain": lambda: optax.named_chain(("a", polyak())),
    "definition": lambda: OptimizerDef(polyak, max_learning_rate=0.5),
    "injected": lambda: optax.inject_hyperparams(polyak)(max_learning_rate=0.5),
    "scheduled": lambda: optax.inject_hyperparams(polyak)(max_learning_rate=lambda step: 0.5),
    "partition": lambda: optax.partition({"a": polyak()}, "a"),
    "masked": lambda: optax.masked(polyak(), True),
    "steps": lambda: optax.MultiSteps(polyak(), 2),
    "steps in pairs": lambda: optax.MultiSteps(polyak(), 2).gradient_transformation(),
    "if finite": lambda: optax.apply_if_finite(polyak(), 3),
    "flatten": lambda: optax.flatten(polyak()),
    "schedule-free": lambda: optax.contrib.schedule_free(polyak(), 0.1),
}
QUICK = ("chain", "definition", "injected", "masked", "partition", "schedule-free")
SLOW = ("steps", "if finite", "flatten")


@pytest.mark.parametrize(
    "wrapped",
    [case if case in QUICK else slow(case) if case in SLOW else thorough(case) for case in WRAPPED],
)
def test_wrappers_pass_on_what_is_taken_within(wrapped):
    optimizer = WRAPPED[wrapped]()
    expected = trained_by_hand(optimizer, ["value"])
    assert_same(trained(task_of(optimizer)), expected)
    assert_same(trained(ff.TrainTask(apply, optimizer, "mse", clip_norm=1e9)), expected)


def test_an_opaque_sam_is_passed_the_gradient_as_a_function():
    normalized = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    sam = optax.contrib.sam(optax.sgd(0.1), normalized, opaque_mode=True)
    assert_same(trained(task_of(sam)), trained_by_hand(sam, ["grad_fn"]))
    assert_same(trained(task_of(optax.chain(sam))), trained_by_hand(sam, ["grad_fn"]))


def named(updates, state, params=None, *, value):
    return jax.tree.map(lambda g: -value * g, updates), state


def of_any_name(updates, state, params=None, **extra):
    return named(updates, state, params, value=extra["value"])


@pytest.mark.parametrize("update", [named, of_any_name])
def test_an_optimizer_of_ones_own_is_passed_what_its_signature_takes(update):
    own = optax.GradientTransformation(lambda params: (), update)
    expected = trained_by_hand(own, ["value"])
    assert_same(trained(task_of(own)), expected)
    assert_same(trained(ff.TrainTask(apply, own, "mse", clip_norm=1e9)), expected)


def heated(updates, state, params=None, *, temperature, **extra): ...


HEATED = optax.GradientTransformationExtraArgs(lambda params: (), heated)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(HEATED),
        OptimizerDef(lambda rate: HEATED, rate=0.5),
        MultiOptimizer((".*", HEATED)),
        optax.contrib.sam(HEATED, optax.sgd(0.1)),
    ],
    ids=["chain", "definition", "groups", "sam"],
)
def test_what_no_step_has_is_explained_by_the_step(optimizer):
    with pytest.raises(TypeError, match="temperature") as error:
        trained(task_of(optimizer))
    assert "with mean gradients, and passes" in "".join(error.value.__notes__)


def test_a_hyperparameter_cannot_have_the_name_of_what_a_step_passes():
    with pytest.raises(ValueError, match="No hyperparameter can be called value"):
        OptimizerDef(lambda value: optax.sgd(value), value=0.1)


def test_a_step_of_ones_own_may_pass_more():
    optimizer = optax.polyak_sgd()

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradient(optimizer, grads, value=value), {"loss": value}

    task = ff.TrainTask(optimizer=optimizer, step=step)
    state = ff.TrainState.create(optimizer, {"params": PARAMS})
    jax.eval_shape(make_step(task), state, BATCH)
