import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxfit import TrainState
from flaxfit.loop._placed_state import PlacedState
from flaxfit.optim._extended import extend
from flaxfit.strategies import DataParallel

FIRST = jax.devices()[:1]


def placed(optimizer=None):
    optimizer = optax.inject_hyperparams(optax.sgd)(0.1) if optimizer is None else optimizer
    params = {"a": jnp.ones(2), "b": jnp.zeros(3)}
    held = PlacedState(DataParallel(FIRST))
    held.place(TrainState.create(optimizer, {"params": params}, key=0))
    return held


def test_it_holds_a_copy_of_what_it_was_given():
    held, params = PlacedState(DataParallel(FIRST)), {"a": jnp.ones(2)}
    held.place(TrainState.create(optax.sgd(0.1), {"params": params}, key=0))
    for leaf in held.leaves:
        leaf.delete()  # As a step does, which donates them.
    np.testing.assert_array_equal(params["a"], 1)


def test_it_takes_over_a_state_of_its_own_without_a_copy():
    held = PlacedState(DataParallel(FIRST))
    state = TrainState.create(optax.sgd(0.1), {"params": {"a": jnp.ones(2)}}, key=0)
    held.place(state, may_donate=True)
    ours, given = held.value.params["a"], state.params["a"]
    assert ours.unsafe_buffer_pointer() == given.unsafe_buffer_pointer()


def test_what_is_lent_can_be_read_until_it_is_taken_back():
    held = placed()
    state, grads = held.lend()
    assert grads is None
    np.testing.assert_array_equal(state.value.params["a"], 1)
    held.take_back()
    with pytest.raises(RuntimeError, match="donated to a later training step"):
        _ = state.value


def test_kept_gradients_are_lent_too():
    held = placed()
    held.grads = {"a": 3.0}
    _, grads = held.lend()
    assert grads.value == {"a": 3.0}


def test_a_hyperparameter_is_set_where_there_are_some():
    held = placed()
    assert held.has_hyperparams and not placed(optax.sgd(0.1)).has_hyperparams
    held.set_hyperparams(None, {"learning_rate": 0.5})
    assert float(held.value.opt_state.hyperparams["learning_rate"]) == 0.5


def test_another_optimizer_keeps_the_moments_of_what_stays_trained():
    def adam(freeze=()):
        return extend(optax.adam(0.1), clip_norm=None, freeze=freeze, ema=None, scales_loss=False)

    held = placed(adam())
    state = held.value
    moved = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, state.opt_state)
    held.place(state.replace(opt_state=moved))
    held.set_optimizer(adam(("a",)))
    shapes = {x.shape for x in jax.tree.leaves(held.value.opt_state)}
    assert (3,) in shapes and (2,) not in shapes
    moments = [x for x in jax.tree.leaves(held.value.opt_state) if x.shape == (3,)]
    np.testing.assert_array_equal(moments, 1)
