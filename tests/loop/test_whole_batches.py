"""Batches that are neither padded nor divided: graphs, ragged rows, numbers beside the arrays."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import assert_agree
from loops import assert_close, assert_equal, given, small_waves
from marks import diagonal, slow, thorough

import flaxfit as ff

RNG = np.random.default_rng(0)


class Graphs(NamedTuple):
    """Several graphs in one, as jraph's GraphsTuple has them."""

    nodes: Any
    senders: Any
    receivers: Any
    n_node: Any
    globals: Any = None


def graphs(n_node):
    n = sum(n_node)
    edges = RNG.integers(0, n, (2, 2 * n)).astype(np.int32)
    nodes = RNG.normal(size=(n, 4)).astype(np.float32)
    return Graphs(nodes, *edges, np.array(n_node, np.int32))


class GraphNet(nn.Module):
    """One round of messages, and the sum over the nodes of each graph."""

    @nn.compact
    def __call__(self, graph):
        sent = nn.Dense(8, kernel_init=small_waves)(graph.nodes)[graph.senders]
        n = graph.nodes.shape[0]
        own = nn.Dense(8, kernel_init=small_waves)(graph.nodes)
        nodes = nn.relu(jax.ops.segment_sum(sent, graph.receivers, n)) + own
        owner = jnp.repeat(jnp.arange(len(graph.n_node)), graph.n_node, total_repeat_length=n)
        return nn.Dense(2, kernel_init=small_waves)(
            jax.ops.segment_sum(nodes, owner, len(graph.n_node))
        )


SIZES = [(3, 5, 2), (4, 4, 2), (1, 6, 6), (2, 2, 9)]
BATCHES = [(graphs(sizes), RNG.normal(size=(3, 2)).astype(np.float32)) for sizes in SIZES]
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def make_task(data=BATCHES, **options):
    options = {"pad": False, **options}
    return ff.TrainTask(GraphNet(), OPTIMIZER, "mse", data, ["mae"], **options)


def make_loop(task=None, **options):
    options = {"n_steps": 4, "devices": jax.devices()[:1], "stdout": False, **options}
    return ff.TrainLoop(GraphNet(), task or make_task(), 0, **options)


apply = jax.jit(GraphNet().apply)


def outputs_of(state, graph):
    return np.asarray(apply(state.variables, graph))


def mean_squared(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


def by_hand(state, data, loss=mean_squared, optimizer=OPTIMIZER):
    """The losses and the parameters of the same training, in a loop of its own."""

    @jax.jit
    def step(params, opt_state, graph, targets):
        def loss_of(params):
            return loss(GraphNet().apply({"params": params}, graph), targets)

        value, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params, losses = state.params, []
    opt_state = optimizer.init(params)
    for batch in data:
        params, opt_state, value = step(params, opt_state, *batch)
        losses.append(float(value))
    return losses, jax.device_get(params)


@pytest.mark.parametrize(
    "options",
    [
        slow({}),
        thorough({"strategy": ff.Sharded.fsdp(devices=jax.devices()[:4]), "devices": None}),
    ],
    ids=["one device", "sharded"],
)
def test_graphs_train_as_in_a_loop_by_hand(options):
    loop = make_loop(**options)
    losses, params = by_hand(loop.state, BATCHES)
    assert [checkpoint.loss for checkpoint in loop] == pytest.approx(losses, rel=1e-5)
    assert_close(jax.device_get(loop.state.params), params, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_graphs_train_in_debug_mode_as_in_compiled_steps():
    """A model of few operations, as each is compiled for each size."""

    @given
    def init(rngs, graph):
        return {"params": np.ones(1, np.float32)}

    def apply(variables, graph, **_):
        sent = variables["params"] * graph.nodes[graph.senders, :2]
        return jax.ops.segment_sum(sent, graph.receivers, 3), {}

    def losses(**options):
        task = ff.TrainTask(apply, OPTIMIZER, "mse", BATCHES[:2], pad=False)
        options |= {"devices": jax.devices()[:1], "stdout": False}
        loop = ff.TrainLoop(init, task, 0, **options)
        return [checkpoint.loss for checkpoint in loop]

    assert losses(debug=True) == pytest.approx(losses(), rel=1e-5)


@pytest.mark.slow
def test_graphs_have_weights_and_a_number_of_examples():
    weights = np.array([1, 0, 2], np.float32)
    loop = make_loop(make_task([(*BATCHES[0], weights)]))
    graph, targets = BATCHES[0]
    outputs = outputs_of(loop.state, graph)
    checkpoint = loop.next_step()
    values = np.mean((outputs - targets) ** 2, -1)
    assert checkpoint.loss == pytest.approx(float(np.sum(weights * values) / 3), rel=1e-5)
    assert checkpoint.n_examples == 3
    measured = ff.callbacks.Throughput()
    measured.attach(loop)
    assert {"examples_per_second"} == set(measured(checkpoint).metrics) - set(checkpoint.metrics)
    assert loop.step_cost().flops > 0
    with pytest.raises(ValueError, match="a batch of another size cannot be derived"):
        loop.step_cost(7)


@pytest.mark.slow
def test_graphs_are_measured():
    state = make_loop().state
    task = ff.EvalTask(GraphNet(), ["mae"], BATCHES, loss="mse", pad=False)
    found = ff.EvalLoop(task, strategy=ff.Sharded()).measure(state)
    errors = np.concatenate([outputs_of(state, graph) - targets for graph, targets in BATCHES])
    assert found["loss"] == pytest.approx(np.mean(errors**2), rel=1e-5)
    assert found["mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-5)


@pytest.mark.slow
def test_a_model_trains_and_measures_graphs():
    model = ff.Model(GraphNet(), OPTIMIZER, "mse", pad=False, strategy=ff.Sharded())
    data = BATCHES[:2]
    model.fit(data, verbose=0)
    before = model.evaluate(data)["loss"]
    history = model.fit(data, epochs=20, validation_data=data, verbose=0)
    assert history["val_loss"][-1] == model.evaluate(data)["loss"] < before
    outputs = model.predict([(graph,) for graph, _ in BATCHES])
    state = jax.device_get(model.state)
    expected = np.concatenate([outputs_of(state, graph) for graph, _ in BATCHES])
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_outputs_without_rows_are_no_predictions():

    def apply(v, graph, **_):
        return jnp.sum(graph.nodes)

    def init(rngs, graph):
        return {"params": np.ones(1)}

    model = ff.Model((init, apply), OPTIMIZER, None, pad=False, step=lambda s, b: (s, {}))
    model.state = ff.init_state(init, OPTIMIZER, 0, (BATCHES[0][0],))
    with pytest.raises(ValueError, match="output 0 has shape .. for a batch of any number"):
        model.predict([BATCHES[0][:1]])


@pytest.mark.slow
def test_a_graph_may_have_as_many_nodes_as_edges_and_targets():
    even = Graphs(BATCHES[0][0].nodes[:3], *np.zeros((2, 3), np.int32), np.ones(3, np.int32))
    data = [BATCHES[0], (even, BATCHES[0][1])]
    sharded = {"devices": None, "strategy": ff.Sharded(devices=jax.devices()[:2])}
    losses = [[c.loss for c in make_loop(make_task(data), **o)] for o in ({}, sharded)]
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_a_run_over_graphs_resumes_at_its_position():
    first = make_loop()
    saved = [first.next_checkpoint() for _ in range(3)][1]
    again = make_loop()
    again.restore(saved)
    assert_equal(again.next_checkpoint().state, first.state)


@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ({"pad": True}, {}),
        ({"accumulate": 2}, {}),
        slow({}, {"devices": jax.devices()[:2]}),
        ({}, {"devices": None, "strategy": ff.DataParallel(virtual_replicas=8)}),
    ],
    ids=["padding", "parts", "data-parallel", "virtual replicas"],
)
def test_what_pads_or_divides_refuses_them_in_words(options, loop):
    with pytest.raises(ValueError, match="different numbers.*TrainTask.pad=False.*Sharded"):
        make_loop(make_task(**options), **loop).next_step()
    x, init = np.ones((4, 1), np.float32), lambda rngs, *inputs: {"params": np.ones(1)}

    def apply(v, x, factor, **_):
        return (v["params"] * factor * x, {})

    task = ff.TrainTask(apply, OPTIMIZER, "mse", [((x, 2.0), x)], **{"pad": False, **options})
    with pytest.raises(TypeError, match="got the scalar 2.*TrainTask.pad=False.*Sharded"):
        ff.TrainLoop(init, task, 0, stdout=False, **loop).next_step()


ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)


def clipped_step(state, batch):
    """A step on a number that comes with the batch, and changes from one to the next."""
    rows, clip = batch.inputs["rows"], batch.inputs["clip"]
    assert jnp.shape(clip) == ()
    grads = {"w": jnp.clip(rows.mean(0), -clip, clip)}
    return state.apply_gradient(SGD, grads), {"clip": clip, "epoch": batch.inputs["epoch"]}


SGD = optax.sgd(1.0)


TWO_STEPS = {"steps_per_call": 2, "n_steps_per_checkpoint": 2}
WAYS = {
    "one device": {"devices": jax.devices()[:1]},
    "two steps at once": {"devices": jax.devices()[:1], **TWO_STEPS},
    "sharded": {},
    "two steps at once, sharded": TWO_STEPS,
}


@pytest.mark.parametrize(
    ("way", "kind"), diagonal(WAYS, [float, np.float32, np.asarray, jnp.asarray])
)
def test_a_step_takes_numbers_beside_the_rows(way, kind):
    clips = [0.5, 2.0, 0.25, 1.0]
    data = [{"rows": ROWS, "clip": kind(clip), "epoch": i} for i, clip in enumerate(clips)]
    task = ff.TrainTask(step=clipped_step, optimizer=SGD, data=data)

    def init(rngs, **inputs):
        return {"params": {"w": np.zeros(3, np.float32)}}

    options = {"first_checkpoint": 2, "n_steps_per_checkpoint": 2, **WAYS[way]}
    loop = ff.TrainLoop(init, task, 0, n_steps=4, stdout=False, **options)
    metrics = [checkpoint.metrics for checkpoint in loop]
    np.testing.assert_allclose(loop.state.params["w"], np.full(3, -sum(clips)))
    assert [each["clip"] for each in metrics] == [1.25, 0.625]
    assert [each["epoch"] for each in metrics] == [0.5, 2.5]


def test_a_step_takes_ragged_rows():
    def step(state, batch):
        (values, splits), _ = batch.inputs, batch.targets
        n = values.shape[0]
        owner = jnp.repeat(jnp.arange(len(splits) - 1), jnp.diff(splits), total_repeat_length=n)
        sums = jax.ops.segment_sum(values, owner, len(splits) - 1)
        return state, {"longest": sums.max()}

    data = [((np.ones(7, np.float32), np.array([0, 2, 7])), ())]
    task = ff.TrainTask(step=step, data=data)

    def init(rngs, *inputs):
        return {"params": np.zeros(1, np.float32)}

    checkpoint = ff.TrainLoop(init, task, 0, stdout=False).next_step()
    assert checkpoint.metrics["longest"] == 5 and checkpoint.n_examples == 1


def masked_loss(logits, labels):
    """The loss of the labels that are there, as in Flax's example of molecules (ogbg)."""
    is_there = ~jnp.isnan(labels)
    values = optax.sigmoid_binary_cross_entropy(logits, jnp.where(is_there, labels, 0))
    return values, is_there


@pytest.mark.slow
def test_molecules_with_missing_labels_train_as_in_a_loop_by_hand():
    labels = [(targets > 0).astype(np.float32) for _, targets in BATCHES]
    for each in labels:
        each[RNG.random(each.shape) < 0.4] = np.nan
    data = [(graph, each) for (graph, _), each in zip(BATCHES, labels, strict=True)][:2]
    options = {"pad": False, "check_finite": False, "clip_norm": 0.5}
    loop = make_loop(ff.TrainTask(GraphNet(), OPTIMIZER, masked_loss, data, **options), n_steps=2)

    def mean_of_those_there(outputs, labels):
        values, is_there = masked_loss(outputs, labels)
        return jnp.sum(jnp.where(is_there, values, 0)) / jnp.sum(is_there)

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), OPTIMIZER)
    losses, params = by_hand(loop.state, data, mean_of_those_there, optimizer)
    assert [checkpoint.loss for checkpoint in loop] == pytest.approx(losses, rel=1e-6)
    assert_agree(loop.state.params, params)


@pytest.mark.slow
def test_an_objective_takes_graphs():
    def objective(apply, batch, rngs):
        (graph,), (targets,) = batch.inputs, batch.targets
        return jnp.mean((apply(graph) - targets) ** 2, -1), {"nodes": graph.n_node}

    data = BATCHES[:2]
    task = ff.TrainTask(GraphNet(), OPTIMIZER, data=data, objective=objective, pad=False)
    tasks = task, make_task(data)
    found, expected = ([c.loss for c in make_loop(each, n_steps=2)] for each in tasks)
    assert found == pytest.approx(expected, rel=1e-5)
