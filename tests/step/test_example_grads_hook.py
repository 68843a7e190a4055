"""A function on the gradient of each example, against a loop by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from loops import assert_close
from marks import slow, thorough
from strategies import strategies

import flaxfit as ff
from flaxfit import make_train_step

N = min(len(jax.devices()), 4)
BATCH = 8
rng = np.random.default_rng(0)
X = rng.normal(size=(2 * BATCH + 3, 5, 3)).astype(np.float32)  # The last batch is padded.
Y = rng.normal(size=(len(X), 5, 2)).astype(np.float32)
TOKENS = rng.uniform(0.5, 2, size=(len(X), 5)).astype(np.float32) * (rng.random((len(X), 5)) > 0.4)
TOKENS[3] = 0  # An example without weight.
PARAMS = {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
STRATEGIES = strategies(N)


def apply(variables, x, **_):
    return x @ variables["params"]["w"] + variables["params"]["b"]


def clip(grads):
    """Shortens a gradient to the norm 1, by a division that is NaN for a gradient of zero."""
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g / norm * jnp.minimum(norm, 1), grads)


def task_of(apply=apply, optimizer=None, loss="mse", hook=clip, **options):
    optimizer = optax.sgd(0.5) if optimizer is None else optimizer
    return ff.TrainTask(apply, optimizer, loss, example_grads_hook=hook, **options)


def by_hand():
    """The parameters after an epoch, where token weights weigh tokens and then examples."""

    @jax.jit
    def step(params, x, y, w):
        def of_example(x, y, w):
            def loss(params):
                return jnp.sum(w * jnp.mean((apply({"params": params}, x) - y) ** 2, -1)) / w.sum()

            return clip(jax.grad(loss)(params))

        some = jnp.where(w.sum(-1, keepdims=True) > 0, w, 1)
        grads = jax.vmap(of_example)(x, y, some)
        mean = jax.tree.map(lambda g: jnp.tensordot(w.sum(-1), g, 1) / w.sum(), grads)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, mean)

    params = PARAMS
    for start in range(0, len(X), BATCH):
        params = step(params, *(a[start : start + BATCH] for a in (X, Y, TOKENS)))
    return params


def stepped(keep_grads=False, weights=TOKENS, **options):
    """The state and the sums after one step on all examples."""
    task = task_of(**options)
    state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
    step = make_train_step(task, keep_grads=keep_grads)
    return jax.jit(step)(state, ff.Batch((X,), (Y,), weights))


def init(key, x):
    return {"params": PARAMS}


assert_same = functools.partial(assert_close, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        thorough("one device", 2),
        ("data-parallel", 1),
        thorough("FSDP", 1),
        slow("FSDP", 2),
        thorough("virtual replicas", 1),
    ],
)
def test_each_gradient_is_clipped_and_weighed_by_its_tokens(strategy, accumulate):
    data = ff.ArrayStream(X, Y, TOKENS, batch_size=BATCH, epochs=1)
    options = {"n_steps_per_checkpoint": 3, "strategy": STRATEGIES[strategy](), "stdout": False}
    *_, last = ff.TrainLoop(init, task_of(data=data, accumulate=accumulate), 0, **options)
    assert_same(dict(last.state.params), by_hand())


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["b", thorough(())])
def test_a_hook_that_changes_nothing_leaves_the_step_as_it_is(freeze):
    options = {"freeze": freeze, "metrics": ["mae"], "ema": 0.9}
    found = stepped(hook=lambda grads: grads, **options), stepped(hook=None, **options)
    assert_same(*((state.variables, state.opt_state, sums) for state, sums in found))


def test_the_gradients_of_a_hook_that_rounds_are_added_in_their_own_dtype():
    def hook(grads):
        return jax.tree.map(lambda g: g.astype(jnp.float16), grads)

    _, (_, grads) = stepped(keep_grads=True, weights=None, hook=hook)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.slow
def test_dropout_of_each_example_is_its_own():
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    seen = []

    def kept(grads):
        jax.debug.callback(lambda g: seen.append(np.asarray(g)), jax.tree.leaves(grads)[0])
        return grads

    x = np.ones((BATCH, 3), np.float32)
    task = task_of(model, hook=kept, data=[(x, np.ones((BATCH, 2), np.float32))])
    ff.TrainLoop(model, task, 0, devices=jax.devices()[:1], stdout=False).next_step()
    jax.effects_barrier()
    assert len(seen) == BATCH
    # The examples are equal, and their gradients differ by what each has dropped: 2 of 4 numbers.
    assert len(np.unique(np.stack(seen), axis=0)) > 2


@pytest.mark.slow
def test_an_objective_has_a_gradient_of_each_example():
    def objective(apply, batch, rngs):
        return ff.losses.mse(apply(*batch.inputs), *batch.targets), {"bias": apply(*batch.inputs)}

    found = stepped(), stepped(loss=None, objective=objective)
    assert_same(*((state.params, sums["loss"]) for state, sums in found))


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        count = self.variable("counts", "n", lambda: jnp.int32(0))
        if train:
            count.value += jnp.sum(x > 0)
        return nn.Dense(2)(x)


class WithStatistics(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(2)(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hook": 1.0}, "must be grads -> grads"),
        ({"pad": False}, "pad=False computes batches as a whole"),
        ({"across": "batch"}, "across='batch' computes batches as a whole"),
        ({"precision": "float16"}, "use precision='bfloat16'"),
        ({"step": lambda state, batch: (state, {})}, "the task has a custom step"),
    ],
)
def test_an_option_that_does_not_go_with_it_is_refused(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        task_of(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": lambda y, t: jnp.mean((y - t) ** 2)}, "the loss is one number"),
        ({"loss": lambda y, t: (jnp.mean((y - t) ** 2, (1, 2)), y.sum())}, "has a penalty"),
        slow({"apply": Counting()}, "updates counts/n in training"),
        slow({"apply": WithStatistics()}, "updates batch_stats/.*/mean, batch_stats/.*/var in"),
        (
            {"hook": lambda grads: {"w": grads["w"]}},
            "example_grads_hook must return gradients with",
        ),
    ],
)
def test_what_has_no_gradient_by_example_is_refused(options, words):
    task = task_of(**options, data=[(X[:BATCH], Y[:BATCH])])
    start = options["apply"].init if "apply" in options else init
    with pytest.raises(ValueError, match=words):
        ff.TrainLoop(start, task, 0, stdout=False).next_step()
