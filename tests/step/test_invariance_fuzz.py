"""Random programs on random strategies: the numbers of one device, or a refusal in words.

Each program is a script, which a failure prints.
"""

import random

import numpy as np
import pytest
from marks import thorough

SCRIPT = """
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flaxfit as ff

rng = np.random.default_rng({seed})
n, batch_size = {n}, {batch_size}
x = rng.normal(size=(n, 6)).astype(np.float32)
y = {targets}
weights = {weights}


{module}


{loss}


def run(strategy, **options):
    def made():
        net, own = Net(nnx.Rngs(0)), options | dict({options})
        return ff.Model(net, {optimizer}, {given}, {metrics}, strategy=strategy, **own)

    model, losses = made(), []
    data = {{"batch_size": batch_size, "verbose": 0}}
    for i, epochs in enumerate({calls}):
        if i and {resumes}:
            with tempfile.TemporaryDirectory() as folder:
                model.save(folder)
                model = made()
                model.load(folder)
        history = model.fit(x, y, sample_weight=weights, epochs=epochs, **data)
        losses += [v for k in sorted(history) if "rate" not in k for v in history[k][-1:]]
    measured = model.evaluate(x, y, sample_weight=weights, **data)
    outputs = model.predict(x, **data)
    params = nnx.to_pure_dict(nnx.state(model.trained(), nnx.Param))
    return losses, sorted(measured.items()), outputs, params
"""
MODULES = {
    "dense": ["h = jnp.tanh(self.one(x))"],
    "layer norm": ["h = self.one(x)", "h = (h - h.mean(1, keepdims=True)) / (1 + jnp.abs(h))"],
    "attention in a row": [
        "h = self.one(x).reshape(-1, 4, 2)",
        "h = (jax.nn.softmax(h @ h.swapaxes(1, 2)) @ h).reshape(-1, 8)",
    ],
    "scan in a row": [
        "add = lambda c, v: (jnp.tanh(c + v),) * 2",
        "h = jax.lax.scan(add, 0 * x[:, 0], self.one(x).T)[1].T",
    ],
    "gradient by row": [
        "slope = jax.grad(lambda row: jnp.sin(self.one(row)).sum())",
        "h = self.one(jax.vmap(slope)(x))",
    ],
    "sort and back": [
        "o = jnp.argsort(x[:, 0])",
        "h = jnp.tanh(self.one(x[o]))[jnp.argsort(o)]",
    ],
    "map over rows": ["h = jax.lax.map(lambda row: jnp.tanh(self.one(row)), x)"],
}
MIXING = {
    # Half of it: the gradient of a bias that cancels is rounding alone, which Adam scales up.
    "mean": ["h = self.one(x)", "h = h - h.mean(0) / 2"],
    "ranks": ["h = self.one(x + jnp.argsort(jnp.argsort(x, 0), 0) / 16)"],
    "neighbors": ["h = self.one(x + x[jnp.arange(len(x)) // 2])"],
    "scan over rows": [
        "add = lambda c, v: (c / 2 + v,) * 2",
        "h = jax.lax.scan(add, jnp.zeros(8), self.one(x))[1]",
    ],
}
CLASS = """class Net(nnx.Module):
    def __init__(self, rngs):
        self.one, self.two = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.three = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        {body}
        return {outputs}"""
LABELS, VALUES = "rng.integers(0, 3, n)", "rng.normal(size=(n, 3)).astype(np.float32)"
LOSSES = {  # By its text: the targets, and whether values depend on other rows.
    'loss = "crossentropy"': (LABELS, False),
    'loss = "mse"': (VALUES, False),
    "def loss(o, t):\n    return ((o - t) ** 2).mean(-1)": (VALUES, False),
    "def loss(o, t):\n    return ((o - t) ** 2).sum(-1), 1 + t[:, 0] ** 2": (VALUES, False),
    "def loss(o, t):\n    return optax.softmax_cross_entropy_with_integer_labels(o, t)": (
        LABELS,
        False,
    ),
    "def loss(o, t):\n    return ((o - o.mean(0) / 2 - t) ** 2).mean(-1)": (VALUES, True),
}
OBJECTIVE = """


def objective(apply, batch, rngs):
    (x,), (t,) = batch.inputs, batch.targets
    return loss(apply(x), t)"""
BY_OUTPUT = 'loss = {"a": "crossentropy", "b": lambda o, t: ((o - t) ** 2).mean(-1)}'
STRATEGIES = {
    "ff.DataParallel(jax.devices()[:4])": True,
    'ff.DataParallel(jax.devices()[:4], implementation="pmap")': True,
    "ff.DataParallel(jax.devices()[:1], virtual_replicas=4)": True,
    "ff.Sharded.fsdp(devices=jax.devices()[:4])": False,
    "ff.DataParallel(jax.devices()[:1])": False,
}


def program(seed):
    """The script of a seed, a strategy with options, and whether these may be refused."""
    draw = random.Random(seed)
    is_mixing = draw.random() < 0.25
    body = "\n        ".join(draw.choice([*(MIXING if is_mixing else MODULES).values()]))
    loss, (targets, compares) = draw.choice([*LOSSES.items()])
    outputs, metrics = "self.two(h)", "None"
    if targets == LABELS:
        metrics = draw.choice(["None", '["accuracy"]'])
    if draw.random() < 0.2:
        loss, compares = BY_OUTPUT, False
        outputs = '{"a": self.two(h), "b": self.three(h)}'
        targets = f'{{"a": {LABELS}, "b": {VALUES}}}'
        metrics = 'dict(a=["accuracy"])'
    strategy = draw.choice([*STRATEGIES])
    accumulate = draw.choice([1, 1, 2, 4])
    options, given = draw.choice(["", "clip_norm=0.5, ", 'freeze="one/.*", ', "ema=0.9, "]), "loss"
    if loss.startswith("def") and metrics == "None" and draw.random() < 0.5:
        loss, given, options = loss + OBJECTIVE, "None", f"{options}objective=objective"
    script = SCRIPT.format(
        seed=seed,
        n=draw.choice([32, 37, 24]),
        batch_size=draw.choice([16, 8]),
        targets=targets,
        weights=draw.choice(["None", "rng.uniform(0.5, 2, n).astype(np.float32)"]),
        module=CLASS.format(body=body, outputs=outputs),
        loss=loss,
        optimizer=draw.choice(["optax.sgd(0.05)", "optax.adam(0.01)"]),
        metrics=metrics,
        options=options,
        given=given,
        calls=draw.choice([[1], [1, 2]]),
        resumes=draw.random() < 0.5,
    )
    return script, strategy, accumulate, is_mixing or compares


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("seed", [*range(40), *map(thorough, range(40, 400))])
def test_a_program_has_the_numbers_of_one_device_or_is_refused(seed):
    script, strategy, accumulate, may_refuse = program(seed)
    names = {}
    exec(script, names)
    call = f"run({strategy}, accumulate={accumulate})"
    report = f"{script}\n\nprint(run(ff.DataParallel(jax.devices()[:1])))\nprint({call})"
    try:
        found = eval(call, names)
    except ValueError as error:
        assert may_refuse, f"refused without need: {error}\n{report}"
        return
    expected = eval("run(ff.DataParallel(jax.devices()[:1]))", names)
    leaves = names["jax"].tree.leaves
    for mine, theirs in zip(leaves(found), leaves(expected), strict=True):
        if not isinstance(mine, str):
            np.testing.assert_allclose(mine, theirs, 2e-3, 2e-4, err_msg=report)
