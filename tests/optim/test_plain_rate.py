"""The learning rate of plain optax optimizers, beside the optimizer that is made with it."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops import assert_close
from marks import usual

import flaxfit as ff
from flaxfit.optim import set_hyperparams
from flaxfit.optim._plain_rate import LiveRate, live_rate, matched, plain_rate

PARAMS = {"w": jnp.arange(1.0, 13.0).reshape(3, 4) / 10, "b": jnp.ones(3)}

REFUSED = {
    # They do not end in a scaling by the rate.
    *("adafactor", "lars", "lbfgs", "muon"),
    *("fromage", "optimistic_adam", "rprop", "scale_by_rprop"),
    *("cocob", "dadapt_adamw", "madgrad", "momo", "momo_adam", "prodigy", "scale_by_madgrad"),
    *("schedule_free", "schedule_free_adamw", "schedule_free_sgd"),
    "dpsgd",  # Needs other arguments, and per-example gradients.
}
NEEDS_MORE = {"sophia"}
"""Of an update: the objective."""


def factories():
    """The optimizers of optax that have a learning rate, by name."""
    found = {}
    for module in (optax, optax.contrib):
        for name, each in vars(module).items():
            is_public = inspect.isfunction(each) and not name.startswith("_")
            if is_public and "learning_rate" in inspect.signature(each).parameters:
                found[name] = each
    return found


# The usual ones, and those that use their rate in a form of their own.
TYPICAL = (
    *("adam", "adamw", "galore", "lamb", "lion", "noisy_sgd", "rmsprop", "sgd", "sm3", "sophia"),
)


def moved(optimizer, state, n_steps=3):
    params = PARAMS
    for i in range(n_steps):
        grads = jax.tree.map(lambda x, i=i: jnp.sin(3 * x + i) + 0.2 * x, params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.slow
@pytest.mark.parametrize("name", usual(*TYPICAL, of=sorted(factories().keys() - REFUSED)))
def test_a_rate_that_is_set_moves_parameters_as_one_that_was_given(name):
    make = factories()[name]
    with warnings.catch_warnings():  # noisy_sgd will need a key.
        warnings.simplefilter("ignore")
        optimizer, other = make(learning_rate=0.3), make(learning_rate=0.1)
        assert plain_rate(optimizer) == 0.3
        if name in NEEDS_MORE:
            return
        state = set_hyperparams(LiveRate(optimizer).init(PARAMS), learning_rate=0.1)
        expected = moved(other, other.init(PARAMS))
        found = moved(LiveRate(optimizer), state)
    # Updates are multiplied by the quotient of both rates, which rounds.
    assert_close(found, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.fromage(0.25),
        optax.rprop(0.25),
        optax.contrib.prodigy(0.25),
        optax.contrib.schedule_free_sgd(0.25),
        optax.sgd(1.0),  # Its factor, -1, is that of a change of sign.
        optax.sgd(0.0),
        optax.rmsprop(0.25, momentum=0.9),
        optax.chain(optax.sgd(0.25), optax.add_decayed_weights(0.1)),
        optax.MultiSteps(optax.sgd(0.25), 2),
        optax.adam(optax.constant_schedule(0.25)),
        optax.chain(optax.scale(0.1), optax.scale_by_adam(), optax.scale(-1.0)),
        optax.chain(optax.scale(0.1), optax.adam(1.0)),
        optax.chain(optax.scale(-0.1), optax.chain(optax.scale_by_adam())),
        optax.multi_transform({0: optax.sgd(0.25), 1: optax.sgd(0.5)}, {"w": 0, "b": 1}),
        optax.inject_hyperparams(optax.sgd)(0.25),
        ff.optim.OptimizerDef(optax.sgd, learning_rate=0.25),
        optax.identity(),
    ],
)
def test_a_rate_that_is_not_certain_is_not_told(optimizer):
    assert live_rate(optimizer) is None
    assert plain_rate(optax.chain(optax.clip(1.0), optax.chain(optax.adamw(0.25)))) == 0.25


def test_the_rate_that_an_optimizer_was_made_with_changes_no_bit():
    optimizer = optax.adam(0.3)
    found = moved(LiveRate(optimizer), LiveRate(optimizer).init(PARAMS))
    expected = moved(optimizer, optimizer.init(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_state_is_that_of_an_optimizer_def():
    live = LiveRate(optax.adam(0.25)).init(PARAMS)
    other = ff.optim.OptimizerDef(optax.adam, learning_rate=0.25).init(PARAMS)
    assert jax.tree.structure(live) == jax.tree.structure(other)


def test_an_optimizer_follows_a_state_with_a_rate_and_the_reverse():
    plain = optax.adam(0.25)
    bare, live = plain.init(PARAMS), LiveRate(plain).init(PARAMS)
    assert matched(plain, bare) == (plain, bare)
    optimizer, state = matched(plain, live)
    assert isinstance(optimizer, LiveRate) and state is live
    _, adopted = matched(optimizer, bare)
    assert jax.tree.structure(adopted) == jax.tree.structure(live)
