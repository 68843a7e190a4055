"""Tasks of every kind under every division of a batch: the numbers of one device, or a refusal.

Each row of `KINDS` is trained, measured and applied on each strategy, in 1, 2 and 4 parts, on whole
batches and with a rest. The plain run on one device has the numbers of a loop by hand.
"""

import collections
import dataclasses
import functools
import itertools
from collections import namedtuple
from operator import attrgetter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import Seen, lbfgs, probe
from loops import given, small_waves
from marks import slow, thorough

import flaxfit as ff
from flaxfit.losses import crossentropy, info_nce

# test_eight_devices.py runs this file once more, on eight devices.
N = min(len(jax.devices()), 8)
BATCH, N_STEPS, RATE = 4 * N, 5, 0.1
SIZES = {"rest": 2 * BATCH + 6, "even": 2 * BATCH}
DEVICES = jax.devices()[:N]
STRATEGIES = {
    "one device": lambda: ff.DataParallel(DEVICES[:1]),
    "shard_map": lambda: ff.DataParallel(DEVICES, implementation="shard_map"),
    "pmap": lambda: ff.DataParallel(DEVICES, implementation="pmap"),
    "FSDP": lambda: ff.Sharded.fsdp(devices=DEVICES),
    "virtual": lambda: ff.DataParallel(DEVICES[: N // 2], virtual_replicas=N),
}


# The arrays that all kinds share.
Data = namedtuple("Data", "x other labels mask w steps step_w step_mask n_steps ignored")


def make_data(n):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 6)).astype("f4")
    other = (x + 0.5 * rng.normal(size=x.shape)).astype("f4")
    # The first batch has no masked example: what is seen there must not decide.
    mask = np.where(np.arange(n) < BATCH, 1, rng.integers(0, 2, n)).astype("f4")
    steps = rng.integers(0, 4, (n, 2)).astype("i4")
    step_w = (rng.random((n, 2)) * (rng.random((n, 2)) > 0.4)).astype("f4")
    step_w[3] = 0  # A row without a token.
    is_there = step_w > 0
    labels, w = rng.integers(0, 4, n).astype("i4"), rng.uniform(0.5, 2, n).astype("f4")
    rest = is_there, is_there.sum(-1).astype("f4"), np.where(is_there, steps, -100)
    return Data(x, other, labels, mask, w, steps, step_w, *rest)


D = make_data(SIZES["rest"])
PARAMS = {k: np.random.default_rng(i).normal(size=(6, 4)).astype("f4") for i, k in enumerate("ab")}
PARAMS["scale"] = np.float32(0.3)
ce = optax.softmax_cross_entropy_with_integer_labels


# Models, and the values of their losses by hand.


def rows(params, x):
    return x @ params["a"]


def ce_rows(params, d):
    return ce(rows(params, d.x), d.labels)


def tokens(params, x):
    return x.reshape(-1, 2, 3) @ params["a"][:3]


def ce_tokens(params, d):
    return ce(tokens(params, d.x), d.steps)


def towers(params, x, other):
    """Embeddings of images and texts, and a learned scale, as in CLIP."""
    return x @ params["a"], other @ params["b"], params["scale"]


def clip(a, b, scale):
    """The loss of CLIP: each image against all texts, and each text against all images."""
    a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
    logits = jnp.exp(scale) * a @ b.T
    labels = jnp.arange(len(logits))
    return (ce(logits, labels) + ce(logits.T, labels)) / 2


def ce_pairs(params, d):
    return clip(*towers(params, d.x, d.other))


def views(params, x):
    """Two views, and as many prototypes as examples in a part, on a replica, or in both."""
    sizes = {BATCH // 2, BATCH // 4, BATCH // N, BATCH // N // 2, BATCH // N // 4}
    return x @ params["a"], *(params["b"][jnp.arange(n) % 6] for n in sorted(sizes))


def neighbors(params, x):
    return (x + x[jnp.arange(len(x)) // 2]) @ params["a"]


def messages(params, x):
    """Each row receives a part of the sum over its group, here all rows."""
    group = jnp.zeros(len(x), int)
    return (x + 0.1 * jax.ops.segment_sum(x, group, 1)[group]) @ params["a"]


def hits(v, x):
    """A running count of how often each code is nearest, as a codebook keeps it."""
    codes = jax.nn.one_hot((x @ v["params"]["a"]).argmax(-1), 4)
    return {"stats": {"usage": 0.9 * v["stats"]["usage"] + codes.sum(0)}}


def paired(z, *prototypes):
    """Each first half against all second halves, as SimCLR's loss; with weights."""
    a, b = jnp.split(z, 2)
    logits = a @ b.T + sum((a @ each.T).sum(-1, keepdims=True) for each in prototypes)
    values = jax.nn.logsumexp(logits, -1) - jnp.diagonal(logits)
    return jnp.concatenate([values, values]), jnp.ones(len(z))


def gathered(x):
    return jax.lax.all_gather(x, "replica", tiled=True)


def clip_of_all(a, b, scale):
    """A loss that gathers the rows of all replicas by itself."""
    labels = jax.lax.axis_index("replica") * len(a) + jnp.arange(len(a))
    return ce(scale * a @ gathered(b).T, labels).mean()


def nearest(outputs, labels, everyone=gathered):
    """The distance to the nearest example of another label."""
    distances = ((outputs[:, None] - everyone(outputs)) ** 2).sum(-1)
    return jnp.where(labels[:, None] == everyone(labels), 9.0, distances).min(-1)


def two_calls(apply, batch, rngs):
    (x,), (labels,) = batch.inputs, batch.targets
    return ce(apply(x), labels) + size(apply(-x), -1), labels != 1


def size(x, axis=None):
    return 0.1 * jnp.mean(x**2, axis)


def descend(state, batch):
    """A step of the user's own, which needs the whole batch."""
    (x,), (labels,) = batch.inputs, batch.targets
    value, grads = jax.value_and_grad(lambda p: jnp.mean(ce(rows(p, x), labels)))(state.params)
    return state.apply_gradient(optax.sgd(RATE), grads), {"loss": value}


class Noisy(nn.Module):
    """Dropout and a penalty, and BatchNorm."""

    norm: bool = False
    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, kernel_init=small_waves)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not self.train)(x)
        self.sow("losses", "size", size(x))
        x = nn.Dropout(0.5, deterministic=not self.train)(x)
        return nn.Dense(4, kernel_init=small_waves)(x)


# The table.


@dataclasses.dataclass(frozen=True)
class Kind:
    """A row of the table; inputs, targets and weights are names of arrays."""

    loss: Any = None
    values: Any = None  # By hand: (params, data) -> values, or pairs of values and weights.
    targets: Any = "labels"
    weights: Any = None
    penalty: Any = lambda params, d: 0.0
    model: Any = rows
    inputs: Any = "x"
    updates: Any = None  # (variables, x) -> collections
    state: Any = dataclasses.field(default_factory=dict)
    module: Any = None  # In place of the model: random, or normalizing.
    optimizer: Any = dataclasses.field(default_factory=lambda: optax.sgd(RATE))
    options: Any = dataclasses.field(default_factory=dict)
    metrics: Any = ()
    refused: Any = dataclasses.field(default_factory=dict)  # By what is divided: the message.
    measured: str = ""  # That of evaluate in virtual replicas, if it is refused there, too.
    by_replica: bool = False  # Whether numbers depend on the division, as documented.
    tolerance: Any = (1e-5, 1e-6, 1e-5)  # Relative and absolute of the state; of losses.

    def terms(self, params, d):
        """Pairs of values and weights by hand, by output."""
        found = self.values(params, d)
        if not isinstance(found, list):
            found = [(found, getattr(d, self.weights) if self.weights else 1.0)]
        return [(v, jnp.broadcast_to(w, v.shape)) for v, w in found]


def like(usual=None, **more):
    """Makes kinds that have these in common."""
    return lambda loss=None, values=usual, **own: Kind(loss, values, **{**more, **own})


def of_tokens(*weights):
    """The values of tokens by hand, with weights, by output."""
    return lambda p, d: [(ce_tokens(p, d), w(d)) for w in weights]


def both(first, second=None):
    return {"a": first, "b": first if second is None else second}


METRICS = {
    "accuracy": "accuracy",
    "own": lambda outputs, labels: outputs.argmax(-1) != labels,
    "in order": ff.metrics.collected(lambda o, t: float(o[:, 0] @ np.cos(t + np.arange(len(t))))),
}


def no_parts(why=""):
    return dict.fromkeys(
        ("accumulate", "virtual"), "{option}: .*" + why + ".*not the loss of the batch"
    )


NO_PARTS, SCALAR = no_parts(), no_parts("it is a scalar")
NO_AXIS = "Cannot use the axis .replica. in the model, the loss or a metric with virtual"
SAY_SO = "depends on the other examples .* across='batch'"
LONELY = {"rest": SAY_SO, "accumulate": SAY_SO, "devices": SAY_SO}
MIXED = "mixes examples of a batch"
SUM = "the penalty that the model adds .* a mean over"
WHOLE, UNPADDED = {"across": "batch"}, {"pad": False}
TO_BATCH = {"refused": {"virtual": "=.: .* such a loss cannot be computed"}, "options": WHOLE}
PAIRS = {"targets": (), "model": towers, "inputs": ("x", "other")}
SEVERAL = {"freeze": "b", "clip_norm": 0.1, "ema": 0.9}
TWO_TOKENS = {"targets": both("steps"), "model": lambda p, x: both(tokens(p, x))}
VIEWS = {"values": lambda p, d: paired(*views(p, d.x))[0], "model": views, "inputs": "x"}
SOWN = {
    "updates": lambda v, x, *_: {"losses": {"size": size(x @ v["params"]["a"])}},
    "penalty": lambda p, d: size(d.x @ p["a"]),
}
ONES, MASKED, WEIGHED = lambda d: 1.0, attrgetter("step_mask"), attrgetter("step_w")
IGNORING, CE = crossentropy(ignore_label=-100), "crossentropy"
LOW = (3e-2, 1e-5, 3e-2)
Rows, Scalar = like(ce_rows), like(ce_rows, refused=SCALAR)
Mixing = like(refused={"accumulate": MIXED, "devices": MIXED}, measured=MIXED)
Penal = like(
    ce_rows,
    refused=no_parts("its penalty is one number"),
    penalty=lambda p, d: 0.1 * jnp.var(rows(p, d.x)),
)
Tokens = like(ce_tokens, targets="steps", model=tokens, tolerance=(1e-5, 1e-6, 1e-6))
Pairs = like(ce_pairs, **PAIRS, refused=NO_PARTS, measured="virtual_replicas.*not the loss")
Lonely = like(ce_pairs, **PAIRS, refused=LONELY)
Across = like(ce_pairs, **PAIRS, **TO_BATCH)
KINDS = {
    "by name": Rows(CE, metrics=METRICS),
    "weighted values": Rows(lambda o, t: ce(o, t), weights="w", metrics=["accuracy"]),
    "weights of 0": Rows(ce, weights="mask", metrics=METRICS),
    "masked steps": Tokens(
        lambda o, t, mask: (ce(o, t) * mask).sum(-1) / jnp.maximum(mask.sum(-1), 1),
        of_tokens(MASKED),
        targets=("steps", "step_mask"),
        weights="n_steps",
    ),
    "token weights": Tokens(CE, weights="step_w"),
    "ignored label and weights": Tokens(
        IGNORING, of_tokens(lambda d: d.step_mask * d.w[:, None]), targets="ignored", weights="w"
    ),
    "weights of the loss": Tokens(
        lambda o, t: (ce(o, t), t != 1),
        of_tokens(lambda d: d.step_w * (d.steps != 1)),
        weights="step_w",
    ),
    "weights by output": Tokens(
        both(CE),
        lambda p, d: [(ce_tokens(p, d), d.step_w), (3 * ce_tokens(p, d), 1.0)],
        weights={"a": "step_w"},
        optimizer=probe(RATE),
        options={"loss_weights": {"b": 3.0}},
        **TWO_TOKENS,
    ),
    "token weights of all outputs": Tokens(
        both(CE), of_tokens(WEIGHED, WEIGHED), **TWO_TOKENS, weights="step_w"
    ),
    "label ignored in one output": Tokens(
        both(IGNORING, CE),
        of_tokens(MASKED, ONES),
        **{**TWO_TOKENS, "targets": both("ignored", "steps")},
    ),
    "several outputs": Kind(
        both(CE, lambda o, t: ce(o, t)),
        lambda p, d: [(ce(d.x @ p[k], d.labels), 1.0) for k in "ab"],
        targets=both("labels"),
        model=lambda p, x: both(x @ p["a"], x @ p["b"]),
    ),
    "scalar mean": Scalar(lambda o, t: ce(o, t).mean(), tolerance=(1e-5, 1e-6, 1e-6)),
    "scalar sum": Scalar(
        lambda o, t: ce(o, t).sum() / 8, lambda p, d: jnp.full(len(d.x), ce_rows(p, d).sum() / 8)
    ),
    "masked mean": Scalar(
        lambda o, t, mask: (ce(o, t) * mask).sum() / mask.sum(),
        lambda p, d: jnp.full(len(d.x), (ce_rows(p, d) * d.mask).sum() / jnp.sum(d.mask)),
        targets=("labels", "mask"),
    ),
    "penalty": Penal(lambda o, t: (ce(o, t), 0.1 * jnp.var(o))),
    "weighted, with a penalty": Penal(lambda o, t: (ce(o, t), 0.1 * jnp.var(o)), weights="w"),
    "scalar, with a penalty": Penal(
        lambda o, t: (ce(o, t).mean(), 0.1 * jnp.var(o)), refused=SCALAR
    ),
    "normalised by the batch": Kind(
        lambda o, t, mask: ce(o, t) * mask / mask.mean(),
        lambda p, d: ce_rows(p, d) * d.mask / jnp.mean(d.mask),
        targets=("labels", "mask"),
        options=UNPADDED,
        refused=NO_PARTS,
    ),
    "weighted contrastive": Pairs(clip, weights="w", options=UNPADDED),
    "undeclared contrastive": Lonely(clip),
    "undeclared, by name": Lonely(
        "info_nce", refused=dict.fromkeys(("rest", "accumulate", "virtual"), SAY_SO)
    ),
    "undeclared pairs": Lonely(paired, **VIEWS),
    "gathering": Pairs(
        clip_of_all,
        lambda p, d: ce(p["scale"] * (d.x @ p["a"]) @ (d.other @ p["b"]).T, np.arange(len(d.x))),
        refused={"virtual": NO_AXIS, "accumulate": SCALAR["accumulate"]},
        measured=NO_AXIS,
    ),
    "across": Across(clip, optimizer=probe(RATE)),
    "across, penalized": Across(
        lambda *o: (clip(*o).mean(), size(o[0])), penalty=lambda p, d: size(d.x @ p["a"])
    ),
    "across, of the library": Across(info_nce, weights="w", **SOWN),
    "across, weighted and sown": Across(clip, weights="w", **SOWN),
    "across, with options": Across(clip, None, options=WHOLE | SEVERAL),
    "across, float16": Across(clip, None, options=WHOLE | {"precision": "float16"}, tolerance=LOW),
    "across, pairs and prototypes": Across(paired, **VIEWS),
    "across, gathering": Kind(
        nearest,
        lambda p, d: nearest(rows(p, d.x), d.labels, lambda x: x),
        weights="mask",
        options=WHOLE,
        refused={"virtual": NO_AXIS},
    ),
    "objective": Rows(
        None,
        lambda p, d: [(ce_rows(p, d) + size(d.x @ p["a"], -1), d.w * (d.labels != 1))],
        weights="w",
        optimizer=probe(RATE),
        options={"objective": two_calls},
    ),
    "mean of the model": Rows(CE, **SOWN),
    "sum of the model": Rows(
        CE,
        updates=lambda v, x: {"losses": {"size": 0.01 * jnp.sum((x @ v["params"]["a"]) ** 2)}},
        penalty=lambda p, d: 0.01 * jnp.sum((d.x @ p["a"]) ** 2),
        refused={"accumulate": SUM, "devices": SUM},
    ),
    "kept means": Rows(
        CE,
        updates=lambda v, x: {"stats": {"sum": v["stats"]["sum"] + x.mean(0)}},
        state={"stats": {"sum": np.zeros(6, "f4")}},
        refused={"accumulate": "accumulate=.*'stats/sum'.*accumulate=1"},
    ),
    "rows read by index": Mixing(CE, lambda p, d: ce(neighbors(p, d.x), d.labels), model=neighbors),
    "message passing": Mixing(CE, lambda p, d: ce(messages(p, d.x), d.labels), model=messages),
    "counted rows": Rows(
        CE,
        updates=lambda v, x: {"stats": {"rows": v["stats"]["rows"] + len(x)}},
        state={"stats": {"rows": np.int32(0)}},
        refused={"devices": "'stats/rows'"},  # Parts in sequence count all rows.
    ),
    "codebook": Rows(
        CE,
        updates=hits,
        state={"stats": {"usage": np.zeros(4, "f4")}},
        refused={"accumulate": "'stats/usage'", "devices": "'stats/usage'"},
    ),
    "options": Kind(CE, weights="w", options=SEVERAL),
    "bfloat16": Kind(CE, options={"precision": "bfloat16"}, tolerance=LOW),
    "line search": Rows(
        lambda o, t: ce(o, t),
        weights="w",
        optimizer=lbfgs(),
        tolerance=(1e-4, 1e-5, 1e-5),
    ),
    "own step": Rows(
        options={"step": descend},
        refused={
            "accumulate": "accumulate would have no effect: the task has a custom step",
            "devices": "The task has a custom step, which needs whole batches",
        },
    ),
    "dropout": Kind(CE, weights="w", module=Noisy(), optimizer=probe(RATE), by_replica=True),
    "BatchNorm": Kind(CE, module=Noisy(norm=True), by_replica=True),
}


def model_of(kind, strategy, accumulate):
    @given
    def init(rngs, *inputs, **named):
        return {"params": PARAMS, **kind.state}

    def apply(variables, *inputs, rngs=None, mutable=False, **named):
        outputs = kind.model(variables["params"], *inputs, **named)
        updates = {} if kind.updates is None else kind.updates(variables, *inputs)
        return outputs if mutable is False else (outputs, updates)

    module = (init, apply) if kind.module is None else kind.module
    options = {"accumulate": accumulate, "strategy": STRATEGIES[strategy](), **kind.options}
    return ff.Model(module, kind.optimizer, kind.loss, kind.metrics, **options)


def data_of(kind, size, *names):
    names = names or (kind.inputs, kind.targets, kind.weights)
    parts = jax.tree.map(lambda name: getattr(D, name)[: SIZES[size]], names)
    return ff.ArrayStream(*parts, batch_size=BATCH)


def is_applied(kind):
    """Whether the outputs of an example are the same in any batch."""
    return kind.model not in (towers, views, neighbors, messages)


@functools.cache
def run(name, strategy="one device", accumulate=1, size="rest"):
    """The numbers of a few steps and those measured then; the last state and predictions."""
    kind = KINDS[name]
    model = model_of(kind, strategy, accumulate)
    steps = model.fit(data_of(kind, size), steps_per_epoch=1, epochs=N_STEPS, verbose=0)
    measured = model.evaluate(data_of(kind, size), verbose=0) if name != "own step" else {}
    outputs = is_applied(kind) and model.predict(data_of(kind, size, kind.inputs), verbose=0)
    return (dict(steps), measured), (model.state.replace(key=None), outputs)


@functools.cache
def run_by_hand(name, size):
    """The losses and penalties of the steps, the loss measured, and the last state in parts."""
    kind, n = KINDS[name], SIZES[size]

    def sums_of(params, d):
        return [(jnp.sum(v * w), jnp.sum(w)) for v, w in kind.terms(params, d)]

    @jax.jit
    def step(params, opt_state, model_state, d):
        def loss_of(params):
            loss, penalty = sum(a / b for a, b in sums_of(params, d)), kind.penalty(params, d)
            return loss + penalty, (loss, penalty)

        (value, found), grad = jax.value_and_grad(loss_of, has_aux=True)(params)
        more = {"value": value, "grad": grad, "value_fn": lambda p: loss_of(p)[0]}
        optimizer = optax.with_extra_args_support(kind.optimizer)
        updates, new = optimizer.update(grad, opt_state, params, **more)
        variables = {"params": params, **model_state}
        kept = kind.updates(variables, d.x) if kind.state else {}
        return (optax.apply_updates(params, updates), new, kept), found

    params = jax.tree.map(jnp.asarray, PARAMS)
    state, steps = (params, kind.optimizer.init(params), kind.state), []
    batches = [Data(*(a[i : min(i + BATCH, n)] for a in D)) for i in range(0, n, BATCH)]
    for d in itertools.islice(itertools.cycle(batches), N_STEPS):
        state, found = step(*state, d)
        steps.append(found)
    totals = np.sum([np.array(jax.jit(sums_of)(state[0], d), np.float64) for d in batches], 0)
    return *zip(*steps, strict=True), sum(totals[:, 0] / totals[:, 1]), state


def reason(messages, strategy, accumulate, size):
    """What of a cell is refused first, a key of the messages, or None."""
    divided = {
        "rest": size == "rest",
        "accumulate": accumulate > 1,
        "virtual": strategy == "virtual",
        "devices": strategy in ("shard_map", "pmap", "virtual"),
    }
    return next((key for key in messages if divided[key]), None)


# Others have all that is particular to these; their cells are thorough.
HELD = {"weights of 0", "token weights of all outputs", "scalar mean", "scalar sum", "penalty"}
HELD |= {"undeclared contrastive", "mean of the model"}
QUICK_TO_REFUSE = {"scalar mean", "penalty", "weighted contrastive", "undeclared, by name"}
QUICK_TO_REFUSE |= {"across", "sum of the model", "kept means", "own step"}


def reasons_to_refuse():
    """The reasons that each kind shows in the default run; kinds that are alike share theirs."""
    alike, shown = collections.defaultdict(list), collections.defaultdict(list)
    for name in sorted(KINDS, key=lambda name: name not in QUICK_TO_REFUSE):
        alike[str(KINDS[name].refused), KINDS[name].measured].append(name)
    for names in alike.values():
        for name, key in zip(itertools.cycle(names), KINDS[names[0]].refused, strict=False):
            shown[name].append(key)
    return shown


def cells(is_refused):
    """The product: the cells of the default run are slow, or quick to refuse; others are thorough.

    A kind has one of them for its numbers, and one for each reason to refuse it that it shows. The
    epochs with a rest begin with whole batches. Kinds whose numbers depend on the replicas have no
    rest, which a strategy may divide over fewer of them.
    """
    shown = reasons_to_refuse() if is_refused else {name: [None] for name in KINDS.keys() - HELD}
    for i, (name, kind) in enumerate(KINDS.items()):
        found = [
            cell
            for cell in itertools.product(STRATEGIES, (1, 2, 4), SIZES)
            if (reason(kind.refused, *cell) is not None) == is_refused
            and not (
                kind.by_replica and (cell[0] in ("one device", "virtual") or cell[2] == "rest")
            )
        ]
        kept = []
        for key in shown.get(name, ()):
            is_even = kind.by_replica or "rest" in kind.refused and key != "rest"
            size = "even" if is_even else "rest"
            usual = [c for c in found if c[2] == size and reason(kind.refused, *c) == key]
            kept.append(usual[13 * i % len(usual)])  # Spreads them over strategies and parts.
        for cell in found:
            mark = slow if cell in kept else thorough
            if is_refused and name in QUICK_TO_REFUSE and cell in kept[:1]:
                mark = pytest.param
            yield mark(name, *cell)


def assert_same(found, expected, rtol, atol=1e-7):
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("name", "strategy", "accumulate", "size"), [*cells(False)])
def test_a_division_has_the_numbers_of_one_device(name, strategy, accumulate, size):
    kind, (numbers, arrays) = KINDS[name], run(name, strategy, accumulate, size)
    (steps, measured), (state, outputs) = numbers, arrays
    of_state, of_loss = kind.tolerance[:2], kind.tolerance[2]
    if kind.values:
        losses, penalties, loss, parts = run_by_hand(name, size)
        assert_same(steps["loss"], losses, of_loss)
        assert_same(steps.get("penalty", penalties), penalties, of_loss)
        assert_same((state.params, state.opt_state, state.model_state), parts, *of_state)
        assert_same(measured.get("loss", loss), loss, of_loss)
        assert_same(
            outputs, is_applied(kind) and kind.model(parts[0], D.x[: SIZES[size]]), *of_state
        )
    if kind.metrics or not kind.values:
        expected = run(name, size=size)
        if kind.by_replica:  # One device stands for `Sharded`, virtual replicas for real ones.
            other = "one device" if strategy == "FSDP" else "virtual"
            expected = run(name, other, accumulate, size)
        assert_same(numbers, expected[0], of_loss)
        if kind.options.get("precision") == "bfloat16":  # Rounds apart what nearly agrees.
            params, x = jax.tree.map(jnp.bfloat16, (state.params, D.x[: SIZES[size]]))
            assert_same(outputs, kind.model(params, x).astype(jnp.float32), 2**-8)
            arrays, expected = arrays[:1], (expected[0], expected[1][:1])
        assert_same(arrays, expected[1], *of_state)
    if isinstance(seen := state.opt_state, Seen):
        last = steps["loss"][-1] + steps.get("penalty", [0])[-1]
        assert float(seen.value) == pytest.approx(last, rel=1e-6)
        assert_same(seen[1::2], seen[::2], 1e-6)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("name", "strategy", "accumulate", "size"), [*cells(True)])
def test_a_division_that_would_change_them_is_refused(name, strategy, accumulate, size):
    kind, data = KINDS[name], data_of(KINDS[name], size)
    message = kind.refused[reason(kind.refused, strategy, accumulate, size)]
    option = f"accumulate={accumulate}" if accumulate > 1 else f"virtual_replicas={N}"
    with pytest.raises(ValueError, match=message.format(option=option)):
        model_of(kind, strategy, accumulate).fit(data, verbose=0)
    if kind.measured and strategy == "virtual":
        with pytest.raises(ValueError, match=kind.measured):
            model_of(kind, strategy, 1).evaluate(data, verbose=0)
