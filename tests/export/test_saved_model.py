import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from flaxfit import InferenceState, export
from flaxfit.export import InputSpec, JaxModule, save_saved_model
from flaxfit.export import _saved_model as saved_model

tf: Any = None
DEFAULT = JaxModule.DEFAULT_METHOD_KEY


@pytest.fixture(scope="module", autouse=True)
def _tensorflow():
    # Where these tests are run, as it takes seconds.
    global tf
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved"


@pytest.fixture(scope="module")
def trainable(net, variables):
    """A module whose parameters, but not its statistics, can be trained."""
    state = InferenceState.create(variables)
    return export.from_state(state, net.apply, InputSpec(("batch", 3)), trainable=True)


@pytest.fixture(scope="module")
def written(trainable, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "net"
    save_saved_model(trainable, path)
    return path


def test_methods_compute_the_same_in_tensorflow(module, apply, variables, x):
    assert module.tensorflow.trainable_variables == []  # Unless that is asked for.
    for n in (1, 4):
        got = module.methods[DEFAULT](x[:n]).numpy()
        np.testing.assert_allclose(got, apply(variables, x[:n]), rtol=1e-5, atol=1e-6)


def test_variables_are_named_by_their_paths(trainable):
    assert [v.name.removesuffix(":0") for v in trainable.tensorflow.variables] == list(
        trainable.named_params
    )
    names = {v.name for v in trainable.tensorflow.trainable_variables}
    assert len(names) == 6
    assert all(name.startswith("params.") for name in names)


def test_a_method_without_a_gradient_is_saved_without(path):
    def double(params, x):
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: params * y, x)

    module, x = JaxModule(np.float32(2), double, input_spec=InputSpec((2,))), np.float32([1, 2])
    assert module.methods[DEFAULT](x).numpy().tolist() == [64, 128]
    with pytest.raises(ValueError, match=r"while_loop.* Pass gradients=False"):
        save_saved_model(module, path)
    save_saved_model(module, path, gradients=False)
    loaded = tf.saved_model.load(str(path))
    assert loaded(tf.constant(x)).numpy().tolist() == [64, 128]
    trainable = JaxModule(np.float32(2), double, input_spec=InputSpec((2,)), trainable=True)
    with pytest.raises(ValueError, match="trainable parameters with gradients=False"):
        save_saved_model(trainable, path, gradients=False)


def test_gradients_in_tensorflow_are_those_of_jax(trainable, apply, variables, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(trainable.methods[DEFAULT](x) ** 2)
    got = tape.gradient(loss, trainable.tensorflow.trainable_variables)

    def jax_loss(params):
        return (apply({**variables, "params": params}, x) ** 2).sum()

    want = jax.tree.leaves(jax.grad(jax_loss)(variables["params"]))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_an_update_reaches_tensorflow_and_jax(module, apply, variables, x):
    method = module.methods[DEFAULT]
    method(x)
    doubled = jax.tree.map(lambda a: 2 * a, variables)
    module.update_variables(doubled)
    want = apply(doubled, x)
    np.testing.assert_allclose(method(x).numpy(), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="shapes or dtypes differ"):
        module.update_variables(jax.tree.map(lambda a: a[..., :1], variables))
    np.testing.assert_allclose(method(x).numpy(), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module.jax_methods[DEFAULT](x), want, rtol=1e-5, atol=1e-6)


def test_inputs_of_another_structure_are_refused(module, x):
    with pytest.raises(ValueError, match=r"differ from input_spec.\nReceived.*\nExpected"):
        module.methods[DEFAULT](x, x)


def test_what_is_loaded_computes_the_same(written, apply, variables, x):
    loaded = tf.saved_model.load(str(written))
    want = apply(variables, x)
    np.testing.assert_allclose(loaded(tf.constant(x)).numpy(), want, rtol=1e-5, atol=1e-6)
    served = loaded.signatures["serving_default"](inputs=tf.constant(x))["outputs"]
    np.testing.assert_allclose(served.numpy(), want, rtol=1e-5, atol=1e-6)


def test_it_is_fine_tuned_in_tensorflow(written, x):
    loaded = tf.saved_model.load(str(written))
    target = tf.ones((4, 2))
    frozen = [v.numpy() for v in loaded.variables if "batch_stats" in v.name]
    losses = []
    for _ in range(30):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((loaded(tf.constant(x)) - target) ** 2)
        losses.append(float(loss))
        grads = tape.gradient(loss, loaded.trainable_variables)
        for variable, grad in zip(loaded.trainable_variables, grads, strict=True):
            variable.assign_sub(0.1 * grad)
    assert losses[-1] < 0.3 * losses[0]
    after = [v.numpy() for v in loaded.variables if "batch_stats" in v.name]
    jax.tree.map(np.testing.assert_array_equal, frozen, after)


@pytest.mark.slow
def test_it_is_served_tuned_in_keras_and_made_a_lite_model_without_jax(
    written, trainable, apply, variables, x, run_child
):
    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import os, sys\nos.environ['KERAS_BACKEND'] = 'tensorflow'\n"
        "for name in ('jax', 'jaxlib', 'flax', 'flaxfit'): sys.modules[name] = None\n"
        "import json, keras, numpy as np, tensorflow as tf\n"
        f"x = np.array({x.tolist()}, np.float32)\n"
        f"loaded = tf.saved_model.load({str(written)!r})\n"
        "with tf.GradientTape() as tape: loss = tf.reduce_sum(loaded(tf.constant(x)) ** 2)\n"
        "grads = tape.gradient(loss, loaded.trainable_variables)\n"
        "names = [v.name.split(':')[0] for v in loaded.trainable_variables]\n"
        "grads = {n: g.numpy().tolist() for n, g in zip(names, grads)}\n"
        "served = loaded(tf.constant(x)).numpy().tolist()\n"
        f"layer = keras.layers.TFSMLayer({str(written)!r}, call_endpoint='serving_default')\n"
        "inputs = keras.Input((3,))\n"
        "model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)['outputs']))\n"
        "model.compile(keras.optimizers.SGD(0.05), 'mse')\n"
        "rows = np.random.default_rng(0).standard_normal((64, 3)).astype('float32')\n"
        "before = [v.numpy() for v in layer.trainable_weights]\n"
        "history = model.fit(rows, rows[:, :1] ** 2, epochs=15, verbose=0).history['loss']\n"
        "changed = sum(bool((a != b.numpy()).any()) "
        "for a, b in zip(before, layer.trainable_weights))\n"
        "tuned = [len(before), changed, history[-1] < 0.7 * history[0]]\n"
        f"made = tf.lite.TFLiteConverter.from_saved_model({str(written)!r}).convert()\n"
        "run = tf.lite.Interpreter(model_content=made).get_signature_runner('serving_default')\n"
        "lite = [run(inputs=x[:n])['outputs'].tolist() for n in (1, 4)]\n"
        "print(json.dumps([served, grads, tuned, lite]))\n"
    )
    done = run_child([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    outputs, grads, tuned, lite = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(outputs, apply(variables, x), rtol=1e-5, atol=1e-6)
    want = jax.grad(lambda p: (apply({**variables, "params": p}, x) ** 2).sum())(
        variables["params"]
    )
    assert sorted(grads) == [n for n, on in trainable.trainable.items() if on]
    for (name, g), w in zip(sorted(grads.items()), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5, err_msg=name)
    assert tuned == [6, 6, True]
    for outputs in lite:
        want = apply(variables, x[: len(outputs)])
        np.testing.assert_allclose(outputs, want, rtol=1e-4, atol=1e-5)


class Tokens(nn.Module):
    """Integers and floats, in and out, and a parameter that is not used."""

    @nn.compact
    def __call__(self, tokens, *, scale):
        self.param("unused", nn.initializers.ones, (2,))
        vectors = nn.Embed(4, 3)(tokens["ids"])
        return {"mean": vectors.mean(1) * scale, "next": tokens["ids"] + 1}


def test_several_methods_and_nested_inputs_become_signatures(path):
    ids, scale = np.array([[0, 1, 3]], np.int32), np.ones((1, 1), np.float32)
    net = Tokens()
    variables = net.init(jax.random.key(0), {"ids": ids}, scale=scale)

    def encode(variables, tokens, scale):
        return net.apply(variables, tokens, scale=scale)

    module = JaxModule(
        variables,
        {"encode": encode, "total": lambda v, *, x: (x.sum(), x)},
        input_spec={
            "encode": ({"ids": InputSpec(("b", "t"), "int32")}, InputSpec(("b", 1))),
            "total": {"x": InputSpec(("n",))},
        },
        trainable=True,
        jit_compile={"encode": True, "total": False},
    )
    save_saved_model(module, path)
    loaded = tf.saved_model.load(str(path))
    assert sorted(loaded.signatures) == ["encode", "total"]
    want = net.apply(variables, {"ids": ids}, scale=scale)
    got = loaded.encode({"ids": tf.constant(ids)}, tf.constant(scale))
    np.testing.assert_allclose(got["mean"].numpy(), want["mean"], rtol=1e-5)
    assert got["next"].numpy().tolist() == [[1, 2, 4]]
    inputs = {"inputs_0_ids": tf.constant(ids), "inputs_1": tf.constant(scale)}
    served = loaded.signatures["encode"](**inputs)
    np.testing.assert_allclose(served["mean"].numpy(), want["mean"], rtol=1e-5)
    total = loaded.signatures["total"](x=tf.constant([1.0, 2.0]))
    assert float(total["outputs_0"]) == 3
    with tf.GradientTape() as tape:
        sum_ = tf.reduce_sum(loaded.encode({"ids": tf.constant(ids)}, tf.constant(scale))["mean"])
    gradient = tape.gradient(sum_, loaded.trainable_variables)
    by_name = {v.name: g for v, g in zip(loaded.trainable_variables, gradient, strict=True)}
    table = by_name["params.Embed_0.embedding:0"].numpy()
    np.testing.assert_allclose(table, np.array([[1], [1], [0], [1]]) / 3 * np.ones((4, 3)), 1e-5)


def test_a_folder_that_differs_from_its_source_is_removed(double, path, monkeypatch):
    right = saved_model._as_numpy

    def wrong(*arguments):
        method = right(*arguments)
        return lambda *inputs: method(*inputs) * 1.001

    monkeypatch.setattr(saved_model, "_as_numpy", wrong)
    with pytest.raises(ValueError, match="Nothing was written"):
        save_saved_model(double, path)
    assert list(path.parent.iterdir()) == []


def test_a_saved_model_is_replaced_and_nothing_else_is(double, path, capsys):
    (path / "precious").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="holds something else"):
        save_saved_model(double, path)
    (path / "precious").rmdir()
    save_saved_model(double, path)
    report = save_saved_model(double, path)
    assert report.max_error < 1e-6
    assert [p.name for p in path.parent.iterdir()] == ["saved"]
    assert str(report) in capsys.readouterr().err


def test_a_state_is_exported_with_its_parameters_trainable(path, net, apply, variables, x):
    stats = {"batch_stats": variables["batch_stats"]}
    state = InferenceState(jnp.int32(0), variables["params"], stats)
    average = jax.tree.map(lambda a: a / 2, variables["params"])
    module = export.from_state(
        state, net.apply, InputSpec(("b", 3)), params=average, trainable=True
    )
    export.write(module, path, "saved_model")
    loaded = tf.saved_model.load(str(path))
    want = apply({**stats, "params": average}, x)
    np.testing.assert_allclose(loaded(tf.constant(x)).numpy(), want, rtol=1e-5, atol=1e-6)
    assert len(loaded.trainable_variables) == 6


def test_without_tensorflow_the_extra_is_named(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r'pip install "flaxfit\[tensorflow\]"'):
        save_saved_model(module, os.devnull)
