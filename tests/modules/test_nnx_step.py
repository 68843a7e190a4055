"""Steps in NNX's idiom, beside loops of `nnx.jit` as Flax's tutorials write them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from loops import assert_close, assert_equal
from marks import thorough

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter
from flaxfit.modules import from_nnx, nnx_step

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Net(nnx.Module):
    """A dense layer, batch normalization and dropout."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 6, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(6, 1, rngs=rngs)])

    def __call__(self, x):
        return self.layers[0](self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def train_step(model, optimizer, batch):
    """As in Flax's tutorials."""
    (x,), (y,) = batch.inputs, batch.targets

    def loss_fn(model):
        outputs = model(x)
        return ((outputs - y) ** 2).mean(), outputs

    (loss, outputs), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return {"loss": loss, "highest": outputs.max()}


def gan_step(generator, discriminator, g_optimizer, d_optimizer, batch, rngs):
    (real,) = batch.inputs
    noise = rngs.normal((len(real), 3))

    def d_loss_fn(discriminator):
        fake = generator(noise)
        return nnx.softplus(-discriminator(real)).mean() + nnx.softplus(discriminator(fake)).mean()

    def g_loss_fn(generator, discriminator):
        return nnx.softplus(-discriminator(generator(noise))).mean()

    d_loss, d_grads = nnx.value_and_grad(d_loss_fn)(discriminator)
    d_optimizer.update(discriminator, d_grads)
    g_loss, g_grads = nnx.value_and_grad(g_loss_fn)(generator, discriminator)
    g_optimizer.update(generator, g_grads)
    return {"d_loss": d_loss, "g_loss": g_loss}


def make(tx=None, model=None):
    model = model or Net(nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, tx or optax.adam(0.1), wrt=nnx.Param)}


def make_gan():
    rngs = nnx.Rngs(0)
    generator = nnx.Linear(3, 4, rngs=rngs)
    discriminator = nnx.Sequential(
        nnx.Linear(4, 8, use_bias=False, rngs=rngs),
        nnx.BatchNorm(8, rngs=rngs),
        nnx.tanh,
        nnx.Linear(8, 1, rngs=rngs),
    )
    return {
        "generator": generator,
        "discriminator": discriminator,
        "g_optimizer": nnx.Optimizer(generator, optax.sgd(0.1), wrt=nnx.Param),
        "d_optimizer": nnx.Optimizer(discriminator, optax.adam(0.02), wrt=nnx.Param),
    }


def loop_of(step, init=None, data=None, **options):
    data = data or ff.ArrayStream(X, Y, batch_size=16)
    options = {"devices": jax.devices()[:1], "n_steps": 6, "stdout": False, **options}
    init = step.init if init is None else init
    return ff.TrainLoop(init, ff.TrainTask(step=step, data=data), 0, **options)


def gan_loop(step, init=None, **options):
    return loop_of(step, init, ff.ArrayStream(X, batch_size=16), **options)


def last(loop):
    *_, checkpoint = loop
    return checkpoint


def arrays(*objects):
    return jax.tree.leaves([nnx.state(each, nnx.Not(nnx.RngState)) for each in objects])


@pytest.fixture(scope="module")
def expected():
    """The state that `train_step` trains to."""
    return last(loop_of(nnx_step(train_step, **make()))).state


def batches(n):
    starts = [16 * (i % 4) for i in range(n)]
    return [ff.Batch((X[start : start + 16],), (Y[start : start + 16],)) for start in starts]


def keys_of(loop, i):
    """The key of the streams in modules and that of `rngs`, at a step."""
    return jax.random.split(jax.random.fold_in(loop.state.key, i))


@pytest.mark.slow
def test_it_equals_a_loop_of_nnx_jit_with_batch_norm_and_dropout():
    step = nnx_step(train_step, **make())
    loop = loop_of(step)
    by_hand = make()
    compiled = nnx.jit(train_step)
    streams = by_hand["model"].dropout.rngs
    for i, (batch, checkpoint) in enumerate(zip(batches(6), loop, strict=True)):
        streams.count[...] = jnp.uint32(0)
        streams.key[...] = jax.random.fold_in(keys_of(loop, i)[0], 1)
        sums = compiled(**by_hand, batch=batch)
        assert checkpoint.metrics == pytest.approx(jax.tree.map(float, sums), rel=1e-6)
    step.write_back(loop.state)
    assert_close(arrays(*step._objects.values()), arrays(*by_hand.values()), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_two_optimizers_of_a_gan_equal_those_by_hand():
    objects, by_hand = make_gan(), make_gan()
    step = nnx_step(gan_step, **objects)
    loop = gan_loop(step)
    compiled = nnx.jit(gan_step)
    for i, (batch, checkpoint) in enumerate(zip(batches(6), loop, strict=True)):
        sums = compiled(**by_hand, batch=batch, rngs=nnx.Rngs(keys_of(loop, i)[1]))
        assert checkpoint.metrics == pytest.approx(jax.tree.map(float, sums), rel=1e-6)
    step.write_back(loop.state)
    assert_close(arrays(*objects.values()), arrays(*by_hand.values()), rtol=1e-6, atol=1e-7)
    assert int(objects["g_optimizer"].step[...]) == 6


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path):
    make_step = lambda: nnx_step(gan_step, **make_gan())  # noqa: E731
    whole = last(gan_loop(make_step()))
    last(gan_loop(make_step(), n_steps=3, callbacks=CheckpointFileWriter(tmp_path)))
    step = make_step()
    resumed = gan_loop(step, CheckpointFileReader(tmp_path, step.init))
    assert resumed.step == 3
    assert_equal(last(resumed).state.variables, whole.state.variables)
    assert_equal(resumed.state.opt_state, whole.state.opt_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        thorough({"steps_per_call": 3}),
        thorough({"devices": None}),
        {"steps_per_call": 3, "devices": None},
    ],
    ids=["scan", "4", "both"],
)
def test_it_runs_in_one_program_of_several_steps_and_over_several_devices(expected, options):
    loop = loop_of(nnx_step(train_step, **make()), first_checkpoint=6, **options)
    if "devices" in options:
        assert isinstance(loop.strategy, ff.Sharded) and loop.strategy.n_devices == 4
    assert_close(last(loop).state.variables, expected.variables, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_states_of_its_optimizers_lie_where_their_parameters_do():
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", None))
    with nnx.use_eager_sharding(False):
        objects = make(model=nnx.Linear(4, 1, kernel_init=kernel_init, rngs=nnx.Rngs(0)))
    strategy = ff.Sharded({"data": 2, "model": 2}, rules=[("batch", "data"), ("embed", "model")])
    step = nnx_step(train_step, **objects)
    loop = loop_of(step, devices=None, strategy=strategy)
    state = loop.state_in_place
    adam = state.opt_state["optimizer"]["opt_state"][0]
    for kernel in (state.params["kernel"], adam.mu["kernel"], adam.nu["kernel"]):
        assert kernel.sharding.spec == jax.P("model")
    expected = last(loop_of(step)).state
    assert_close(last(loop).state.params, expected.params, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_model_and_optimizer_in_one_is_split(expected):
    def step(optimizer, batch):
        (x,), (y,) = batch.inputs, batch.targets
        loss, grads = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(
            optimizer.model
        )
        optimizer.update(grads)
        return {"loss": loss}

    optimizer = nnx.ModelAndOptimizer(Net(nnx.Rngs(0)), optax.adam(0.1))
    made = nnx_step(step, optimizer=optimizer)
    checkpoint = last(loop_of(made))
    assert_close(checkpoint.state.variables, expected.variables, rtol=1e-6, atol=1e-7)
    model = optimizer.model
    made.write_back(checkpoint.state)
    assert optimizer.model is model
    np.testing.assert_array_equal(
        model.norm.mean[...], expected.model_state["batch_stats"]["norm"]["mean"]
    )


@pytest.mark.slow
def test_one_module_is_evaluated_and_returned_as_ever():
    objects = make()
    model = objects["model"]
    task = ff.EvalTask(model, ["mse"], (X, Y))
    loop = loop_of(nnx_step(train_step, **objects), model, callbacks=ff.EvalLoop(task))
    checkpoint = last(loop)
    module = checkpoint.module()
    assert module is not model and not objects["optimizer"].step[...]
    expected = ((np.asarray(module(X)) - Y) ** 2).mean()
    assert checkpoint.metrics["val_mse"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_of_several_modules_each_is_in_the_plain_state_and_evaluated_by_its_name():
    checkpoint = gan_loop(nnx_step(gan_step, **make_gan())).next_step()
    state = checkpoint.state
    assert {*state.params} == {"generator", "discriminator"}
    assert {*state.params["discriminator"]["layers"]} == {"0", "1", "3"}
    assert {*state.model_state} == {"batch_stats"}
    adam = state.opt_state["d_optimizer"]["opt_state"][0]
    assert isinstance(adam, optax.ScaleByAdamState)
    assert jax.tree.structure(adam.mu) == jax.tree.structure(state.params["discriminator"])
    assert not any("nnx" in type(each).__module__ for each in jax.tree.leaves(state))
    found = checkpoint.module()
    assert found["discriminator"].layers[1].use_running_average
    whole = nnx.Dict({name: make_gan()[name] for name in ("generator", "discriminator")})
    apply = from_nnx(whole, call=lambda both, z: both["generator"](z), train=False).apply
    z = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(apply(state.variables, z), found["generator"](z))
    with pytest.raises(TypeError, match="modules of nnx_step have no call"):
        nnx_step(gan_step, **make_gan()).apply(state.variables, z)


@pytest.mark.slow
def test_a_model_is_fitted_by_it_and_holds_the_weights_when_fit_ends():
    objects = make(optax.adam(0.05))
    model = ff.Model(objects["model"], None, "mse", step=nnx_step(train_step, **objects))
    history = model.fit(X, Y, batch_size=16, epochs=3, verbose=0)
    assert history["loss"][-1] < history["loss"][0]
    np.testing.assert_allclose(model.predict(X), model.trained()(X), rtol=1e-5, atol=1e-6)
    weights = objects["model"].hidden.kernel[...]
    np.testing.assert_array_equal(weights, model.state.params["hidden"]["kernel"])


@pytest.mark.slow
def test_hyperparameters_of_its_optimizers_are_read_and_set():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    loop = loop_of(nnx_step(train_step, **make(tx)))
    loop.next_step()
    assert loop.hyperparams["learning_rate"] == 0.5
    loop.set_hyperparams(learning_rate=0.0)
    before = loop.state.params
    assert_equal(loop.next_step().state.params, before)


@pytest.mark.slow
def test_masked_optimizers_and_those_of_a_part_are_split():
    model = Net(nnx.Rngs(0))
    tx = optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    loop_of(nnx_step(train_step, **make(tx, model))).next_step()

    def step(model, optimizer, batch):
        part = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("layers")))
        grads = nnx.grad(lambda model: (model(batch.inputs[0]) ** 2).mean(), argnums=part)(model)
        optimizer.update(model.layers, nnx.State({0: grads["layers"][0]}))
        return {}

    optimizer = nnx.Optimizer(model.layers, optax.adam(0.1), wrt=nnx.Param)
    state = loop_of(nnx_step(step, model=model, optimizer=optimizer)).next_step().state
    np.testing.assert_array_equal(state.params["hidden"]["kernel"], model.hidden.kernel[...])
    moved = np.abs(state.params["layers"]["0"]["kernel"] - model.layers[0].kernel[...])
    np.testing.assert_allclose(moved, 0.1, rtol=1e-4)


@pytest.mark.slow
def test_a_module_and_a_part_of_it_are_one_in_the_state(expected):
    def step(model, part, optimizer, batch):
        assert model.hidden is part
        return train_step(model, optimizer, batch)

    objects = make()
    made = nnx_step(step, **objects, part=objects["model"].hidden)
    state = last(loop_of(made)).state
    assert_close(state.params["model"]["hidden"], expected.params["hidden"], rtol=1e-6, atol=1e-7)
    assert {*state.params} == {"model"}


@pytest.mark.slow
def test_what_layers_sow_is_no_part_of_the_state():
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x):
            self.seen = nnx.Intermediate((x,))  # As `sow` does it.
            return self.inner(x)

    objects = make(model=Sowing(nnx.Rngs(0)))
    objects["model"](X)
    assert {*last(loop_of(nnx_step(train_step, **objects))).state.variables} == {"params"}


MODEL = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
OTHER = nnx.Optimizer(Net(nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)


@pytest.mark.parametrize(
    ("objects", "error", "message"),
    [
        ({"model": 3}, TypeError, "cannot use model=3: pass an instance of an NNX module"),
        ({"model": Net}, TypeError, "pass an instance of an NNX module"),
        ({"model": MODEL, "optimizer": optax.sgd(0.1)}, TypeError, r"wrap it: nnx.Optimizer\("),
        ({"model": MODEL, "optimizer": nnx.metrics.Average()}, TypeError, "return what it meas"),
        ({"model": MODEL, "rngs": nnx.Rngs(0)}, TypeError, "given an nnx.Rngs of the step"),
        ({"model": MODEL}, TypeError, r"with model=, batch=, .*'optimizer'"),
        ({"optimizer": OTHER}, TypeError, r"takes \(model, optimizer, batch\)"),
        (
            {"model": MODEL, "optimizer": OTHER},
            ValueError,
            "optimizer is an optimizer of another module: it keeps states for hidden/kernel",
        ),
    ],
)
def test_what_is_neither_module_nor_optimizer_of_it_is_named(objects, error, message):
    with pytest.raises(error, match=message):
        nnx_step(train_step, **objects)


def test_a_step_without_modules_or_sums_is_named():
    with pytest.raises(ValueError, match="needs the module that it trains"):
        nnx_step(lambda batch: {})
    step = nnx_step(lambda model, batch: model(batch.inputs[0]).mean(), model=MODEL)
    with pytest.raises(TypeError, match=r"returned .*Tracer; expected numbers by the names"):
        loop_of(step).next_step()


def test_optimizers_and_states_of_others_are_refused():
    step = nnx_step(train_step, **make())
    with pytest.raises(ValueError, match="The step has the optimizers given to nnx_step"):
        ff.TrainTask(step=step, optimizer=optax.sgd(0.1))
    state = ff.TrainState.create(optax.sgd(0.1), step.init(None))
    with pytest.raises(ValueError, match=r"TrainLoop\(step.init"):
        loop_of(step, state).next_step()
    with pytest.raises(TypeError, match="updated in its function alone"):
        step.optimizer.update({}, {})
