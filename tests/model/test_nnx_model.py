"""Model over nnx modules: random streams in the call, instances before and after `fit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import linen as nn
from flax import nnx
from marks import slow, thorough
from sklearn.datasets import load_digits

import flaxfit as ff
from flaxfit.callbacks import EarlyStopping
from flaxfit.export import InputSpec

IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES = (IMAGES[:256] / 16).reshape(-1, 8, 8, 1).astype(np.float32)
LABELS = LABELS[:256]
FIRST = ff.DataParallel(jax.devices()[:1])


class CNN(nnx.Module):
    """A network whose call takes the random streams, as Flax's tutorials write it."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.25)
        self.linear = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x, rngs: nnx.Rngs | None = None):
        x = nnx.relu(self.dropout(self.norm(self.conv(x)), rngs=rngs))
        x = nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        return self.linear(x.reshape(x.shape[0], -1))


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))))


def make_model(module, **options):
    options = {"strategy": FIRST, **options}
    optimizer = options.pop("optimizer", optax.adam(1e-2))
    return ff.Model(module, optimizer, "crossentropy", ["accuracy"], **options)


def fit(model, epochs=1, **options):
    return model.fit(IMAGES, LABELS, epochs=epochs, batch_size=64, verbose=0, **options)


def outputs(module):
    return np.asarray(module(jnp.asarray(IMAGES)))


def assert_predicts(model, module):
    np.testing.assert_allclose(outputs(module), model.predict(IMAGES), atol=1e-5)


@pytest.mark.parametrize("n", [thorough(1), slow(4)])
def test_a_network_whose_call_takes_rngs_is_trained(n):
    model = make_model(CNN(rngs=nnx.Rngs(0)), strategy=ff.DataParallel(jax.devices()[:n]))
    history = fit(model, epochs=10)
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert model.evaluate(IMAGES, LABELS)["accuracy"] > 0.8


def test_an_instance_holds_the_trained_weights_when_fit_has_ended():
    net = MLP(nnx.Rngs(0))
    model = make_model(net)
    kernel, seen = np.asarray(net.hidden.kernel[...]), []
    fit(model, callbacks=[lambda c: seen.append(np.asarray(net.hidden.kernel[...])) or c])
    np.testing.assert_array_equal(seen, [kernel])  # Not before.
    assert model.module is net and (np.asarray(net.hidden.kernel[...]) != kernel).any()
    net.eval()
    assert_predicts(model, net)
    net.train()
    fit(model)  # Training continues from the weights of the model.
    net.eval()
    assert_predicts(model, net)


@pytest.mark.parametrize("error", [KeyboardInterrupt, thorough(ValueError)])
def test_it_holds_them_when_fit_is_interrupted(error):
    def stop(checkpoint):
        raise error

    net = MLP(nnx.Rngs(0))
    model = make_model(net)
    with pytest.raises(error):
        fit(model, epochs=3, callbacks=[stop])
    assert model.step == 4
    net.eval()
    assert_predicts(model, net)


@pytest.mark.slow
@pytest.mark.parametrize("make", [MLP, slow(lambda rngs: MLP(rngs))], ids=["class", "factory"])
def test_the_trained_module_of_a_class_or_a_factory(make):
    model = make_model(make)
    fit(model)
    assert_predicts(model, model.trained())


@pytest.mark.slow
def test_the_trained_module_has_the_average_of_the_weights():
    net = MLP(nnx.Rngs(0))
    model = make_model(net, ema=0.5)
    fit(model)
    assert_predicts(model, model.trained())
    net.eval()
    assert_predicts(model, net)
    raw = model.state.params["hidden"]["kernel"]
    assert (model.trained().hidden.kernel[...] != raw).any()


@pytest.mark.slow
def test_the_trained_module_of_linen_is_bound():
    class Linen(nn.Module):
        train: bool = True

        @nn.compact
        def __call__(self, x):
            x = nn.Dropout(0.5, deterministic=not self.train)(x.reshape(x.shape[0], -1))
            return nn.Dense(10)(x)

    model = make_model(Linen())
    with pytest.raises(RuntimeError, match=r"no weights yet: call build\(x\), fit"):
        model.trained()
    fit(model)
    assert_predicts(model, model.trained())


@pytest.mark.slow
def test_an_instance_is_measured_and_saved_before_any_fit(tmp_path):
    net = MLP(nnx.Rngs(0))
    model = make_model(net)
    net.eval()
    assert_predicts(model, net)
    assert_predicts(model, model.trained())
    expected = optax.softmax_cross_entropy_with_integer_labels(outputs(net), LABELS).mean()
    assert model.evaluate(IMAGES, LABELS)["loss"] == pytest.approx(float(expected), rel=1e-5)
    model.save_weights(tmp_path / "w.safetensors")
    model.export(tmp_path / "m.zip", input_spec=InputSpec(("batch", 8, 8, 1)))
    other = make_model(MLP(nnx.Rngs(7)))
    other.load_weights(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(other.predict(IMAGES), model.predict(IMAGES))
    assert model.step == 0 and "MLP" in model._repr_html_()


def test_weights_of_a_type_are_loaded_alone(tmp_path):
    first, second = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(1))
    make_model(first).save_weights(tmp_path / "w.safetensors")
    model = make_model(second)
    model.load_weights(tmp_path / "w.safetensors", partial=nnx.PathContains("out"))
    params = model.state.params
    np.testing.assert_array_equal(params["out"]["kernel"], first.out.kernel[...])
    np.testing.assert_array_equal(params["hidden"]["kernel"], second.hidden.kernel[...])


@pytest.mark.slow
def test_a_type_of_variables_is_frozen():
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.LoRA(64, 2, 10, base_module=nnx.Linear(64, 10, rngs=rngs), rngs=rngs)

        def __call__(self, x):
            return self.out(x.reshape(x.shape[0], -1))

    net = Adapted(nnx.Rngs(0))
    model = make_model(net, freeze=nnx.Not(nnx.LoRAParam))
    before = jax.tree.map(np.asarray, model.state.params)
    fit(model)
    after = model.state.params["out"]
    np.testing.assert_array_equal(
        after["base_module"]["kernel"], before["out"]["base_module"]["kernel"]
    )
    assert (np.asarray(after["lora_b"]) != before["out"]["lora_b"]).any()


@pytest.mark.slow
def test_the_best_weights_are_those_that_are_written_back():
    net = MLP(nnx.Rngs(0))
    model = make_model(net)
    stopper = EarlyStopping("loss", patience=1, mode="max", restore_best=True)
    fit(model, epochs=4, callbacks=[stopper])
    net.eval()
    assert_predicts(model, net)


def test_a_call_that_returns_its_module_is_refused():
    class Itself(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x):
            return self.layer(x.reshape(x.shape[0], -1)), self

    with pytest.raises(TypeError, match="The call returned a module, Itself"):
        fit(make_model(Itself))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["state", slow("pure dict")])
def test_weights_that_orbax_saved_of_an_nnx_state_are_loaded_without_rules(tmp_path, form):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(64, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.out = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x):
            return self.out(self.dropout(self.norm(x.reshape(x.shape[0], -1))))

    net = Net(nnx.Rngs(3))
    net(IMAGES)  # Statistics of its own.
    state = nnx.state(net)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "net", state if form == "state" else nnx.to_pure_dict(state))
    model = make_model(Net(nnx.Rngs(0)))
    model.load_weights(tmp_path / "net")
    net.eval()
    assert_predicts(model, net)
    other = make_model(CNN(rngs=nnx.Rngs(0)))
    other.load_weights(tmp_path / "net")
    with pytest.raises(ValueError, match=r"params/conv/kernel is not in the checkpoint"):
        other.predict(IMAGES)


def test_an_instance_of_two_models_is_told_of(capsys):
    net = MLP(nnx.Rngs(0))
    first = make_model(net)
    assert "another Model" not in capsys.readouterr().err
    make_model(net)
    assert "another Model has this MLP as its module" in capsys.readouterr().err
    assert first.module is net


class Partitioned(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.hidden = nnx.Linear(64, 8, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


def without_a_mesh():
    with nnx.use_eager_sharding(False):
        return Partitioned(nnx.Rngs(0))


def on_a_mesh():
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"))):
        return Partitioned(nnx.Rngs(0))


def on_another_mesh():
    kind, devices = (jax.sharding.AxisType.Explicit,), jax.devices()[2:4]
    with jax.set_mesh(jax.make_mesh((2,), ("model",), kind, devices=devices)):
        return Partitioned(nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("make", [thorough(without_a_mesh), thorough(on_a_mesh), on_another_mesh])
def test_an_instance_with_named_dimensions_is_taken_as_it_is(make):
    sharded = ff.Sharded({"data": 2, "model": 2}, rules=[("model", "model")])
    models = [make_model(make(), strategy=each) for each in (FIRST, sharded)]
    histories = [fit(model) for model in models]
    assert histories[1]["loss"] == pytest.approx(histories[0]["loss"], rel=1e-5)
    kernel = models[1].state.params["hidden"]["kernel"]
    assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "model")
    assert_predicts(models[1], models[0].trained())


def test_an_error_of_a_step_is_not_hidden_by_writing_back():
    class Failing(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x):
            x = jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return self.out(x.reshape(x.shape[0], -1))

    def fail(x):
        raise RuntimeError("an error of the host")

    model = make_model(Failing(nnx.Rngs(0)))
    with pytest.raises(Exception, match="an error of the host"):
        fit(model)


def test_weights_are_written_back_to_where_they_were():
    device = jax.devices()[1]
    net = MLP(nnx.Rngs(0))
    nnx.update(net, jax.device_put(nnx.state(net, nnx.Param), device))
    fit(make_model(net))
    assert net.out.kernel[...].devices() == {device}


@pytest.mark.slow
def test_a_summary_of_a_call_that_needs_rngs(capsys):
    class Needs(nnx.Module):
        def __init__(self, rngs):
            self.mlp = MLP(rngs)

        def __call__(self, x, rngs):
            return self.mlp(x)

    make_model(Needs).summary(IMAGES)
    assert "Needs" in capsys.readouterr().out
    with pytest.raises(ValueError, match="its Linear at linear"):
        make_model(CNN).summary(IMAGES[:, :, 0])
    make_model(Needs).summary(IMAGES)  # Nothing of the failed one is left.


@pytest.mark.slow
def test_a_class_whose_modules_keep_their_streams_and_have_a_switch_is_trained():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.rngs, self.training = rngs, True
            self.layer = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x):
            x = x.reshape(x.shape[0], -1)
            noise = self.rngs.normal(x.shape) if self.training else 0
            return self.layer(x + noise)

    model = make_model(Noisy, optimizer=optax.sgd(0.0))
    assert fit(model)["loss"][0] != model.evaluate(IMAGES, LABELS)["loss"]
    layer = model.state.params["layer"]
    expected = IMAGES.reshape(-1, 64) @ layer["kernel"] + layer["bias"]
    np.testing.assert_allclose(model.predict(IMAGES), expected, rtol=1e-5, atol=1e-6)
