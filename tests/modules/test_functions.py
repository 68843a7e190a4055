import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flaxfit.modules import from_function, train_and_eval


def test_given_parameters_are_copied_so_that_donation_leaves_them_alone():
    params = {"w": jnp.ones(2)}
    variables = from_function(lambda p, x: p["w"] * x, params).init(None, jnp.ones(2))
    jax.tree.map(lambda leaf: leaf.delete(), variables)
    np.testing.assert_array_equal(params["w"], [1, 1])


def test_an_init_function_has_the_key_of_the_parameters_and_the_inputs():
    def create(key, x):
        return jax.random.normal(key, x.shape)

    init, apply = from_function(lambda w, x: w * x, create)
    x, key = jnp.ones((2, 3)), jax.random.key(5)
    variables = jax.jit(init)({"params": key, "dropout": jax.random.key(0)}, x)
    np.testing.assert_array_equal(variables["params"], create(key, x))
    np.testing.assert_array_equal(init(key, x)["params"], create(key, x))
    np.testing.assert_array_equal(apply(variables, x), create(key, x))


def test_a_callable_pytree_is_parameters_and_no_init_function():
    class Linear(struct.PyTreeNode):
        w: jax.Array

        def __call__(self, x):
            return self.w * x

    init, apply = from_function(lambda model, x: model(x), Linear(jnp.full(2, 3.0)))
    np.testing.assert_array_equal(apply(init(None), jnp.ones(2)), [3, 3])


def test_the_function_is_given_the_key_of_its_stream_or_none():
    seen = []

    def function(params, x, rng):
        seen.append(rng)
        return x

    apply = from_function(function, {}, rng="dropout").apply
    key = jax.random.key(0)
    apply({"params": {}}, 1.0, rngs={"dropout": key})
    apply({"params": {}}, 1.0, rngs=key)
    apply({"params": {}}, 1.0)
    assert seen == [key, key, None]


def test_a_stateful_function_has_its_state_as_a_collection():
    def function(params, state, x):
        return params * x + state, state + 1

    init, apply = from_function(function, lambda key, x: (2.0, jnp.zeros(())), stateful=True)
    variables = init(jax.random.key(0), 3.0)
    assert variables == {"params": 2.0, "state": 0.0}
    assert apply(variables, 3.0) == 6
    assert apply(variables, 3.0, mutable=["state"]) == (6, {"state": 1})
    assert apply(variables, 3.0, mutable=["batch_stats"]) == (6, {})


def test_a_function_without_state_has_no_updates():
    init, apply = from_function(lambda w, x: w * x, 2.0)
    assert apply(init(None), 3.0, mutable=True) == (6, {})


def test_a_switch_of_the_function_is_set_in_training_and_in_evaluation():
    def function(params, x, is_training):
        return x if is_training else -x

    model = from_function(function, lambda key, x, is_training: {"in_training": is_training})
    training, evaluation = train_and_eval(model)
    assert training.apply(training.init(None, 1.0), 1.0) == 1
    assert evaluation.apply(evaluation.init(None, 1.0), 1.0) == -1
    assert training.init(None, 1.0)["params"]["in_training"]
    bound = from_function(functools.partial(function, is_training=True), {})
    assert bound.apply({"params": {}}, 1.0) == 1
