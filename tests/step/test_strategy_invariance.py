"""Losses of every kind under every division of a batch: the numbers of one device, or an error."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import diagonal, thorough, usual

import flaxfit as ff

# test_eight_devices.py runs this file once more, on eight devices.
N = min(len(jax.devices()), 8)
BATCH = 16
rng = np.random.default_rng(0)
X = rng.normal(size=(2 * BATCH + 5, 6)).astype(np.float32)
LABELS = rng.integers(0, 4, size=len(X)).astype(np.int32)
# The first batch has no masked example: what is seen there must not decide.
MASK = np.concatenate([np.ones(BATCH), rng.integers(0, 2, size=len(X) - BATCH)]).astype(np.int32)
STEPS = rng.integers(0, 4, size=(len(X), 2)).astype(np.int32)
STEP_MASK = rng.integers(0, 2, size=(len(X), 2)).astype(np.float32)
W = rng.uniform(0.5, 2, size=len(X)).astype(np.float32)
PARAMS = {
    "a": rng.normal(size=(6, 4)).astype(np.float32),
    "b": rng.normal(size=(6, 4)).astype(np.float32),
    "scale": np.float32(0.5),
}


def logits(params, x):
    return x @ params["a"]


def token_logits(params, x):
    return x.reshape(-1, 2, 3) @ params["a"][:3]


def pairs(params, x):
    return x @ params["a"], x @ params["b"], jnp.exp(params["scale"])


def ce(outputs, labels):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)


def contrastive(a, b, scale):
    return ce(scale * a @ b.T, jnp.arange(len(a)))


@dataclasses.dataclass(frozen=True)
class Case:
    loss: object
    targets: tuple = (LABELS,)
    model: object = logits
    weights: object = None
    pad: bool = True
    divides: bool = False
    """Whether it is the mean over the parts of a batch, so that these may be computed in turn."""


CASES = {
    "by name": Case("crossentropy", divides=True),
    "values": Case(lambda o, t: ce(o, t), divides=True),
    "weighted values": Case(lambda o, t: ce(o, t), weights=W, divides=True),
    "masked by weights": Case(ce, weights=MASK.astype(np.float32), divides=True),
    "masked steps": Case(
        lambda o, t, mask: (ce(o, t) * mask).sum(-1) / jnp.maximum(mask.sum(-1), 1),
        targets=(STEPS, STEP_MASK),
        model=token_logits,
        weights=STEP_MASK.sum(-1),
        divides=True,
    ),
    "scalar mean": Case(lambda o, t: ce(o, t).mean()),
    "scalar sum": Case(lambda o, t: ce(o, t).sum()),
    "masked mean": Case(
        lambda o, t, mask: (ce(o, t) * mask).sum() / mask.sum(), targets=(LABELS, MASK)
    ),
    "penalty": Case(lambda o, t: (ce(o, t), 0.1 * jnp.var(o))),
    "weighted, with a penalty": Case(lambda o, t: (ce(o, t), 0.1 * jnp.var(o)), weights=W),
    "scalar, with a penalty": Case(lambda o, t: (ce(o, t).mean(), 0.1 * jnp.var(o))),
    "contrastive scalar": Case(
        lambda *outputs: contrastive(*outputs).mean(), targets=(), model=pairs
    ),
    "contrastive values": Case(contrastive, targets=(), model=pairs, pad=False),
    "weighted contrastive": Case(contrastive, targets=(), model=pairs, pad=False, weights=W),
    "normalised by the batch": Case(
        lambda o, t, mask: ce(o, t) * mask / mask.mean(), targets=(LABELS, MASK), pad=False
    ),
    "several outputs": Case(
        {"one": "crossentropy", "two": lambda o, t: ce(o, t)},
        targets=({"one": LABELS, "two": LABELS},),
        model=lambda params, x: {"one": x @ params["a"], "two": x @ params["b"]},
        divides=True,
    ),
}
STRATEGIES = {
    "one device": lambda: ff.DataParallel(jax.devices()[:1]),
    "data-parallel": lambda: ff.DataParallel(jax.devices()[:N]),
    "FSDP": lambda: ff.Sharded.fsdp(devices=jax.devices()[:N]),
    "virtual replicas": lambda: ff.DataParallel(jax.devices()[:N], virtual_replicas=N),
}


def apply_of(case):
    def apply(variables, x, **options):
        outputs = case.model(variables["params"], x)
        return (outputs, {}) if "mutable" in options else outputs

    return apply


def data_of(case, n):

    def take(tree):
        return jax.tree.map(lambda leaf: leaf[:n], tree)

    return ff.ArrayStream(X[:n], take(case.targets), take(case.weights), batch_size=BATCH, epochs=1)


def run(case, strategy, accumulate=1, n=2 * BATCH):
    """Losses, gradient norms and parameters of an epoch, and the loss measured then."""
    options = {"pad": case.pad, "accumulate": accumulate}
    task = ff.TrainTask(apply_of(case), optax.sgd(0.1), case.loss, data_of(case, n), **options)
    loop = ff.TrainLoop(lambda key, x: {"params": PARAMS}, task, 0, strategy=strategy, stdout=False)
    metrics = [checkpoint.metrics for checkpoint in loop]
    measured = ff.EvalLoop(
        ff.EvalTask(apply_of(case), [], loss=case.loss, pad=case.pad), strategy=strategy
    ).measure(loop.state, data_of(case, n))
    return metrics, loop.state.params, measured


def assert_same(found, expected):
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)


@functools.cache
def reference(name, n):
    return run(CASES[name], STRATEGIES["one device"](), n=n)


@pytest.mark.thorough  # The epochs with an uneven rest begin with such batches.
@pytest.mark.parametrize("strategy", ["data-parallel", "FSDP"])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_has_the_numbers_of_one_device(name, strategy):
    n = 2 * BATCH
    assert_same(run(CASES[name], STRATEGIES[strategy](), n=n), reference(name, n))


def uneven_cases():
    """Each form of a loss on one strategy; those that another form holds are thorough.

    So are those whose rest is computed in parts, too.
    """
    held = {
        "by name": "in turn",
        "masked steps": "in turn",
        "several outputs": "in turn",
        "values": "weighted, with a penalty",
        "weighted values": "weighted, with a penalty",
        "masked by weights": "weighted, with a penalty",
        "scalar mean": "scalar, with a penalty",
        "scalar sum": "scalar, with a penalty",
        "masked mean": "scalar, with a penalty",
        "penalty": "weighted, with a penalty",
        "contrastive values": "weighted contrastive",
        "contrastive scalar": "weighted contrastive and scalar, with a penalty",
    }
    both = ["data-parallel", "FSDP"]
    yield from diagonal([name for name in CASES if name not in held], both)
    yield from (thorough(name, strategy) for name in held for strategy in both)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), list(uneven_cases()))
def test_the_uneven_rest_of_an_epoch_has_the_numbers_of_one_device(name, strategy):
    n = len(X)
    assert_same(run(CASES[name], STRATEGIES[strategy](), n=n), reference(name, n))


@pytest.mark.slow
def test_masked_steps_have_the_mean_over_all_steps():
    _, params, measured = reference("masked steps", len(X))
    values = np.asarray(jax.jit(lambda x: ce(token_logits(params, x), STEPS))(X))
    assert measured["loss"] == pytest.approx((values * STEP_MASK).sum() / STEP_MASK.sum(), rel=1e-6)


# By strategy, into how many parts a batch is divided.
IN_TURN = {"one device": 4, "data-parallel": 4, "FSDP": 4, "virtual replicas": 1}
BY_EXAMPLE = [name for name, case in CASES.items() if case.divides]
IN_TURN_KEPT = [  # test_token_weights.py has others, on every strategy.
    ("masked steps", "one device"),
    ("several outputs", "data-parallel"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        case if case in IN_TURN_KEPT else thorough(*case)
        for case in itertools.product(BY_EXAMPLE, IN_TURN)
    ],
)
def test_parts_in_turn_have_the_numbers_of_the_whole_batch(name, strategy):
    n = len(X)
    found = run(CASES[name], STRATEGIES[strategy](), IN_TURN[strategy], n)
    assert_same(found, reference(name, n))


@pytest.mark.parametrize("strategy", usual("FSDP", of=IN_TURN))
@pytest.mark.parametrize("name", [name for name in CASES if name not in BY_EXAMPLE])
def test_parts_in_turn_are_refused_where_they_do_not_tell_the_loss(name, strategy):
    accumulate = IN_TURN[strategy]
    option = f"accumulate={accumulate}" if accumulate > 1 else f"virtual_replicas={N}"
    with pytest.raises(ValueError, match=f"{option}.*not the loss of the batch"):
        run(CASES[name], STRATEGIES[strategy](), accumulate)


@pytest.mark.parametrize("name", [name for name in CASES if "contrastive" in name])
def test_evaluation_in_virtual_replicas_is_refused_too(name):
    case = CASES[name]
    task = ff.EvalTask(apply_of(case), [], data_of(case, BATCH), loss=case.loss, pad=case.pad)
    evaluate = ff.EvalLoop(task, strategy=STRATEGIES["virtual replicas"]())
    with pytest.raises(ValueError, match="virtual_replicas.*not the loss of the batch"):
        evaluate.measure(ff.InferenceState(np.int32(0), PARAMS, {}))


@pytest.mark.slow
def test_a_loss_that_gathers_over_the_replicas_by_itself_is_left_alone():
    def gathering(a, b, scale):
        every = jax.lax.all_gather(b, "replica", tiled=True)
        labels = jax.lax.axis_index("replica") * len(a) + jnp.arange(len(a))
        return ce(scale * a @ every.T, labels).mean()

    metrics, params, _ = run(CASES["contrastive scalar"], STRATEGIES["one device"]())
    task = ff.TrainTask(
        apply_of(CASES["contrastive scalar"]),
        optax.sgd(0.1),
        gathering,
        data_of(CASES["contrastive scalar"], 2 * BATCH),
    )
    loop = ff.TrainLoop(lambda key, x: {"params": PARAMS}, task, 0, stdout=False)
    assert_same([checkpoint.metrics for checkpoint in loop], metrics)
    assert_same(loop.state.params, params)
