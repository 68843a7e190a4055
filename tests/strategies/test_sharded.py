"""Sharded: the numbers of one device, and a part of the state on each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint
from loops import assert_close, small_waves
from marks import usual

import flaxfit as ff
from flaxfit import checkpoints

# test_eight_devices.py runs the first tests, on eight devices.
N = len(jax.devices())
VOCAB, WIDTH = 64, 64
STRATEGIES = {
    "data": lambda: ff.DataParallel(),
    "fsdp": lambda: ff.Sharded.fsdp(),
    "tensor": lambda: ff.Sharded.tensor_parallel(4),
    "fsdp x tensor": lambda: ff.Sharded.tensor_parallel(2, fsdp=True),
}


def names(*left_out):
    """Those to try: all but one, on the eight devices of `test_eight_devices.py`, are thorough."""
    kept = ("tensor",) if N == 8 else ()
    return usual(*kept, of=[name for name in STRATEGIES if name not in left_out])


def named(*names):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class Transformer(nn.Module):
    """A block of a causal transformer whose dimensions have the usual names."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(VOCAB, WIDTH, embedding_init=named("vocab", "embed"), name="embed")
        h = table(tokens)
        attend = nn.MultiHeadDotProductAttention(
            num_heads=4,
            use_bias=False,
            kernel_init=named("embed", "heads", "kv"),
            out_kernel_init=named("heads", "kv", "embed"),
        )
        h += attend(nn.RMSNorm()(h), mask=nn.make_causal_mask(tokens))
        up = nn.Dense(4 * WIDTH, use_bias=False, kernel_init=named("embed", "mlp"))
        down = nn.Dense(WIDTH, use_bias=False, kernel_init=named("mlp", "embed"))
        inner = with_logical_constraint(nn.gelu(up(h)), ("batch", "length", "mlp"))
        return table.attend(nn.RMSNorm()(h + down(inner)))


rng = np.random.default_rng(0)
X = rng.normal(size=(38, 16)).astype(np.float32)
X[::3] *= 4  # So that parts of a batch have statistics of their own.
Y = np.sin(X.sum(1))
TOKENS = rng.integers(0, VOCAB, (70, 8)).astype(np.int32)
NEXT = (3 * TOKENS + 1) % VOCAB


@functools.cache
def trained(name):
    """A transformer after 50 steps; each epoch ends with a batch of 6 of 16 examples."""
    strategy = ff.DataParallel(jax.devices()[:1]) if name == "one" else STRATEGIES[name]()
    model = ff.Model(
        Transformer(), optax.adamw(1e-3), "crossentropy", ["accuracy"], strategy=strategy
    )
    model.fit(TOKENS, NEXT, batch_size=16, epochs=10, verbose=0)
    return model


def close(a, b, atol=1e-5):
    assert_close(ff.gather(a), ff.gather(b), rtol=1e-4, atol=atol)


def losses(model):
    assert model.history is not None
    return model.history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_fifty_steps_of_a_transformer_agree_with_one_device(name):
    model, one = trained(name), trained("one")
    assert model.step == 50
    np.testing.assert_allclose(losses(model), losses(one), rtol=1e-5)
    # Adam divides by the root of what may be rounding alone.
    close(model.state.params, one.state.params, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("n", [1, 19])
def test_evaluation_and_prediction_of_any_number_agree_with_one_device(name, n):
    model, one = trained(name), trained("one")
    found = model.evaluate(TOKENS[:n], NEXT[:n], batch_size=8)
    expected = one.evaluate(TOKENS[:n], NEXT[:n], batch_size=8)
    assert found == pytest.approx(expected, rel=1e-4)
    outputs = model.predict(TOKENS[:n], batch_size=8)
    assert isinstance(outputs, np.ndarray)
    np.testing.assert_allclose(outputs, one.predict(TOKENS[:n], batch_size=8), atol=2e-3)


def bytes_on(device, tree):
    """The bytes of the shards of a tree that one device holds."""
    leaves = jax.tree.leaves(jax.tree.map(as_data, tree))
    shards = [s for leaf in leaves for s in leaf.addressable_shards if s.device == device]
    return sum(shard.data.nbytes for shard in shards)


def as_data(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


@pytest.mark.slow
@pytest.mark.parametrize("name", names("data"))
def test_each_device_holds_its_part_of_the_state(name):
    model = trained(name)
    state = model.state
    whole = sum(as_data(leaf).nbytes for leaf in jax.tree.leaves(state))
    n_parts = 4 if name == "tensor" else N
    arrays = {path: (size, parts) for path, size, parts in sizes(state)}
    small = sum(size for size, parts in arrays.values() if parts == 1)
    assert small < 0.02 * whole
    for device in jax.devices():
        assert bytes_on(device, state) <= 1.1 * whole / n_parts + small
    described = model.strategy.describe(state)
    assert described.bytes_per_device == bytes_on(jax.devices()[0], state)
    assert described.n_bytes == whole and described.replicated_bytes == small


def sizes(state):
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.tree.map(as_data, state)):
        shard = leaf.addressable_shards[0].data
        yield jax.tree_util.keystr(path), leaf.nbytes, leaf.size // max(shard.size, 1)


def abstract_state(optimizer=None):
    optimizer = optimizer or optax.adam(1e-3)
    create = functools.partial(ff.init_state, Transformer().init, optimizer, inputs=(TOKENS[:1],))
    return jax.eval_shape(create, key=jax.random.key(0)), create


@pytest.mark.slow
def test_a_state_is_born_in_parts():
    strategy = ff.Sharded.fsdp()
    abstract, create = abstract_state()
    layout = strategy.describe(abstract)
    born = jax.jit(lambda key: create(key=key), out_shardings=strategy.shardings(abstract))
    memory = born.lower(jax.random.key(0)).compile().memory_analysis()
    peak = memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert peak < 0.6 * layout.n_bytes

    before = {id(array) for array in jax.live_arrays()}
    task = ff.TrainTask(Transformer().apply, optax.adam(1e-3), "crossentropy", (TOKENS, NEXT))
    loop = ff.TrainLoop(Transformer().init, task, 0, strategy=strategy, stdout=False)
    new = [array for array in jax.live_arrays() if id(array) not in before]
    largest = max(new, key=lambda array: array.nbytes)
    assert largest.nbytes == 4 * WIDTH * WIDTH * 4
    assert {s.data.nbytes for s in largest.addressable_shards} == {largest.nbytes // N}
    assert bytes_on(jax.devices()[0], loop.state) == layout.bytes_per_device


def four(shape=None, **options):
    return ff.Sharded(shape, devices=jax.devices()[:4], **options)


# Steps.


class Net(nn.Module):
    """A layer with or without BatchNorm, with arrays large enough for FSDP."""

    norm: str | None = "here"
    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(256, use_bias=False, kernel_init=small_waves)(x)
        if self.norm:
            axis = "replica" if self.norm == "everywhere" else None
            x = nn.BatchNorm(use_running_average=not self.train, axis_name=axis)(x)
        return nn.Dense(1, kernel_init=small_waves)(nn.tanh(x))[:, 0]


OPTIMIZER = optax.sgd(0.02, momentum=0.9)


def make_loop(strategy, norm=None, n_steps=5, *, init=None, optimizer=OPTIMIZER, **options):
    task = ff.TrainTask(Net(norm).apply, optimizer, "mse", ff.ArrayStream(X, Y, batch_size=16))
    options |= {"n_steps_per_checkpoint": n_steps, "first_checkpoint": n_steps, "stdout": False}
    init = Net(norm).init if init is None else init
    return ff.TrainLoop(init, task, 1, n_steps=n_steps, strategy=strategy, **options)


def loop_of(*arguments, **options):
    loop = make_loop(*arguments, **options)
    (checkpoint,) = loop
    return loop, checkpoint


def one():
    return ff.DataParallel(jax.devices()[:1])


@functools.cache
def on_one():
    return loop_of(one(), "here")[1]


@pytest.mark.slow
def test_batchnorm_is_that_of_the_whole_batch_for_every_remainder():
    # The third batch has 6 examples, which rows of weight 0 would not leave as they are.
    _, found = loop_of(four(fsdp=True), "here")
    expected = on_one()
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4)
    close(found.state.replace(key=0), expected.state.replace(key=0))


@pytest.mark.slow
def test_batchnorm_under_pmap_is_that_of_each_replica_unless_it_names_the_axis():
    expected = on_one()
    _, apart = loop_of(ff.DataParallel(jax.devices()[:2]), "here")
    assert abs(apart.loss - expected.loss) > 1e-3
    _, together = loop_of(ff.DataParallel(jax.devices()[:2]), "everywhere")
    assert together.metrics == pytest.approx(expected.metrics, rel=1e-4)
    close(together.state.params, expected.state.params)


@pytest.mark.slow
def test_several_steps_in_a_call_are_those_steps():
    strategy = four(fsdp=True)
    _, single = loop_of(strategy, n_steps=6)
    _, several = loop_of(strategy, n_steps=6, steps_per_call=3)
    close(several.state.replace(key=0), single.state.replace(key=0))
    assert several.loss == pytest.approx(single.loss, rel=1e-5)
    kernel = several.state.params["Dense_0"]["kernel"]
    expected = strategy.shardings(several.state).params["Dense_0"]["kernel"]
    assert kernel.sharding.is_equivalent_to(expected, 2)


@pytest.mark.slow
def test_accumulated_and_resident_batches_agree_with_one_device():
    def run(strategy):
        data = ff.ArrayStream(jnp.asarray(X[:32]), jnp.asarray(Y[:32]), batch_size=16)
        task = ff.TrainTask(Net(None).apply, optax.sgd(0.02), "mse", data, accumulate=2)
        loop = ff.TrainLoop(Net(None).init, task, 1, n_steps=3, strategy=strategy, stdout=False)
        return list(loop)[-1]

    found, expected = run(four(fsdp=True)), run(one())
    close(found.state.params, expected.state.params)


@pytest.mark.slow
def test_the_state_and_the_gradients_that_a_checkpoint_holds_are_copies_in_parts():
    loop, checkpoint = loop_of(four(fsdp=True), keep_grads=True)
    before = ff.gather(checkpoint.state.params)
    loop.next_step()
    jax.tree.map(np.testing.assert_array_equal, ff.gather(checkpoint.state.params), before)
    for tree in (checkpoint.state.params, checkpoint.grads, loop.state.opt_state[0].trace):
        shards = tree["Dense_0"]["kernel"].addressable_shards
        assert [shard.data.shape for shard in shards] == [(16, 64)] * 4


@pytest.mark.slow
def test_hyperparameters_and_frozen_parameters_can_be_set_on_the_way():
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    loop = make_loop(four(fsdp=True), optimizer=optimizer)
    loop.next_step()
    loop.set_hyperparams(learning_rate=0.0)
    before = ff.gather(loop.state.params)
    loop.next_step()
    jax.tree.map(np.testing.assert_array_equal, ff.gather(loop.state.params), before)
    loop.set_hyperparams(learning_rate=0.1)
    loop.freeze = "Dense_0/.*"
    loop.next_step()
    after = ff.gather(loop.state.params)
    np.testing.assert_array_equal(after["Dense_0"]["kernel"], before["Dense_0"]["kernel"])
    assert np.abs(after["Dense_1"]["kernel"] - before["Dense_1"]["kernel"]).max() > 0


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(tmp_path):
    saved = None
    mixed = four({"data": 2, "model": 2}, fsdp=True)
    replicas = [ff.DataParallel(jax.devices()[:n]) for n in (4, 2)]
    for n_steps, strategy in enumerate((four(fsdp=True), mixed, one(), *replicas), start=2):
        reader = checkpoints.CheckpointFileReader(tmp_path, Net(None).init)
        writer = checkpoints.CheckpointFileWriter(tmp_path, asynchronous=False)
        loop = make_loop(strategy, n_steps=n_steps, init=reader, callbacks=[writer])
        restored = ff.gather(loop.state.replace(key=0))
        if saved is not None:
            jax.tree.map(np.testing.assert_array_equal, restored, saved)
        *_, last = loop
        saved = ff.gather(last.state.replace(key=0))
    assert int(saved.step) == 6
    _, uninterrupted = loop_of(one(), n_steps=6)
    assert_close(saved.params, ff.gather(uninterrupted.state.params), atol=1e-6)


def test_a_restored_state_is_never_whole_on_a_device(tmp_path):
    state = ff.init_state(Net(None).init, OPTIMIZER, 0, (X[:1],)).replace_step(5)
    checkpoints.save(tmp_path, state)
    before = {id(array) for array in jax.live_arrays()}
    reader = checkpoints.CheckpointFileReader(tmp_path, Net(None).init)
    loop = make_loop(four(fsdp=True), init=reader)
    assert loop.step == 5
    large = [a for a in jax.live_arrays() if id(a) not in before and a.shape == (16, 256)]
    assert large
    assert {s.data.shape for a in large for s in a.addressable_shards} == {(16, 64)}


# Pieces.


@pytest.mark.slow
def test_names_of_activations_act_within_a_step_in_any_layer():
    seen = []

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = named("embed", "heads", "kv")
            x = nn.DenseGeneral((2, 8), kernel_init=init, use_bias=False)(x)
            x = with_logical_constraint(x, ("batch", "heads", "kv"))
            jax.debug.inspect_array_sharding(x, callback=seen.append)
            return x

    x = np.ones((4, 8), np.float32)
    state = ff.init_state(Layer().init, optax.sgd(0.1), 0, (x,)).for_inference()
    seen.clear()
    strategy = four({"data": 2, "model": 2})
    arguments = (strategy.place(state), strategy.split(ff.Batch((x,))))
    run = strategy.compile_split(ff.make_predict_step(Layer().apply), arguments)
    assert strategy.join(run(*arguments)).shape == (4, 2, 8)
    assert [sharding.spec[:2] for sharding in seen] == [("data", "model")]


def test_a_batch_is_split_over_the_axes_that_divide_it():
    strategy = four({"data": 2, "fsdp": 2})
    assert [strategy.narrow(n).n_devices for n in (8, 6, 5)] == [4, 2, 1]
    assert strategy.narrow(8) is strategy and strategy.narrow(2) is strategy.narrow(6)
    assert four({"model": 4}).n_devices == 1
    assert four({"x": 2, "y": 2}, rules=[("batch", ("x", "y"))]).n_devices == 4


def test_gathered_arrays_are_whole_and_on_the_host():
    strategy = four(fsdp=True)
    state = ff.InferenceState(np.int32(3), {"w": np.ones((64, 64), np.float32)}, {})
    placed = strategy.place(state)
    assert not placed.params["w"].is_fully_replicated
    whole = ff.gather({"state": placed, "key": jax.random.key(2), "note": 1})
    assert isinstance(whole["state"].params["w"], np.ndarray)
    np.testing.assert_array_equal(whole["state"].params["w"], state.params["w"])
    assert whole["key"] == jax.random.key(2) and whole["note"] == 1


@pytest.mark.slow
def test_a_model_is_saved_loaded_and_used_under_sharded(tmp_path):
    model = ff.Model(Net(None), optax.adam(0.01), "mse", strategy=four(fsdp=True))
    model.fit(X, Y, batch_size=16, verbose=0)
    model.save(tmp_path)
    loaded = ff.Model(Net(None), optax.adam(0.01), "mse", strategy=four(fsdp=True))
    loaded.load(tmp_path)
    np.testing.assert_allclose(loaded.predict(X), model.predict(X), rtol=1e-6)
    assert loaded.evaluate(X, Y) == pytest.approx(model.evaluate(X, Y))
