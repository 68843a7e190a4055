"""What a trial finds in programs that combine rows, and does not find in programs that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_rules import centered_slopes

from flaxfit.data._batch import Batch
from flaxfit.step._passes import prove
from flaxfit.step._trial import Pass, try_halves, try_parts, try_rows

rng = np.random.default_rng(0)
X = rng.normal(size=(16, 4)).astype(np.float32)
TABLE = jnp.asarray(rng.normal(size=(16, 4)), jnp.float32)
NEIGHBORS = rng.integers(0, 4, (16, 3))
W = jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)


def scanned(x):
    def add(carry, row):
        return (0.5 * carry + row,) * 2

    return jax.lax.scan(add, jnp.zeros(x.shape[1:]), x)[1]


def unsorted(x):
    order = jnp.argsort(x[:, 0])
    return jnp.tanh(x[order])[jnp.argsort(order)]


def highest(x):
    return jax.lax.fori_loop(0, len(x), lambda i, best: jnp.maximum(best, x[i]), jnp.full(4, -9.0))


def branched(x):
    a, b = jnp.sin(x), jnp.cos(x)
    return a if len(x) > 7 else b


def table_from(start, n):
    return jax.lax.dynamic_slice(jnp.arange(80.0).reshape(20, 4), (start, 0), (n, 4))


def masked(x):
    return jnp.where(jnp.arange(4) < 3, x - x.mean(0), -1e9)


@jax.custom_jvp
def doubled(x, w):
    return x @ w


@doubled.defjvp
def _doubled(primals, directions):
    (x, w), (dx, dw) = primals, directions
    return doubled(x, w), 2 * (dx @ w + x @ dw)


TABLES = np.float32([[1, 2, 3, 4], [5, 6, 7, 8]])
COMBINING = {
    "mean beside large constants": masked,
    "mean": lambda x: x - x.mean(0),
    "products": lambda x: (x @ x.T) @ x,
    "sort": lambda x: jnp.sort(x, 0),
    "reverse": lambda x: x[::-1],
    "roll": lambda x: jnp.roll(x, 1, 0),
    "scan": scanned,
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x),
    "cumulative sum": lambda x: jnp.cumsum(x, axis=0),
    "first row": lambda x: x - x[0],
    "best row": lambda x: x - x[jnp.argmax(x[:, 0])],
    "Fourier transform": lambda x: jnp.abs(jnp.fft.fft(x, axis=0)),
    "ranks": lambda x: jnp.argsort(jnp.argsort(x, 0), 0).astype(jnp.float32),
    "loop": lambda x: x - highest(x),
    "neighbors": lambda x: x[NEIGHBORS[: len(x)]].mean(1),
    "segments": lambda x: x - jax.ops.segment_sum(x, jnp.zeros(len(x), int), 1)[0],
    "number of rows": lambda x: x / len(x),
    "operations by the number of rows": branched,
    "places in a table": lambda x: x + jax.vmap(lambda i: table_from(i, len(x)))(jnp.arange(3))[0],
    "a factor by the number of rows": lambda x: (2.0 if len(x) > 8 else 1.0) * x,
    "a table by the number of rows": lambda x: TABLES[int(len(x) > 8)] * x,
    "an exponent by the number of rows": lambda x: x ** (2 if len(x) > 8 else 3),
    "complex mean": lambda x: x + (1j * x).mean(0).imag,
    "a table of a row for each example": lambda x: x + (x * TABLE).mean(0),
    "rows one by one": lambda x: jnp.stack([jnp.tanh(row) for row in x]) - x[0],
    "number of rows and one": lambda x: x / jnp.ones(len(x) + 1).sum(),
    "position": lambda x: x * jnp.arange(len(x))[:, None],
    "pairs": lambda x: jnp.repeat(x.reshape(-1, 2, 4).sum(1), 2, 0),
    "joined rows": lambda x: (
        jnp.tanh(x.reshape(-1, 8)).reshape(-1, 4) + x.reshape(-1, 8)[:, :1].sum()
    ),
}
KEEPING = {
    "product": lambda x: x @ W,
    "relu": lambda x: jax.nn.relu(x @ W) + jnp.logaddexp(x, 0.5),
    "weight noise": lambda x: x @ (W + jax.random.normal(jax.random.key(0), W.shape)),
    "broadcast dropout": lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, (1, 4)),
    "own derivative": lambda x: doubled(x, W),
    "stacked rows": lambda x: jnp.stack([jnp.tanh(row) for row in x]),
    "sort and back": unsorted,
    "layer norm": lambda x: x - x.mean(1, keepdims=True),
    "map": lambda x: jax.lax.map(lambda row: jnp.tanh(row @ W), x),
    "dropout": lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
    "gradient by row": lambda x: jax.vmap(jax.grad(lambda row: jnp.sin(row @ W).sum()))(x),
    "gradient of a sum": lambda x: jax.grad(lambda x: jnp.sin(x @ W).sum())(x),
    "fixed points": lambda x: x + jnp.tanh(jnp.ones((8, 4)) @ W).mean(0),
    "sort in a row": lambda x: jnp.sort(x, 1),
    "gather in a row": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    "computed again": jax.checkpoint(lambda x: jnp.tanh(x @ W)),
    "merged axes": lambda x: jnp.tanh(x.reshape(-1, 2) @ W[:2, :2]).reshape(-1, 4),
    "bias": lambda x: jnp.tanh(x @ W + W[0]) * W[1] + jnp.where(W[2] > 0, x, W[:1]),
    "repeated row": lambda x: x + (jnp.repeat(W[:1], len(x), 0) @ W).reshape(-1).reshape(x.shape),
}
ONE_ROW = {
    "a factor of one row": lambda x: (2.0 if len(x) == 1 else 1.0) * x,
    "a bias of several rows": lambda x: x if len(x) == 1 else x + W[0],
    "another bias of one row": lambda x: x + (W[0] if len(x) == 1 else W[1]),
    "two biases, one of one row": lambda x: x + W[0] + (W[0] if len(x) == 1 else W[1]),
    "rows of a table": lambda x: x + jnp.tile(W, (4, 1))[: len(x)],
    "the first row": lambda x: x[:1] + 0 * x,
    "a squeezed row": lambda x: x - jnp.squeeze(x)[..., :1].reshape(-1)[0],
    "axes that one row may exchange": lambda x: x + x.reshape(4, -1).T,
    "a mean over rows": lambda x: x.mean(0, keepdims=True) + 0 * x,
}
"""Programs that a single row computes otherwise, or for which it is the whole."""


def run_of(function):
    return jax.jit(lambda state, batch, seed: Pass({"it": function(*batch.inputs)}))


def proof_of(function, n=4, factor=4):
    def run(state, batch, states, seed):
        return Pass({"it": function(*batch.inputs)})

    return prove(run, (), Batch((X,)), (), n, factor)


def is_proven(function, n=4, factor=4):
    return proof_of(function, n, factor).is_independent


def within_capacity(x):
    """Leaves out the rows beyond so many, which a part of the batch has fewer of."""
    n_kept = max(8, len(x) // 2 + 2)
    return x * jax.nn.one_hot(jnp.arange(len(x)), n_kept).sum(1, keepdims=True)


def limited(x):
    return x * (jnp.cumsum(jnp.ones(x.shape), axis=0) < len(x) // 2 + 1)


def first_half(x):
    return x * (jnp.arange(len(x)) < len(x) // 2)[:, None]


def test_all_rows_are_taken_where_operations_depend_on_their_number():
    assert not proof_of(first_half).is_same_program and not proof_of(limited).is_same_program
    assert (
        not proof_of(within_capacity).is_same_program
        and proof_of(KEEPING["product"]).is_same_program
    )
    run = run_of(within_capacity)
    assert try_parts(run, (), Batch((X,)), 4) == "it"
    assert not try_parts(run_of(KEEPING["product"]), (), Batch((X,)), 4)


def test_draws_are_known_by_their_primitives():
    assert proof_of(lambda x: jax.random.gamma(jax.random.key(0), jnp.abs(x) + 1)).draws


@pytest.mark.parametrize("name", COMBINING)
def test_a_program_that_combines_rows_is_found_and_never_proven(name):
    run = run_of(COMBINING[name])
    assert not is_proven(COMBINING[name])
    assert not is_proven(COMBINING[name], 1, 16)
    assert try_rows(run, (), Batch((X,))) or try_halves(run, (), Batch((X,))).rows == "it"


@pytest.mark.parametrize("name", KEEPING)
def test_a_program_that_keeps_rows_apart_is_not_blamed(name):
    run = run_of(KEEPING[name])
    assert not try_rows(run, (), Batch((X,)))
    assert not any(try_halves(run, (), Batch((X,)), draws=name == "dropout"))


@pytest.mark.parametrize("sizes", [(4, 4), (1, 16)])
def test_most_programs_that_keep_rows_apart_are_proven(sizes):
    unproven = {name for name, function in KEEPING.items() if not is_proven(function, *sizes)}
    assert unproven <= {"sort and back", "map", "gather in a row", "stacked rows"}


@pytest.mark.parametrize("n", [1, 4])
def test_a_rule_of_derivatives_that_combines_rows_is_not_proven(n):
    assert not is_proven(lambda x: centered_slopes(x @ W), n) and is_proven(
        lambda x: jnp.tanh(x @ W), n
    )
    own = jax.custom_jvp(jnp.tanh)
    own.defjvp(lambda x, direction: (jnp.tanh(x[0]), 1 * direction[0]), symbolic_zeros=True)
    assert not is_proven(own, n)  # What it computes without a direction is not traced.


@pytest.mark.parametrize("name", ONE_ROW)
def test_a_program_that_computes_a_single_row_otherwise_is_not_proven(name):
    assert not is_proven(ONE_ROW[name], 1, 16)


@pytest.mark.parametrize("n", [1, 3, 16])
def test_few_or_equal_rows_are_enough(n):
    batch = Batch((np.ones((n, 4), np.float32),))
    assert try_rows(run_of(COMBINING["mean"]), (), batch) == "it"
    assert not try_rows(run_of(KEEPING["product"]), (), batch)


STATES = {
    "number of rows": (lambda x: jnp.float32(len(x)), False),
    "whole number of rows": (lambda x: jnp.int32(len(x)), False),
    "sum": (lambda x: x.sum(0), False),
    "average of a sum": (lambda x: 0.9 * 3 + 0.1 * x.sum(0), False),
    "maximum": (lambda x: x.max(0), False),
    "mean": (lambda x: x.mean(0), True),
    "average of a mean": (lambda x: 0.9 * 3 + 0.1 * x.mean(0), True),
    "number of calls": (lambda x: jnp.int32(1), True),
}


@pytest.mark.parametrize("name", STATES)
def test_state_and_penalty_have_to_be_means_of_those_of_the_halves(name):
    function, is_kept = STATES[name]

    def run(state, batch, seed):
        value = function(*batch.inputs)
        return Pass({}, state={"seen": {"it": value}}, penalty=jnp.sum(value))

    found = try_halves(jax.jit(run), (), Batch((X,)))
    assert (found.state, bool(found.penalty)) == ("" if is_kept else "seen/it", not is_kept)


def test_all_rows_are_taken_where_half_of_a_few_are_too_few():
    def run(state, batch, seed):
        return Pass({}, penalty=batch.inputs[0].reshape(-1, 8, 4).sum())

    assert try_halves(jax.jit(run), (), Batch((X,))).penalty


@pytest.mark.parametrize(
    ("reduce", "is_kept"),
    [(jnp.sum, False), (jnp.mean, True), (lambda x: jnp.sqrt(jnp.sum(x)), False)],
    ids=["sum", "mean", "norm"],
)
def test_a_random_penalty_is_compared_by_its_magnitude(reduce, is_kept):
    def run(state, batch, seed):
        key = jax.random.fold_in(jax.random.key(0), seed)
        (x,) = batch.inputs
        return Pass({}, penalty=reduce((x + 0.1 * jax.random.normal(key, x.shape)) ** 2))

    assert bool(try_halves(jax.jit(run), (), Batch((X,)), draws=True).penalty) != is_kept
