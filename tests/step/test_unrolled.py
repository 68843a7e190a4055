"""Loops that are written out: their results, their order, and the operations that ask for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

import flaxfit as ff
from flaxfit.step._jaxpr import holds
from flaxfit.step._unrolled import scan


def body(total, x):
    total = jnp.sin(total) * x + total
    return total, total**2


@pytest.mark.parametrize("unroll", [False, True])
def test_it_gives_what_the_turns_give_one_by_one(unroll):
    xs = jnp.linspace(0, 1, 15).reshape(5, 3)
    total, squares = jax.jit(lambda t, x: scan(body, t, x, unroll=unroll))(jnp.ones(3), xs)
    expected, step = jnp.ones(3), jax.jit(body)
    for x, square in zip(xs, squares, strict=True):
        expected, one = step(expected, x)
        np.testing.assert_allclose(square, one, rtol=1e-6)
    np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_there_is_no_loop_where_it_is_written_out_but_borders():
    def text(unroll):
        function = jax.jit(lambda x: scan(body, x[0], x, unroll=unroll))
        return function.lower(jnp.ones((5, 3))).as_text()

    assert "while" in text(unroll=False)
    assert "while" not in text(unroll=True)
    assert "optimization_barrier" in text(unroll=True)


@pytest.mark.parametrize("unroll", [False, True])
def test_what_no_turn_changes_comes_back_itself(unroll):
    def turn(carry, x):
        return (carry[0] + x, carry[1]), None

    @jax.jit
    def run(total, kept, xs):
        (total, same), _ = scan(turn, (total, kept), xs, unroll=unroll)
        assert same is kept
        return total

    assert run(0.0, 1.0, jnp.arange(3.0)) == 3


def convolve(x):
    return lax.conv(x, jnp.ones((1, 1, 2, 2)), (1, 1), "SAME")


@pytest.mark.parametrize(
    "function",
    [
        convolve,
        jax.jit(convolve),
        jax.checkpoint(convolve),
        jax.grad(lambda x: convolve(x).sum()),
        lambda x: lax.cond(x.sum() > 0, convolve, lambda x: x, x),
        lambda x: lax.fori_loop(0, 2, lambda _, x: convolve(x), x),
        lambda x: lax.map(convolve, x[None])[0],
    ],
    ids=["bare", "jit", "remat", "grad", "cond", "loop", "map"],
)
def test_a_convolution_is_found_wherever_it_is(function):
    program = jax.make_jaxpr(function)(jnp.ones((1, 1, 4, 4)))
    assert holds(program, "conv_general_dilated")
    assert not holds(program, "dot_general")


def test_programs_that_are_used_often_are_looked_at_once():
    def doubled(function, depth):
        return jax.jit(lambda x: function(function(x))) if depth else function

    function = jnp.sin
    for depth in range(40):  # 2**40 uses of the innermost, which none would see the end of.
        function = doubled(function, depth)
    assert not holds(jax.make_jaxpr(function)(1.0), "conv_general_dilated")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's loops on a CPU")
@pytest.mark.parametrize(("features", "longest"), [((3, 3), 4), ((), 6)])
def test_own_steps_with_convolutions_are_written_out_too(features, longest):
    module: Any = nn.Conv(1, features) if features else nn.Dense(1)
    optimizer = optax.sgd(0.1)

    def step(state, batch):
        def loss(params):
            return jnp.mean(module.apply({"params": params}, *batch.inputs) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradient(optimizer, grads), {"loss": value}

    data = ff.ArrayStream(np.ones((8, 4, 4, 1), np.float32), batch_size=4)
    task = ff.TrainTask(module.apply, optimizer, None, data, step=step)
    loop = ff.TrainLoop(
        module.init,
        task,
        0,
        n_steps=13,
        n_steps_per_checkpoint=6,
        devices=jax.devices()[:1],
        steps_per_call=6,
        stdout=False,
    )
    dispatched = [0]
    loop.watchers.append(dispatched.append)
    list(loop)
    assert max(np.diff(dispatched)) == longest


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's loops on a CPU")
def test_of_several_tasks_those_with_convolutions_are_written_out():
    optimizer, images = optax.sgd(0.1), np.ones((8, 4, 4, 1), np.float32)
    targets = np.ones((8, 1), np.float32)

    def of_dense(variables, x, **_):
        return x.mean((1, 2)) * variables["params"]["scale"], {}

    def of_convolutions(variables, x, **_):
        kernel = variables["params"]["scale"] * jnp.ones((1, 1, 2, 2))
        return lax.conv(x, kernel, (1, 1), "SAME").mean((2, 3)), {}

    task = ff.MultiTask(
        {
            name: ff.TrainTask(apply, optimizer, "mse", ff.ArrayStream(x, targets, batch_size=4))
            for name, apply, x in (
                ("dense", of_dense, images),
                ("convolving", of_convolutions, images.reshape(8, 1, 4, 4)),
            )
        },
        weights={"convolving": 4.0},
    )
    loop = ff.TrainLoop(
        lambda rngs, x: {"params": {"scale": jnp.ones(())}},
        task,
        0,
        n_steps=24,
        n_steps_per_checkpoint=24,
        first_checkpoint=24,
        devices=jax.devices()[:1],
        steps_per_call=2,
        stdout=False,
    )
    unrolled = {}
    loop.watchers.append(lambda step: unrolled.setdefault(loop._stepper.unrolls, step))
    list(loop)
    assert {*unrolled} == {False, True}
