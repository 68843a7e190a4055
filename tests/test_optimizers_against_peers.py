"""The optimizers and schedules of optax that the page on Keras names, beside those of Keras."""

import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "migrating-from-keras.md"


def pairs_of_optimizers():
    text = PAGE.read_text(encoding="utf-8")
    text = text.split("\n## Optimizers\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w[^`]*\))` \| `([^`]+)` \|$", text, re.MULTILINE)


def steps_of_keras(keras, optimizer, start, gradients):
    variable = keras.Variable(start)
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    return jax.device_get(variable.value)


def steps_of_optax(optimizer, params, gradients):
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "ours"), pairs_of_optimizers())
def test_optimizers_of_a_row_do_the_same(theirs, ours, keras):
    theirs, ours = eval(f"keras.optimizers.{theirs}"), eval(f"optax.{ours}")
    if callable(ours):
        steps = [0, 1, 49, 50, 51, 99, 100]
        found = [float(ours(step)) for step in steps]
        expected = [float(theirs(step)) for step in steps]
    else:
        start, *gradients = np.random.default_rng(0).normal(size=(21, 4, 3)).astype(np.float32)
        found = steps_of_optax(ours, start, gradients)
        expected = steps_of_keras(keras, theirs, start, gradients)
        assert np.abs(expected - start).min() > 0
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
