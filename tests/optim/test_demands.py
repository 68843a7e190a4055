"""Optimizers get what they need from a step, as in a loop by hand, or are refused in words."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import flaxfit as ff
from flaxfit import make_train_step
from flaxfit.data._batch import Batch
from flaxfit.optim import MultiOptimizer, OptimizerDef
from flaxfit.step._scan import make_step

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


SEARCH = ("value", "grad", "value_fn")
# Optimizers, and what a loop by hand passes to them.
TRAINED = {
    "adamw": (optax.adamw(0.01), ()),
    "muon": (optax.contrib.muon(0.01), ()),
    "injected": (optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), ()),
    "momo": (optax.contrib.momo(0.01), ("value",)),
    "momo_adam": (optax.contrib.momo_adam(0.01), ("value",)),
    "plateau": (optax.contrib.reduce_on_plateau(), ("value",)),
    "hutchinson": (optax.contrib.hutchinson_estimator_diag_hessian(), ("obj_fn",)),
    "sophia": (optax.contrib.sophia(0.01), ("obj_fn",)),
    "lbfgs": (optax.chain(optax.lbfgs()), SEARCH),
    "backtracking": (optax.scale_by_backtracking_linesearch(3), SEARCH),
    "zoom": (optax.scale_by_zoom_linesearch(3), SEARCH),
}
COSTLY = ("muon", "sophia", "lbfgs", "zoom")


@pytest.mark.parametrize("name", [slow(case) if case in COSTLY else case for case in TRAINED])
def test_an_optimizer_trains_as_in_a_loop_by_hand(name):
    optimizer, names = TRAINED[name]
    compiled = {"compiled": jax.jit} if name in COSTLY else {}
    found = trained(task_of(optimizer), **compiled)
    assert_same(found, trained_by_hand(optimizer, names, **compiled))


DPSGD = {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "need"),
    [
        (lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5), "parameters as optax.LookaheadParams"),
        (lambda: optax.contrib.dpsgd(0.1, momentum=0.9, **DPSGD), "a gradient per example"),
        (
            lambda: OptimizerDef(optax.contrib.dpsgd, static=DPSGD, learning_rate=0.1, **DPSGD),
            "a gradient per",
        ),
    ],
    ids=["lookahead", "dpsgd", "definition"],
)
def test_an_optimizer_that_no_step_can_call_is_refused(make, need):
    with pytest.raises(ValueError, match=f"cannot train.* needs {need}"):
        trained(task_of(make()))


polyak = optax.polyak_sgd
WRAPPED = {
    "definition": lambda: OptimizerDef(polyak, max_learning_rate=0.5),
    "partition": lambda: optax.partition({"a": polyak()}, "a"),
    "steps": lambda: optax.MultiSteps(polyak(), 2),
    "steps in pairs": lambda: optax.MultiSteps(polyak(), 2).gradient_transformation(),
    "schedule-free": lambda: optax.chain(optax.contrib.schedule_free(polyak(), 0.1)),
}


@pytest.mark.parametrize("wrapped", [slow(case) if "steps" in case else case for case in WRAPPED])
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
