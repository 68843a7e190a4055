"""Both ways to map a function over devices compile one program, and train to the same bits."""

import functools
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import Mesh
from marks import slow, thorough
from strategies import assert_same_bits

import flaxfit as ff
from flaxfit.strategies import DataParallel
from flaxfit.strategies._mapped import chosen, is_unsplit, mapped

pytestmark = pytest.mark.optimized
BOTH = ("pmap", "shard_map")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 8)).astype(np.float32)
Y = RNG.integers(0, 3, 22)
W = RNG.uniform(0.5, 2, 22).astype(np.float32)


class Net(nn.Module):
    """Batch statistics, dropout, and an axis that the model names."""

    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(not self.train, axis_name="batch" if self.train else None)(x)
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not self.train)(nn.relu(x)))


def train(implementation, n, n_steps=4, *, wrap=lambda init: init, callbacks=(), **options):
    """The final state, every metric and the predictions of a run with an uneven last batch."""
    strategy = DataParallel(jax.devices()[:n], axis_name="batch", implementation=implementation)
    net, measured = Net(), Net(train=False)
    evaluate = ff.EvalTask(measured.apply, ["accuracy"], (X[:15], Y[:15]), loss="crossentropy")
    stream = ff.ArrayStream(X, Y, W, batch_size=8, shuffle=True)
    calls = {"steps_per_call": options.pop("steps_per_call", 1)}
    task = ff.TrainTask(net.apply, optax.adam(0.01), "crossentropy", stream, ["recall"], **options)
    loop = ff.TrainLoop(
        wrap(net.init),
        task,
        0,
        n_steps=n_steps,
        n_steps_per_checkpoint=2,
        first_checkpoint=2,
        strategy=strategy,
        callbacks=[ff.EvalLoop(evaluate, strategy=strategy), *callbacks],
        stdout=False,
        **calls,
    )
    metrics = [checkpoint.metrics for checkpoint in loop]
    model = ff.Model(measured, optax.sgd(0.1), "crossentropy", strategy=strategy)
    model.state = loop.state
    return loop.state, metrics, model.predict(X, batch_size=8)


def assert_same(found, expected):
    """Every array of both, its bits and its place."""
    assert_same_bits(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(a, jax.Array):
            assert a.sharding == b.sharding and a.aval == b.aval


@pytest.mark.parametrize(
    ("n", "out_axes"),
    [
        (4, (None, 0)),
        slow(4, None),
        slow(4, 0),
        slow(1, (None, 0)),
        thorough(1, None),
        thorough(1, 0),
    ],
)
def test_both_lower_to_the_same_program_and_results(n, out_axes):
    mesh = Mesh(np.array(jax.devices()[:n]), ("replica",))

    def function(state, key, batch):
        noise = jax.random.normal(jax.random.fold_in(key, jax.lax.axis_index("replica")))
        rows = state["w"] * batch["x"] + noise + batch["n"]
        whole = jax.tree.map(lambda x: jax.lax.pmean(x * rows.sum(), "replica"), state)
        return {None: whole, 0: rows, (None, 0): (whole, rows)}[out_axes]

    def arguments(implementation):
        state = {"w": jnp.arange(3.0), "b": jnp.float32(2)}
        batch = {"x": np.ones((n, 2, 3), np.float32), "n": np.arange(n)}
        if is_unsplit(mesh, implementation):
            batch = jax.tree.map(lambda x: x[0], batch)
        return state, jax.random.key(1), batch

    texts, results = [], []
    for implementation in BOTH:
        run = mapped(
            function, mesh, 3, out_axes, n_donated=out_axes != 0, implementation=implementation
        )
        given = arguments(implementation)
        texts.append(re.sub(r"module @\w+", "module", run.lower(*given).as_text()))
        results.append(run(*arguments(implementation)))
    assert n == 1 or texts[0] == texts[1]
    assert_same(*results)


@pytest.mark.parametrize("implementation", BOTH)
def test_what_is_donated_is_gone_and_what_was_placed_stays(implementation):
    strategy = DataParallel(jax.devices()[:2], implementation=implementation)
    original = jnp.ones(3)
    placed, parts = strategy.place(original), strategy.split(np.zeros(2, np.float32))
    run = strategy.compile(lambda x, b: x + 1, (placed, parts), n_donated=1)
    assert run(placed, parts).sharding == strategy.place(original).sharding
    assert placed.is_deleted() and not original.is_deleted()


OPTIONS = {"accumulate": 2, "ema": 0.9, "steps_per_call": 2, "clip_norm": 0.5}


@functools.cache
def whole(implementation):
    return train(implementation, 4, **OPTIONS)


@pytest.mark.slow
def test_states_metrics_and_predictions_have_the_same_bits():
    assert_same(*map(whole, BOTH))


@pytest.mark.thorough
@pytest.mark.parametrize("n, options", [(1, {}), (4, {"skip_nonfinite": True})])
def test_other_options_give_the_same_bits(n, options):
    assert_same(*(train(implementation, n, **options) for implementation in BOTH))


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [BOTH, thorough(*reversed(BOTH))])
def test_a_run_that_resumes_with_the_other_ends_with_the_same_bits(first, then, tmp_path, capfd):
    def reader(init):
        return ff.checkpoints.CheckpointFileReader(tmp_path, init)

    def part(implementation, n_steps):
        writer = ff.checkpoints.CheckpointFileWriter(tmp_path)
        options = {"wrap": reader, "callbacks": [writer], **OPTIONS}
        return train(implementation, 4, n_steps, **options)

    _, before, _ = part(first, 2)
    state, after, predictions = part(then, 4)
    assert_same((state, before + after, predictions), whole(first))
    assert "bit for bit" not in capfd.readouterr().err


@pytest.mark.slow
def test_virtual_replicas_have_the_same_bits():
    def run(implementation):
        strategy = DataParallel(
            jax.devices()[:2], virtual_replicas=4, implementation=implementation
        )
        data = ff.ArrayStream(X, Y, W, batch_size=8)
        net = nn.Dense(3)
        task = ff.TrainTask(net.apply, optax.adam(0.01), "crossentropy", data, rngs=())
        loop = ff.TrainLoop(net.init, task, 0, n_steps=3, strategy=strategy, stdout=False)
        return [c.metrics for c in loop], loop.state

    assert_same(run("pmap"), run("shard_map"))


def test_a_narrower_strategy_and_the_repr_keep_the_implementation():
    strategy = DataParallel(axis_name="batch", implementation="pmap")
    expected = "DataParallel(3 cpu devices, axis_name='batch', implementation='pmap')"
    assert repr(strategy.narrow(3)) == expected
    virtual = DataParallel(virtual_replicas=8, implementation="pmap")
    assert virtual.narrow(2).implementation == "pmap"
    assert DataParallel().implementation == DataParallel().narrow(2).implementation == "shard_map"
    assert chosen("auto", 2) == "pmap"


@pytest.mark.slow
def test_jax_keeps_nothing_of_a_loop_that_is_gone():
    def train():
        def apply(variables, x, **_):
            return variables["params"] * x

        data = [(np.ones(8, np.float32), np.ones(8, np.float32))]
        task = ff.TrainTask(apply, optax.sgd(0.1), "mse", data)
        init = {"params": np.zeros(1, np.float32)}
        state = ff.TrainState.create(task.optimizer, init)
        ff.TrainLoop(state, task, 0, devices=jax.devices()[:1], stdout=False).next_step()
        return weakref.ref(apply)

    model = train()
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("given", ["jit", None, ["pmap"]])
def test_an_unknown_implementation_is_refused(given):
    with pytest.raises(ValueError, match='must be "auto", "pmap" or "shard_map", got '):
        DataParallel(implementation=given)
