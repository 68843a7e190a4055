"""Losses that compare the examples of a batch: the same however it is divided."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow, thorough

import flaxfit as ff

# test_eight_devices.py runs this file once more, on eight devices.
DEVICES = jax.devices()
# Two batches, and a rest of half of one.
BATCH = 4 * len(DEVICES)
N = 2 * BATCH + BATCH // 2
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(N, 6)).astype(np.float32)
TEXTS = (IMAGES + 0.5 * RNG.normal(size=(N, 6))).astype(np.float32)
WEIGHTS = RNG.uniform(0.5, 2, N).astype(np.float32)


class Towers(nn.Module):
    """Embeddings of images and texts, and a learned scale, as in CLIP."""

    sows: bool = False

    @nn.compact
    def __call__(self, images, texts):
        image, text = nn.Dense(4, name="image")(images), nn.Dense(4, name="text")(texts)
        if self.sows:
            self.sow("losses", "size", 0.01 * jnp.mean(image**2))
        return image, text, self.param("scale", lambda key: jnp.float32(0.3))


def info_nce(image, text, scale):
    """The loss of CLIP: each image against all texts, and each text against all images."""
    image, text = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (image, text))
    logits = jnp.exp(scale) * image @ text.T
    labels = jnp.arange(len(logits))
    find = optax.softmax_cross_entropy_with_integer_labels
    return (find(logits, labels) + find(logits.T, labels)) / 2


def mean_of(image, text, scale):
    return info_nce(image, text, scale).mean()


def penalized(image, text, scale):
    return mean_of(image, text, scale), 0.1 * jnp.mean(image**2)


LOSSES = {"values": info_nce, "scalar": mean_of, "penalized": penalized}
# What the losses of the library are compared with.
BY_HAND = LOSSES | {"library": info_nce}
LOSSES["library"] = ff.losses.info_nce
STRATEGIES = {
    "one": {"devices": DEVICES[:1]},
    "data parallel": {"devices": DEVICES},
    "fsdp": {"strategy": ff.Sharded.fsdp(devices=DEVICES)},
}


@functools.cache
def first_params(module):
    return jax.jit(module.init)(jax.random.key(0), IMAGES[:2], TEXTS[:2])["params"]


def loop_of(name, strategy, accumulate, *, weights=None, sows=False, **options):
    module = Towers(sows=sows)
    data = ff.ArrayStream((IMAGES, TEXTS), (), weights, batch_size=BATCH, epochs=1)
    task = ff.TrainTask(
        module,
        options.pop("optimizer", optax.sgd(0.5)),
        LOSSES[name],
        data,
        across="batch",
        accumulate=accumulate,
        **options,
    )
    params = first_params(module)
    return ff.TrainLoop(
        lambda rngs, *x: {"params": params},
        task,
        0,
        n_steps_per_checkpoint=1,
        stdout=False,
        keep_grads=True,
        **STRATEGIES[strategy],
    )


@functools.cache
def by_hand(name, is_weighted, sows):
    """The losses of the steps, and the parameters after them."""
    module = Towers(sows=sows)
    params, found = first_params(module), []
    weights = WEIGHTS if is_weighted else np.ones_like(WEIGHTS)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params, images, texts, w):
        (outputs, updates) = module.apply({"params": params}, images, texts, mutable=["losses"])
        result = BY_HAND[name](*outputs)
        values, penalty = result if isinstance(result, tuple) else (result, 0.0)
        mean = jnp.sum(w * values) / jnp.sum(w) if values.ndim else values
        penalty += sum(map(jnp.sum, jax.tree.leaves(updates)))
        return mean + penalty, mean

    for start in range(0, N, BATCH):
        rows = slice(start, start + BATCH)
        grads, mean = gradient(params, IMAGES[rows], TEXTS[rows], weights[rows])
        found.append(float(mean))
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    return found, params


KEPT = {  # Values, and a scalar with a penalty; each over other devices and other parts.
    ("values", "fsdp", 4),
    ("penalized", "data parallel", 4),
}


def cases():
    for case in itertools.product(LOSSES, STRATEGIES, (1, 4)):
        yield slow(*case) if case in KEPT else thorough(*case)


@pytest.mark.parametrize(("name", "strategy", "accumulate"), list(cases()))
def test_a_contrastive_loss_is_that_of_the_whole_batch(name, strategy, accumulate):
    check(name, strategy, accumulate)


def check(name, strategy, accumulate, *, is_weighted=False, sows=False):
    weights = WEIGHTS if is_weighted else None
    loop = loop_of(name, strategy, accumulate, weights=weights, sows=sows)
    checkpoints = list(loop)
    losses, params = by_hand(name, is_weighted, sows)
    np.testing.assert_allclose([c.loss for c in checkpoints], losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        dict(checkpoints[-1].state.params),
        params,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("library", "data parallel"),
        *(thorough("library", strategy) for strategy in ("one", "fsdp")),
        *(thorough("values", strategy) for strategy in STRATEGIES),
    ],
)
def test_weights_and_sown_losses_count_as_in_a_whole_batch(name, strategy):
    # A mean of squares over equal parts is that over the batch.
    check(name, strategy, 4, is_weighted=True, sows=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"freeze": "image/.*", "clip_norm": 0.1, "ema": 0.9}, {"precision": "float16"}],
    ids=str,
)
def test_options_of_a_task_give_the_same_in_parts(options):
    def last(accumulate):
        *_, checkpoint = loop_of("values", "one", accumulate, **options)
        return checkpoint.state

    whole, parts = last(1), last(4)
    is_low = "precision" in options
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-2 if is_low else 1e-5, atol=1e-5),
        whole.params,
        parts.params,
    )


@pytest.mark.parametrize("loss", [slow(info_nce), "info_nce"])
def test_without_saying_so_it_is_refused_and_the_way_is_named(loss):
    data = ff.ArrayStream((IMAGES, TEXTS), (), batch_size=BATCH)
    task = ff.TrainTask(Towers(), optax.sgd(0.1), loss, data)
    with pytest.raises(ValueError, match="depends on the other examples .* across='batch'"):
        ff.TrainLoop(Towers(), task, 0, stdout=False).next_step()
    task = ff.TrainTask(Towers(), optax.sgd(0.1), loss, data, pad=False, accumulate=2)
    with pytest.raises(ValueError, match="with accumulate=2: .* set across='batch'"):
        ff.TrainLoop(Towers(), task, 0, stdout=False).next_step()


@pytest.mark.slow
def test_rows_of_weight_0_are_the_same_to_a_loss_that_gathers_by_itself():
    labels = np.arange(BATCH, dtype=np.int32) % 3
    weights = (np.arange(BATCH) >= BATCH // 2 - 1).astype(np.float32)  # Whole devices are idle.

    def nearest(outputs, labels):
        """The distance to the nearest example of another label."""
        everyone, theirs = (jax.lax.all_gather(x, "replica", tiled=True) for x in (outputs, labels))
        distances = ((outputs[:, None] - everyone) ** 2).sum(-1)
        return jnp.where(labels[:, None] == theirs, 9.0, distances).min(-1)

    def first(n_devices):
        data = ff.ArrayStream(IMAGES[:BATCH], labels, weights, batch_size=BATCH)
        task = ff.TrainTask(nn.Dense(4), optax.sgd(0.1), nearest, data, across="batch")
        params = {"kernel": np.eye(6, 4, dtype=np.float32), "bias": np.zeros(4, np.float32)}
        devices = DEVICES[:n_devices]

        def init(rngs, x):
            return {"params": params}

        return ff.TrainLoop(init, task, 0, stdout=False, devices=devices).next_step()

    one, all_devices = first(1), first(len(DEVICES))
    assert all_devices.metrics == pytest.approx(one.metrics, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["replica", "rows"])
def test_replicas_may_have_another_name(given):
    params = first_params(Towers())
    data = ff.ArrayStream((IMAGES, TEXTS), (), batch_size=BATCH)
    loss = ff.losses.info_nce(axis_name=given)
    task = ff.TrainTask(Towers(), optax.sgd(0.1), loss, data, across="batch")
    strategy = ff.DataParallel(DEVICES, axis_name="rows")
    loop = ff.TrainLoop(
        lambda rngs, *x: {"params": params}, task, 0, strategy=strategy, stdout=False
    )
    assert loop.next_step().loss == pytest.approx(by_hand("values", False, False)[0][0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [ff.DataParallel, thorough(ff.Sharded.fsdp)])
def test_the_loss_of_the_library_is_measured_over_the_whole_batch(make):
    data = ff.ArrayStream((IMAGES, TEXTS), (), WEIGHTS, batch_size=BATCH)
    metrics = {"nce": ff.losses.info_nce}
    task = ff.EvalTask(Towers(), metrics, data, loss="info_nce", across="batch")
    params = first_params(Towers())
    state = ff.InferenceState(np.int32(0), params, {})
    found = ff.EvalLoop(task, strategy=make(devices=DEVICES)).measure(state)
    total, losses = 0.0, jax.jit(lambda *x: info_nce(*Towers().apply({"params": params}, *x)))
    for start in range(0, N, BATCH):
        rows = slice(start, start + BATCH)
        values = losses(IMAGES[rows], TEXTS[rows])
        total += float(jnp.sum(WEIGHTS[rows] * values))
    assert found["loss"] == pytest.approx(total / WEIGHTS.sum(), rel=1e-5)
    assert found["nce"] == pytest.approx(found["loss"], rel=1e-6)


def test_virtual_replicas_are_refused():
    strategy = ff.DataParallel(DEVICES[:1], virtual_replicas=2)
    data = ff.ArrayStream((IMAGES, TEXTS), (), batch_size=BATCH)
    task = ff.TrainTask(Towers(), optax.sgd(0.1), info_nce, data, across="batch")
    with pytest.raises(ValueError, match="with virtual_replicas=2: .* there is no such way"):
        ff.TrainLoop(Towers(), task, 0, strategy=strategy, stdout=False).next_step()


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="across must be 'batch' or None, got 'devices'"):
        ff.TrainTask(Towers(), optax.sgd(0.1), info_nce, across="devices")


@pytest.mark.slow
def test_the_activations_of_one_part_are_in_memory():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, images, texts):
            deep = [nn.Dense(4)(nn.Dense(4096)(x)) for x in (images, texts)]
            return *deep, jnp.float32(0)

    rows = np.zeros((512, 6), np.float32)
    data = ff.ArrayStream((rows, rows), (), batch_size=512)

    def needed(accumulate):
        options = {"across": "batch", "accumulate": accumulate}
        task = ff.TrainTask(Wide(), optax.sgd(0.1), info_nce, data, **options)
        return ff.TrainLoop(Wide(), task, 0, stdout=False, devices=DEVICES[:1]).step_memory()

    assert needed(8) < needed(1) / 2


class Views(nn.Module):
    """Embeddings of two views, one after the other in a batch, and prototypes for none of them."""

    n_prototypes: int = 4
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(self.rate, deterministic=False)(nn.Dense(4)(x))
        return x, self.param("prototypes", nn.initializers.normal(), (self.n_prototypes, 4))


def paired(z, prototypes):
    """Each first half against all second halves, as SimCLR's loss."""
    a, b = jnp.split(z, 2)
    logits = a @ b.T + (a @ prototypes.T).sum(-1, keepdims=True)
    values = jax.nn.logsumexp(logits, -1) - jnp.diagonal(logits)
    return jnp.concatenate([values, values]), jnp.ones(len(z))


def first_step(strategy, accumulate, *, across="batch", loss=paired, pad=True, **fields):
    module = Views(**fields)
    init = jax.jit(Views(**{**fields, "rate": 0.0}).init)
    params = init(jax.random.key(0), IMAGES[:4])["params"]
    data = ff.ArrayStream(IMAGES[:BATCH], (), batch_size=BATCH)
    options = {"across": across, "accumulate": accumulate, "pad": pad}
    task = ff.TrainTask(module, optax.sgd(0.5), loss, data, **options)
    return ff.TrainLoop(
        lambda rngs, x: {"params": params},
        task,
        0,
        grad_norm=True,
        stdout=False,
        **STRATEGIES[strategy],
    ).next_step()


@functools.cache
def whole_step(n_prototypes):
    return first_step("one", 1, n_prototypes=n_prototypes)


@pytest.mark.parametrize(
    ("strategy", "accumulate", "n_prototypes"),
    [  # As many prototypes as examples in a part, on a replica, or in both together.
        thorough("one", 4, BATCH // 4),
        slow("fsdp", 1, BATCH // len(DEVICES)),
        slow("data parallel", 4, BATCH // len(DEVICES) // 4),
        thorough("data parallel", 4, BATCH // len(DEVICES)),
        thorough("data parallel", 4, BATCH // 4),
    ],
)
def test_pairs_within_a_batch_are_found_and_prototypes_are_no_examples(
    strategy, accumulate, n_prototypes
):
    whole = whole_step(n_prototypes)
    parts = first_step(strategy, accumulate, n_prototypes=n_prototypes)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        whole.state.params,
        parts.state.params,
    )


@pytest.mark.slow
def test_undeclared_pairs_are_refused():
    with pytest.raises(ValueError, match="depends on the other examples of its batch"):
        first_step("data parallel", 1, across=None)


@pytest.mark.slow
def test_weights_that_depend_on_the_outputs_see_the_dropout_of_the_step():
    def confident(z, prototypes):
        values, _ = paired(z, prototypes)
        return values, jax.lax.stop_gradient(jnp.abs(z).sum(-1))

    def norm(**options):
        return first_step("one", 1, loss=confident, rate=0.5, **options).metrics["grad_norm"]

    assert norm() == pytest.approx(norm(across=None, pad=False), rel=1e-6)


@pytest.mark.slow
def test_evaluation_sees_the_whole_batch_too():
    def measured(n_devices):
        task = ff.EvalTask(Views(), {}, (IMAGES[:BATCH], ()), loss=paired, across="batch")
        params = jax.jit(Views().init)(jax.random.key(0), IMAGES[:4])["params"]
        strategy = ff.DataParallel(DEVICES[:n_devices])
        state = ff.InferenceState(np.int32(0), params, {})
        return ff.EvalLoop(task, strategy=strategy).measure(state)["loss"]

    assert measured(len(DEVICES)) == pytest.approx(measured(1), rel=1e-5)
