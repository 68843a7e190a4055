"""Whether a program combines the rows of a batch, in every disguise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxfit.step._broadcasting import check_by_row, couples_rows


def rows(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct((8, *shape), dtype)


def whole(b):
    return b[:, 0].astype(int)


def one_hot(a, rows, b):
    return jnp.zeros_like(a).at[rows, whole(b)].set(1)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a @ b.T).sum(-1),
        lambda a, b: optax.softmax_cross_entropy_with_integer_labels(a @ b.T, jnp.arange(len(a))),
        lambda a, b: a[:, 0] / a.mean(),
        lambda a, b: a[:, 0] * jnp.where(b[:, 0] > 0, 1, 0).max(),
        lambda a, b: (a - b.mean(0)).sum(-1),
        lambda a, b: (a * jnp.roll(b, 1, axis=0)).sum(-1),
        lambda a, b: (a * b[::-1]).sum(-1),
        lambda a, b: a[jnp.argsort(b[:, 0]), 0],
        lambda a, b: jnp.cumsum(a[:, 0]),
        lambda a, b: jax.lax.scan(lambda c, x: (c + x, x), 0.0, a[:, 0])[0] + b[:, 0],
        jax.jit(lambda a, b: a[:, 0] / jax.jit(jnp.sum)(b)),
        lambda a, b: jnp.mean((a - b) ** 2),
        lambda a, b: ((a - b) ** 2).sum(-1) / a.shape[0],
        lambda a, b: (a * b[(jnp.arange(len(b)) + 1) % len(b)]).sum(-1),
        lambda a, b: (a * b[np.arange(len(b))[::-1]]).sum(-1),
        lambda a, b: (a - b[0]).sum(-1),
        lambda a, b: jax.lax.fori_loop(0, 3, lambda i, c: c + a.mean(), b[:, 0]),
        lambda a, b: (a * one_hot(a, jnp.arange(len(a))[::-1], b)).sum(-1),
        lambda a, b: (a * one_hot(a, whole(b), b)).sum(-1),
        lambda a, b: a.at[whole(b)].add(1)[:, 0],
        lambda a, b: jnp.zeros(len(a)).at[whole(b)].add(a[:, 0]),
        lambda a, b: jnp.zeros(5).at[whole(b)].add(a[:, 0])[whole(b)],
        lambda a, b: jax.ops.segment_sum(a, whole(b), len(a)).sum(-1),
        lambda a, b: a.at[0].set(0).sum(-1) + b[:, 0],
        lambda a, b: a.at[:2].set(0).sum(-1) + b[:, 0],
        lambda a, b: jax.lax.dynamic_update_slice(a, jnp.zeros((2, 3)), (0, 0)).sum(-1),
    ],
)
def test_values_that_depend_on_other_rows_are_found(function):
    assert couples_rows(function, (rows(3),), (rows(3),))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a * b).sum(-1) / jnp.linalg.norm(a, axis=-1),
        lambda a, b: optax.losses.triplet_margin_loss(a, b, a + 1),
        lambda a, b: jnp.cumsum(a, axis=-1) * jnp.sort(b, axis=-1),
        lambda a, b: jax.vmap(lambda x: jax.lax.while_loop(jnp.all, lambda y: y - 1, x))(a > b),
        lambda a, b: jax.lax.map(jnp.sum, a * b),
        lambda a, b: (a * b).reshape(-1).reshape(len(a), -1).mean(1),
        lambda a, b: ((a - b) ** 2, a.mean()),
        lambda a, b: jnp.outer(jnp.arange(3.0), jnp.arange(3.0)).sum() * a,
        lambda a, b: [a.mean(), a * b][1],
        lambda a, b: a[jnp.arange(len(b)), b[:, 0].astype(int)],
        lambda a, b: a[np.arange(len(b)), b[:, 0].astype(int)],
        lambda a, b: jnp.take_along_axis(a, b[:, :1].astype(int), 1),
        lambda a, b: jax.lax.fori_loop(0, 3, lambda i, c: c + (a[:, i] - b[:, i]) ** 2, a[:, 0]),
        lambda a, b: jax.jit(lambda a, b: (((a - b) ** 2).mean(-1), a.mean()))(a, b)[0],
        lambda a, b: jax.lax.cond(True, lambda: (a.sum(-1), 1.0), lambda: (b.sum(-1), 2.0))[0],
        lambda a, b: jax.lax.scan(
            lambda c, x: ((c[0] / 2, c[1] + c[0] * x), 0), (1.0, 0 * a[:, 0]), (a * b).T
        )[0][1],
        lambda a, b: jax.checkpoint(lambda a: (a * b).sum(-1))(a),
        lambda a, b: (a * one_hot(a, jnp.arange(len(a)), b)).sum(-1),
        lambda a, b: (a * one_hot(a, np.arange(len(a)), b)).sum(-1),
        lambda a, b: a.at[jnp.arange(len(a)), whole(b)].add(-1).max(-1),
        lambda a, b: jax.vmap(lambda a, b: a.at[b].multiply(2))(a, whole(b)),
        lambda a, b: jnp.put_along_axis(a, b[:, :1].astype(int), 0.0, -1, inplace=False),
        lambda a, b: a.at[:, 0].set(0).at[: len(b), 1].set(b[:, 0]).at[..., 1:].min(0),
        lambda a, b: jax.grad(lambda a: a[jnp.arange(len(a)), whole(b)].sum())(a),
        lambda a, b: one_hot(a.reshape(-1, 1), jnp.arange(a.size), b.reshape(-1, 1)).reshape(-1, 3),
        lambda a, b: a.reshape(-1, 1)[jnp.arange(a.size), b.reshape(-1).astype(int)],
        lambda a, b: jax.lax.dynamic_update_slice(a, b[:, :2], (0, 1)).sum(-1),
    ],
)
def test_values_of_rows_on_their_own_are_not_blamed(function):
    assert not couples_rows(function, (rows(3),), (rows(3),))


def test_a_scalar_beside_the_rows_is_none_of_them():
    scale = jax.ShapeDtypeStruct((), "float32")
    assert not couples_rows(
        lambda a, scale, b: scale * (a * b).sum(-1), (rows(3), scale), (rows(3),)
    )
    check_by_row("The loss", lambda a, scale, b: scale * (a * b), (rows(3), scale), (rows(3),))


def test_the_axis_of_rows_is_recognised_beside_others_of_any_size():
    wide = rows(1009 * 2)
    assert not couples_rows(lambda a, b: ((a - b) ** 2).mean(-1), (wide,), (wide,))
