"""A function on the gradient of each example, against a loop by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
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


def apply(variables, x, **options):
    y = x @ variables["params"]["w"] + variables["params"]["b"]
    return (y, {}) if "mutable" in options else y


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


def assert_same(found, expected):
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)


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
    task = task_of(data=data, accumulate=accumulate)
    loop = ff.TrainLoop(
        lambda key, x: {"params": PARAMS},
        task,
        0,
        n_steps_per_checkpoint=3,
        strategy=STRATEGIES[strategy](),
        stdout=False,
    )
    *_, checkpoint = loop
    assert_same(checkpoint.state.params, by_hand())


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["b", thorough(())])
def test_a_hook_that_changes_nothing_leaves_the_step_as_it_is(freeze):
    batch = ff.Batch((X,), (Y,), TOKENS)

    def stepped(hook):
        task = task_of(hook=hook, freeze=freeze, metrics=["mae"], ema=0.9)
        state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
        state, sums = jax.jit(make_train_step(task))(state, batch)
        return state.variables, state.opt_state, sums

    assert_same(stepped(lambda grads: grads), stepped(None))


def test_the_gradients_of_a_hook_that_rounds_are_added_in_their_own_dtype():
    task = task_of(hook=lambda grads: jax.tree.map(lambda g: g.astype(jnp.float16), grads))
    state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
    step = jax.jit(make_train_step(task, keep_grads=True))
    _, (_, grads) = step(state, ff.Batch((X,), (Y,)))
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

    batch = ff.Batch((X,), (Y,), TOKENS)
    found = []
    for options in ({"loss": "mse"}, {"loss": None, "objective": objective}):
        task = task_of(**options)
        state = ff.TrainState.create(task.optimizer, {"params": PARAMS})
        state, sums = jax.jit(make_train_step(task))(state, batch)
        found.append((state.params, sums["loss"]))
    assert_same(*found)


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
        ({"apply": Counting()}, "updates counts/n in training"),
        slow({"apply": WithStatistics()}, "updates batch_stats/.*/mean, batch_stats/.*/var in"),
        (
            {"hook": lambda grads: {"w": grads["w"]}},
            "example_grads_hook must return gradients with",
        ),
    ],
)
def test_what_has_no_gradient_by_example_is_refused(options, words):
    task = task_of(**options, data=[(X[:BATCH], Y[:BATCH])])
    module = options.get("apply")
    init = (lambda key, x: {"params": PARAMS}) if module is None else module.init
    loop = ff.TrainLoop(init, task, 0, n_steps=1, n_steps_per_checkpoint=1, stdout=False)
    with pytest.raises(ValueError, match=words):
        next(iter(loop))
