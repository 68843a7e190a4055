"""Optimizer: a pytree of parameters and state that goes through jit, dicts and pmap."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

from flaxfit.optim import MultiOptimizer, OptimizerDef

PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.zeros(1)}
DEFINITION = OptimizerDef(optax.adam, learning_rate=0.1)
GROUPS = MultiOptimizer(("w", DEFINITION))


def test_the_gradient_comes_with_the_loss_and_what_it_returns_beside():
    optimizer = DEFINITION.create(PARAMS)
    loss, aux, grads = optimizer.compute_gradient(lambda p: ((p["w"] ** 2).sum(), p["b"]))
    assert float(loss) == 5.0
    np.testing.assert_array_equal(aux, PARAMS["b"])
    np.testing.assert_array_equal(grads["w"], [2.0, 4.0])
    assert optimizer.compute_gradient(lambda p: p["w"].sum())[1] is None


def test_it_is_a_pytree_whose_definition_is_not_a_leaf():
    optimizer = DEFINITION.create(PARAMS)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(optimizer))
    doubled = jax.tree.map(lambda x: 2 * x, optimizer)
    assert doubled.optimizer_def is DEFINITION


def test_it_comes_back_from_plain_dicts():
    for definition in (DEFINITION, GROUPS):
        optimizer = definition.create(PARAMS).apply_gradient(PARAMS).apply_gradient(PARAMS)
        kept = serialization.msgpack_restore(
            serialization.msgpack_serialize(jax.device_get(optimizer.state_dict()))
        )
        restored = definition.create(PARAMS).restore_state(kept)
        assert jax.tree.structure(restored) == jax.tree.structure(optimizer)
        jax.tree.map(np.testing.assert_array_equal, restored, optimizer)


def test_replicas_that_average_their_gradients_agree():

    def step(optimizer, scale):
        grads = jax.tree.map(lambda p: scale * jnp.ones_like(p), optimizer.target)
        return optimizer.apply_gradient(jax.lax.pmean(grads, "replica"))

    step = jax.pmap(step, "replica", in_axes=(None, 0), out_axes=None)
    after = step(GROUPS.create(PARAMS), jnp.arange(4.0))
    expected = GROUPS.create(PARAMS).apply_gradient(jax.tree.map(jnp.ones_like, PARAMS))
    jax.tree.map(np.testing.assert_allclose, after.target, expected.target)


def test_plain_dicts_of_something_else_are_refused():
    optimizer = OptimizerDef(optax.adam, learning_rate=0.1).create({"w": jnp.ones(2)})
    other = OptimizerDef(optax.adam, learning_rate=0.1).create({"w": jnp.ones(5)})
    with pytest.raises(ValueError, match=r"target/w is float32 \(5,\), not float32 \(2,\)"):
        optimizer.restore_state(other.state_dict())


@pytest.mark.parametrize("definition", [DEFINITION, GROUPS])
@pytest.mark.parametrize("name", ["learning_rate", "lr"])
def test_a_hyperparameter_is_not_set_by_assignment(definition, name):
    words = r"keeps learning_rate in its state: .*loop.set_hyperparams\(learning_rate=...\)"
    with pytest.raises(AttributeError, match=words):
        setattr(definition, name, 0.5)


def test_an_optimizer_of_ones_own_may_keep_what_it_was_given():
    class Descent(OptimizerDef):
        def __init__(self, learning_rate):
            super().__init__(learning_rate=learning_rate)
            self.learning_rate = learning_rate

        def init_param_state(self, param): ...

        def apply_param_gradient(self, step, hyper_params, param, state, grad): ...

    assert Descent(0.1).learning_rate == 0.1
