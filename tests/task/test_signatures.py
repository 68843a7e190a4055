"""Hooks and objectives are checked against what they are called with, when a task is made."""

import functools

import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.task._signatures import takes_ema

MODULE = nn.Dense(1)


def made(**options):
    return ff.TrainTask(MODULE, optax.sgd(0.1), **options)


@pytest.mark.parametrize(
    ("option", "function", "message"),
    [
        ("grads_hook", lambda grads: 0, r"\(grads, state, sums\), but its .* is \(grads\)"),
        ("example_grads_hook", lambda a, state, c: 0, "grads alone, but its .* 'state'"),
        (
            "objective",
            lambda a, b: 0,
            r"\(apply, batch, rngs\), and by keyword with its companions and ema, but .* b\)",
        ),
        ("objective", lambda apply, batch, ema: 0, "multiple values for argument 'ema'"),
    ],
)
def test_a_function_of_other_arguments_is_refused_by_its_name(option, function, message):
    loss = {} if option == "objective" else {"loss": "mse"}
    with pytest.raises(TypeError, match=f"^{option} is called with .*{message}"):
        made(**{option: function}, **loss)


def test_functions_of_any_arguments_are_taken():
    made(loss="mse", grads_hook=lambda grads, *_: grads, example_grads_hook=max)
    made(objective=lambda *given, **named: given[0])


def average_or_none(apply, batch, rngs, ema=None):
    """Reports whether it is given the average."""
    outputs = apply(*batch.inputs)[:, 0]
    return outputs, {"is_given": 0 * outputs + (ema is not None)}


@pytest.mark.slow
@pytest.mark.parametrize(("ema", "is_given"), [(None, 0), (0.9, 1)])
def test_an_average_that_is_kept_is_given_in_the_place_of_a_default(ema, is_given):
    model = ff.Model(MODULE, optax.sgd(0.1), objective=average_or_none, ema=ema)
    x = [[1.0], [2.0]]
    history = model.fit(x, (), verbose=0)
    assert history["is_given"] == [is_given]
    assert model.evaluate(x, ())["is_given"] == is_given


def test_an_average_that_is_bound_is_not_replaced():
    bound = functools.partial(average_or_none, ema=None)
    assert not takes_ema(made(objective=bound, ema=0.9))
    assert takes_ema(ff.EvalTask(MODULE, (), objective=average_or_none))
