"""States as compiled steps take them: what is handed on as it is, and what comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flaxfit.loop._held import Form, Held

import flaxfit as ff
from flaxfit.optim import MultiOptimizer, OptimizerDef

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def waves(key, shape, dtype):
    """Weights without a random draw, which takes longer to compile than what is tested here."""
    return np.sin(np.arange(np.prod(shape)), dtype=dtype).reshape(shape)


MODEL = nn.Sequential([nn.Dense(8, kernel_init=waves), nn.relu, nn.Dense(2, kernel_init=waves)])
SGD = OptimizerDef(optax.sgd, learning_rate=0.1, momentum=0.9)


def decay(count):
    return 0.1 / (1 + count)


def loop_of(optimizer=SGD, strategy=None, **options):
    loop_options = {"n_steps_per_checkpoint": 4, "steps_per_call": options.pop("k", 1)}
    stream = ff.ArrayStream(X, Y, batch_size=8, shuffle=False)
    task = ff.TrainTask(MODEL.apply, optimizer, "crossentropy", stream, **options)
    where = {"devices": jax.devices()[:1]} if strategy is None else {"strategy": strategy}
    return ff.TrainLoop(MODEL.init, task, 0, **where, **loop_options, stdout=False)


def given_back(loop):
    """What the compiled step gives back of what it was handed as it is, by position."""
    update, *_ = loop._stepper.programs.compiled.values()
    *_, changed = update.out_tree.unflatten(range(update.out_tree.num_leaves))
    return [*changed]


def still(loop):
    loop.next_checkpoint()
    return [(x.shape, x.dtype.name) for x in loop._stepper._held.still]


KEY, NUMBER = ((2,), "uint32"), ((), "float32")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": optax.adam(1e-3)}, [KEY]),
        ({}, [NUMBER, NUMBER, KEY]),
        ({"k": 2}, [NUMBER, NUMBER, KEY]),
        ({"accumulate": 2}, [NUMBER, NUMBER, KEY]),
        ({"precision": "float16"}, [NUMBER, NUMBER, KEY]),
        (
            {"optimizer": MultiOptimizer(("layers_0/.*", SGD), ("layers_2/.*", SGD))},
            [NUMBER] * 4 + [KEY],
        ),
        ({"optimizer": OptimizerDef(optax.sgd, learning_rate=decay)}, [KEY]),
        ({"freeze": "layers_0/.*"}, [NUMBER, NUMBER, ((8,), "float32"), ((4, 8), "float32"), KEY]),
        ({"strategy": ff.Sharded.fsdp(jax.devices()[:2])}, [NUMBER, NUMBER, KEY]),
    ],
)
def test_what_a_step_leaves_as_it_is_does_not_come_back(options, expected):
    loop = loop_of(**options)
    assert sorted(still(loop)) == sorted(expected)
    assert given_back(loop) == []


def halving(learning_rate):
    """SGD that halves its learning rate: a hyperparameter without a schedule, and yet moving."""
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=learning_rate)

    def update(grads, state, params=None):
        updates, state = inner.update(grads, state, params)
        halved = {"learning_rate": state.hyperparams["learning_rate"] / 2}
        return updates, state._replace(hyperparams=halved)

    return optax.GradientTransformation(inner.init, update)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("make", [None, lambda: ff.Sharded(devices=jax.devices()[:2])])
def test_what_was_held_to_be_still_and_moves_comes_back(k, make):
    loop = loop_of(halving(0.1), None if make is None else make(), k=k)
    first, second = loop.next_checkpoint(), loop.next_checkpoint()
    assert float(second.state.opt_state.hyperparams["learning_rate"]) == pytest.approx(
        0.1 / 2 ** int(second.state.step)
    )
    assert second.loss < first.loss
    assert len(given_back(loop)) == 1


def test_a_state_is_taken_apart_and_put_together():
    state = loop_of(freeze="layers_0/.*").next_checkpoint().state
    form = Form(state, ("layers_0/.*",))
    held = form.apart(state)
    again = form.together(Held(list(held.moving), list(held.still)))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert again.key.dtype == state.key.dtype
    assert jnp.array_equal(jax.random.key_data(again.key), jax.random.key_data(state.key))
    pairs = zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True)
    assert all(a is b for a, b in pairs if b is not state.key)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_key_is_made_once_of_the_same_array_and_none_of_a_trace_is_kept(impl):
    state = loop_of().next_checkpoint().state.replace(key=jax.random.key(3, impl=impl))
    form = Form(state)
    held = form.apart(state)
    jax.jit(lambda x: form.together(held).step + x)(0)
    first, again = form.together(held), form.together(held)
    assert again.key is first.key and first.key == state.key
    assert jax.random.bits(first.key) == jax.random.bits(state.key)
    other = form.apart(state.replace(key=jax.random.key(7, impl=impl)))
    assert form.together(other).key == jax.random.key(7, impl=impl)


def test_a_form_fits_states_of_its_structure_with_the_same_frozen_and_the_same_keys():
    state = loop_of(freeze="layers_0/.*").next_checkpoint().state
    form = Form(state, ("layers_0/.*",))
    assert form.fits(state, ("layers_0/.*",))
    assert not form.fits(state, ())
    assert not form.fits(state.replace(opt_state=()), ("layers_0/.*",))
    assert not form.fits(state.replace(key=jax.random.key(0, impl="rbg")), ("layers_0/.*",))
    assert not form.fits(state.replace(key=jax.random.key_data(state.key)), ("layers_0/.*",))


def test_what_is_still_outlives_the_steps_and_checkpoints_do_not_share_it():
    loop = loop_of(freeze="layers_0/.*")
    loop.next_checkpoint()
    before = loop._stepper._held.still
    later = loop.next_checkpoint()
    assert all(a is b for a, b in zip(before, loop._stepper._held.still, strict=True))
    kernel = later.state.params["layers_0"]["kernel"]
    assert kernel.unsafe_buffer_pointer() not in {x.unsafe_buffer_pointer() for x in before}
    kernel.delete()  # As a user's own function does that it is donated to.
    assert np.isfinite(loop.next_checkpoint().loss)


def test_a_rate_that_is_set_counts_in_the_next_step():
    loop = loop_of()
    loop.next_checkpoint()
    moved = loop.next_checkpoint().state.params
    loop.set_hyperparams(learning_rate=0.0)
    held = loop.next_checkpoint().state.params
    jax.tree.map(np.testing.assert_array_equal, held, moved)
    assert len(loop._stepper.programs.compiled) == 1


def test_a_state_of_plain_dicts_in_another_order_is_gone_on_from():
    loop = loop_of(OptimizerDef(optax.adam, learning_rate=0.1))
    state = loop.next_checkpoint().state
    expected = loop.next_checkpoint().state.params
    adam = state.opt_state.inner_state[0]
    # By name the second moments come first, and they have the shapes of the first ones.
    moments = {"count": adam.count, "nu": adam.nu, "mu": adam.mu}
    assert jax.tree.structure(moments) != jax.tree.structure(adam)
    plain = {
        **state.opt_state._asdict(),
        "inner_state": (moments, *state.opt_state.inner_state[1:]),
    }
    loop.restore(state.replace(opt_state=plain))
    found = loop.next_checkpoint().state.params
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(loop._stepper.programs.compiled) == 1


def test_an_array_that_a_rate_is_set_to_stays_the_users():
    decaying = OptimizerDef(optax.sgd, learning_rate=decay)
    loop = loop_of(MultiOptimizer(("layers_0/.*", SGD), ("layers_2/.*", decaying)))
    loop.next_checkpoint()
    rate = jax.device_put(jnp.float32(0.5), loop._stepper._held.moving[0].sharding)
    loop.set_hyperparams(learning_rate=rate)
    assert np.isfinite(loop.next_checkpoint().loss)
    assert float(rate) == 0.5


def test_a_step_of_ones_own_may_change_the_key():
    @jax.jit
    def step(state, batch):
        key, _ = jax.random.split(state.key)
        params = jax.tree.map(lambda p: p + 1, state.params)
        state = state.replace(step=state.step + 1, params=params, key=key)
        return state, {"loss": (batch.inputs[0].sum(), jnp.ones(()))}

    loop = loop_of(None, step=step)
    key = loop.state.key
    for _ in range(int(loop.next_checkpoint().state.step)):
        key, _ = jax.random.split(key)
    assert jnp.array_equal(jax.random.key_data(loop.state.key), jax.random.key_data(key))


def test_names_of_axes_that_a_state_brings_along_stay_its_own():
    state = loop_of().next_checkpoint().state
    other = state.replace(axes={"params_axes": {}})
    assert Form(state).restructured(other).axes == {"params_axes": {}}
    assert Form(state).restructured(state) is state
