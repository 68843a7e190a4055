from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import freeze

from flaxfit import Model, export
from flaxfit.export import InputSpec, JaxModule

Scale = namedtuple("Scale", "factor offset")
SPEC = InputSpec(("b",))


def affine(params, x):
    return x * params.factor + params.offset


def test_parameters_are_named_by_their_paths(module):
    assert list(module.named_params) == [
        "batch_stats.BatchNorm_0.mean",
        "batch_stats.BatchNorm_0.var",
        "params.BatchNorm_0.bias",
        "params.BatchNorm_0.scale",
        "params.Dense_0.bias",
        "params.Dense_0.kernel",
        "params.Dense_1.bias",
        "params.Dense_1.kernel",
    ]


def test_paths_of_haiku_lists_and_named_tuples_make_names():
    params = {"mlp/~/linear_0": [1.0, Scale(2.0, 3.0)]}
    module = JaxModule(params, lambda p, x: x, input_spec=SPEC)
    assert list(module.named_params) == [
        "mlp._.linear_0.0",
        "mlp._.linear_0.1.factor",
        "mlp._.linear_0.1.offset",
    ]


@pytest.mark.parametrize(
    ("params", "function", "error", "message"),
    [
        ({"a": {"b": 1.0}, "a.b": 2.0}, affine, ValueError, "both be named 'a.b'"),
        ({"key": jax.random.key(0)}, affine, TypeError, "'key' is a random key"),
        ({}, {"f": 3}, TypeError, "must be a function"),
    ],
)
def test_what_makes_no_module_is_refused(params, function, error, message):
    with pytest.raises(error, match=message):
        JaxModule(params, function, input_spec={"f": SPEC})


def test_methods_take_their_own_inputs():
    module = JaxModule(
        jnp.float32(2),
        {"add": lambda p, a, b: a + p * b["y"], "named": lambda p, *, x: p * x},
        input_spec={"add": (SPEC, {"y": SPEC}), "named": {"x": SPEC}},
    )
    one, two = np.ones(1, np.float32), 2 * np.ones(1, np.float32)
    assert float(module.jax_methods["add"](one, {"y": two})[0]) == 5
    assert float(module.jax_methods["named"](x=two)[0]) == 4


@pytest.mark.parametrize("argument", ["input_spec", "jit_compile"])
def test_other_keys_than_those_of_the_methods_are_refused(argument):
    arguments = {"input_spec": {"f": SPEC}, "jit_compile": {"f": True}, argument: {"g": SPEC}}
    with pytest.raises(ValueError, match=rf"{argument} must have the same keys.*\n.*'g'.*\n.*'f'"):
        JaxModule(1.0, {"f": lambda p, x: x}, **arguments)


def test_trainable_is_a_bool_or_a_tree_of_them():
    params = Scale(1.0, 2.0)
    assert JaxModule(params, affine, input_spec=SPEC).with_gradient is False
    module = JaxModule(params, affine, input_spec=SPEC, trainable=Scale(True, False))
    assert module.trainable == {"factor": True, "offset": False}
    with pytest.raises(ValueError, match="structure of params"):
        JaxModule(params, affine, input_spec=SPEC, trainable={"factor": True})


def test_processing_goes_around_the_function():
    module = JaxModule(
        2.0,
        lambda p, a, b: (p * a, b),
        input_spec=InputSpec(("b",), "uint8"),
        preprocess=lambda x: (x / 255, x),
        postprocess=lambda outputs: {"scaled": outputs[0]},
    )
    outputs = module.jax_methods[JaxModule.DEFAULT_METHOD_KEY](np.uint8([255]))
    assert {name: float(value[0]) for name, value in outputs.items()} == {"scaled": 2.0}


def test_outputs_become_plain_containers():
    module = JaxModule(1.0, lambda p, x: Scale(x, freeze({"y": x})), input_spec=SPEC)
    outputs = module.jax_methods[JaxModule.DEFAULT_METHOD_KEY](np.ones(1))
    assert jax.tree.structure(outputs) == jax.tree.structure({"factor": 0, "offset": {"y": 0}})


def test_the_parameters_are_a_copy():
    weights = np.ones(2, np.float32)
    module = JaxModule(weights, lambda p, x: p, input_spec=SPEC)
    weights[:] = 0
    assert np.asarray(module.params).tolist() == [1, 1]


def test_updated_variables_are_used(module, net, variables, x):
    doubled = jax.tree.map(lambda a: 2 * a, variables)
    module.update_variables(doubled)
    method = module.jax_methods[JaxModule.DEFAULT_METHOD_KEY]
    np.testing.assert_allclose(method(x), net.apply(doubled, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["params"], "PyTree structure"),
        (lambda v: jax.tree.map(lambda a: a[..., :1], v), r"kernel is float32\[3, 5\], got"),
        (lambda v: jax.tree.map(lambda a: a.astype(jnp.int32), v), r"got int32\[5\]"),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(module, variables, change, message):
    before = jax.device_get(module.named_params)
    with pytest.raises(ValueError, match=message):
        module.update_variables(change(variables))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(module.named_params))


@pytest.mark.parametrize("save", [export.save, export.save_saved_model, export.save_onnx])
def test_a_model_in_place_of_a_module_is_answered_with_its_method(save, tmp_path):
    with pytest.raises(TypeError, match=r"got Model\. .*model\.export\(path\)"):
        save(Model(nn.Dense(1), optax.sgd(0.1), "mse"), tmp_path / "model")
