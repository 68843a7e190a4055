"""Companions as an objective calls them, compared with a teacher that it closes over."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from loops import assert_close
from marks import slow, thorough
from strategies import options_of_loops

import flaxfit as ff
from flaxfit.step._companions import functions_of

N, WIDTH = 22, 64
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, WIDTH)).astype(np.float32)
LABELS = RNG.integers(0, 3, N).astype(np.int32)
WEIGHTS = RNG.uniform(0.5, 2, N).astype(np.float32)
DEVICES = jax.devices()[:4]
STRATEGIES = options_of_loops()


class Teacher(nn.Module):
    """Large enough to be sharded, with running statistics and dropout."""

    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=not self.train)(nn.Dense(WIDTH)(x))
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not self.train)(x))


STUDENT = nn.Dense(3)
PARAMS = {"kernel": np.zeros((WIDTH, 3), np.float32), "bias": np.zeros(3, np.float32)}


def drawn(*shape):
    return RNG.normal(size=shape).astype(np.float32) / 8


VARIABLES = {
    "params": {
        "Dense_0": {"kernel": drawn(WIDTH, WIDTH), "bias": drawn(WIDTH)},
        "BatchNorm_0": {"scale": 1 + drawn(WIDTH), "bias": drawn(WIDTH)},
        "Dense_1": {"kernel": drawn(WIDTH, 3), "bias": drawn(3)},
    },
    "batch_stats": {"BatchNorm_0": {"mean": drawn(WIDTH), "var": 1 + drawn(WIDTH)}},
}
TEACHER = Teacher(), VARIABLES


def distilled(apply, batch, rngs, teacher):
    (x,), (labels,) = batch.inputs, batch.targets
    logits, soft = apply(x), jax.nn.softmax(teacher(x))
    values = ff.losses.crossentropy(logits, labels) + ff.losses.kl_divergence(logits, soft)
    return values, {"agreement": logits.argmax(-1) == soft.argmax(-1)}


def closed_over(apply, batch, rngs, precision=None):
    dtype = precision or np.float32
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), VARIABLES["params"])

    def teacher(x):
        variables = {**VARIABLES, "params": params}
        return Teacher(train=False).apply(variables, x.astype(dtype)).astype(np.float32)

    return distilled(apply, batch, rngs, teacher)


OPTIONS = {
    "accumulate": {"accumulate": 2},
    "clip, ema, freeze and norms": {
        "clip_norm": 0.5,
        "ema": 0.9,
        "freeze": "bias",
        "norms": ".*kernel",
    },
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "skip": {"skip_nonfinite": True, "skip_above": 6.0},
    "several steps": {},
}


def task_of(companion, objective=distilled, optimizer=None, **options):
    options["companions"] = {} if companion is None else {"teacher": companion}
    return ff.TrainTask(STUDENT, optimizer or optax.sgd(0.1), objective=objective, **options)


def trained(companion, objective, strategy, name):
    data = ff.ArrayStream(X, LABELS, WEIGHTS, batch_size=4, epochs=1)
    task = task_of(companion, objective, optax.adam(0.1), data=data, **OPTIONS[name])
    given = {"n_steps_per_checkpoint": 6, "first_checkpoint": 6, "stdout": False}
    given["steps_per_call"] = 2 if name == "several steps" else 1
    loop = ff.TrainLoop(lambda *_: {"params": PARAMS}, task, 0, **given, **STRATEGIES[strategy])
    (checkpoint,) = loop
    return checkpoint


@functools.cache
def reference(strategy, name):
    precision = OPTIONS[name].get("precision")
    return trained(None, functools.partial(closed_over, precision=precision), strategy, name)


SLOW = ("data parallel", "accumulate"), ("fsdp", "several steps")
ALL = [(strategy, name) for strategy in STRATEGIES for name in OPTIONS]


@pytest.mark.parametrize(
    ("strategy", "name"),
    [slow(*each) if each in SLOW else thorough(*each) for each in ALL],
)
def test_one_trains_as_a_teacher_that_is_closed_over(strategy, name):
    found = trained(TEACHER, distilled, strategy, name)
    # In 16 bits the gradients of the model themselves depend on the devices.
    expected = reference(strategy if "precision" in OPTIONS[name] else "one", name)
    both = (dict(each.state.params) for each in (found, expected))
    assert_close(*both, rtol=1e-6, atol=1e-6)
    assert found.metrics == pytest.approx(dict(expected.metrics), rel=1e-5)


def function_of(companion, **options):
    return functions_of(task_of(companion, **options))["teacher"]


@pytest.mark.slow
def test_it_is_called_in_evaluation_mode():
    found = jax.jit(function_of((Teacher(train=True), VARIABLES)))(X)
    expected = jax.jit(Teacher(train=False).apply)(VARIABLES, X)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_function_and_a_module_of_nnx_are_companions_too():
    module = nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(0))
    kernel = np.asarray(module.kernel[...])
    by_module = function_of(module)(X)
    by_function = function_of((lambda v, x: x @ v["params"], {"params": kernel}))(X)
    np.testing.assert_allclose(by_module, X @ kernel, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_function, X @ kernel, rtol=1e-5, atol=1e-5)


def test_it_computes_in_the_precision_of_the_task_and_returns_float32():
    def dtypes(variables, x):
        seen.append((variables["params"].dtype, variables["table"].dtype, x.dtype))
        return x @ variables["params"]

    seen, variables = [], {"params": np.ones((WIDTH, 3), np.float32), "table": np.ones(3)}
    outputs = function_of((dtypes, variables), precision="bfloat16")(X)
    assert seen == [(jnp.bfloat16, np.float64, jnp.bfloat16)]
    assert outputs.dtype == np.float32


def test_gradients_pass_through_its_inputs():
    teacher = function_of((lambda v, x: x @ v["params"], {"params": np.ones((WIDTH, 3))}))
    slope = jax.grad(lambda x: teacher(x).sum())(X)
    np.testing.assert_array_equal(slope, np.full_like(X, 3))


def first_step(objective, companion, **options):
    task = task_of(companion, objective, data=ff.ArrayStream(X, LABELS, batch_size=8), **options)
    state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
    return ff.TrainLoop(state, task, stdout=False, devices=DEVICES[:1]).next_step()


@pytest.mark.slow
def test_it_stands_beside_the_average_of_the_model():
    def objective(apply, batch, rngs, teacher, ema):
        (x,) = batch.inputs
        values = ((apply(x) - ema(x) - teacher(x)) ** 2).mean(-1)
        return values, {"average": ema(x).mean(-1)}

    found = first_step(objective, TEACHER, ema=0.9)
    expected = np.square(Teacher(train=False).apply(VARIABLES, X[:8])).mean()
    assert (found.loss, found.metrics["average"]) == (pytest.approx(expected, rel=1e-5), 0)


def test_variables_that_do_not_fit_the_model_are_refused_by_name():
    narrow = {"params": {"kernel": np.ones((5, 3), np.float32), "bias": np.zeros(3, np.float32)}}
    for variables in narrow, {"params": {}}:
        words = "companion 'teacher' cannot be called with its variables"
        with pytest.raises(ValueError, match=words):
            first_step(distilled, (STUDENT, variables))
    with pytest.raises(ValueError, match=r"KeyError\('kernels'\)"):
        first_step(distilled, (lambda v, x: x @ v["kernels"], {"params": PARAMS}))


@pytest.mark.slow
def test_wide_variables_are_narrowed_without_a_warning():
    wide = Teacher(), jax.tree.map(np.float64, VARIABLES)
    assert first_step(distilled, wide).loss == first_step(distilled, TEACHER).loss


def test_an_objective_that_compares_the_outputs_of_a_companion_is_refused():
    def centred(apply, batch, rngs, teacher):
        (x,) = batch.inputs
        return (apply(x) - teacher(x).mean(0)).mean(-1)

    with pytest.raises(ValueError, match="depends on the other examples of the batch"):
        first_step(centred, TEACHER)


def test_one_that_never_calls_the_model_is_refused():
    with pytest.raises(ValueError, match="did not call the model"):
        first_step(lambda apply, batch, rngs, teacher: teacher(*batch.inputs).mean(-1), TEACHER)
