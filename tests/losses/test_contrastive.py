"""Contrastive losses against NumPy, whole and divided over the replicas of a mapped axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import assert_close
from marks import thorough
from scipy.special import log_softmax

import flaxfit as ff
from flaxfit import losses

RNG = np.random.default_rng(0)
FIRST, SECOND = RNG.normal(size=(2, 8, 5)).astype(np.float32)
N_REPLICAS = 4


def info_nce(a, b, scale):
    """Both directions, in float64."""
    a, b = (x.astype(float) / np.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
    logits = scale * a @ b.T
    return -(np.diag(log_softmax(logits, 1)) + np.diag(log_softmax(logits, 0))) / 2


LABELS = np.array([0, 0, 1, 1, 1, 2, 2, 9])


def supervised(x, temperature):
    """The formula of the paper, pair by pair, in float64."""
    x = x.astype(float) / np.linalg.norm(x, axis=-1, keepdims=True)
    found = []
    for i, label in enumerate(LABELS):
        others = [j for j in range(8) if j != i]
        total = sum(np.exp(x[i] @ x[j] / temperature) for j in others)
        pairs = [x[i] @ x[j] / temperature - np.log(total) for j in others if LABELS[j] == label]
        found.append(-np.mean(pairs) if pairs else 0)
    return found


def test_supervised_contrastive_is_that_of_the_paper():
    values, weights = jax.jit(losses.supervised_contrastive(temperature=0.5))(3 * FIRST, LABELS)
    np.testing.assert_allclose(values, supervised(FIRST, 0.5), rtol=1e-5)
    assert weights.tolist() == [1] * 7 + [0]


@pytest.mark.slow
def test_examples_without_others_have_a_gradient():
    for n in 1, 8:
        total = lambda x: losses.supervised_contrastive(x, LABELS[-len(x) :])[0].sum()  # noqa: E731
        gradient = jax.jit(jax.grad(total))
        assert np.isfinite(gradient(FIRST[:n])).all()
        assert np.isfinite(gradient(0 * FIRST[:n])).all()


def divided(loss, **options):
    """The values of a loss whose examples are spread over replicas."""
    named = jax.vmap(lambda *rows: loss(*rows, **options), axis_name="replica")

    def values(*arrays):
        parts = (x.reshape(N_REPLICAS, -1, *x.shape[1:]) for x in arrays)
        return named(*parts).reshape(-1)

    return values


@pytest.mark.parametrize(
    ("options", "scale"),
    [({}, 1 / 0.07), ({"temperature": 0.5}, 2), ({"log_scale": np.log(np.float32([3]))}, 3)],
    ids=str,
)
def test_info_nce_is_that_of_numpy(options, scale):
    values = jax.jit(losses.info_nce)(FIRST, 3 * SECOND, **options)
    np.testing.assert_allclose(values, info_nce(FIRST, SECOND, scale), rtol=1e-5)


def test_embeddings_of_zeros_have_a_gradient():
    gradient = jax.jit(jax.grad(lambda x: losses.info_nce(x, SECOND).sum()))
    assert np.isfinite(gradient(jnp.zeros_like(FIRST))).all()


def test_embeddings_may_be_taken_as_they_are():
    units = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (FIRST, SECOND)]
    plain = losses.info_nce(normalize=False, temperature=0.25)
    expected = info_nce(FIRST, SECOND, 4)
    np.testing.assert_allclose(jax.jit(plain)(*units), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(plain)(2 * units[0], units[1] / 2), expected, rtol=1e-5)


@pytest.mark.slow
def test_each_replica_compares_its_own_rows_with_all_in_value_and_gradient():
    weights = RNG.uniform(size=8)

    def total(loss):
        def found(*rows):
            values = loss(*rows)
            return (weights * values).sum(), values

        return found

    whole, parts = (
        jax.jit(jax.value_and_grad(total(loss), argnums=(0, 1), has_aux=True))(FIRST, SECOND)
        for loss in (losses.info_nce, divided(losses.info_nce))
    )
    assert_close(whole, parts, rtol=1e-5, atol=1e-6)


def test_a_replica_computes_no_rows_of_others():
    program = jax.make_jaxpr(losses.info_nce, axis_env=[("replica", N_REPLICAS)])
    shapes = {v.aval.shape for each in program(FIRST, SECOND).eqns for v in each.outvars}
    assert (8, 8 * N_REPLICAS) in shapes
    assert (8 * N_REPLICAS, 8 * N_REPLICAS) not in shapes


def test_an_axis_of_another_name_is_not_looked_for():
    alone = jax.jit(jax.vmap(losses.info_nce, axis_name="rows"))(FIRST[None], SECOND[None])
    np.testing.assert_allclose(alone[0], info_nce(FIRST, SECOND, 1 / 0.07), rtol=1e-5)


class Towers(nn.Module):
    @nn.compact
    def __call__(self, first, second):
        return first * self.param("w", nn.initializers.ones, ()), second


@pytest.mark.slow
@pytest.mark.parametrize("make", [ff.DataParallel, thorough(ff.Sharded.fsdp)])
def test_it_is_measured_over_the_whole_batch(make):
    weights = RNG.uniform(0.5, 2, 8).astype(np.float32)
    data, metrics = ff.ArrayStream((FIRST, SECOND), (), weights), {"nce": losses.info_nce}
    task = ff.EvalTask(Towers(), metrics, data, loss="info_nce", across="batch")
    state = ff.InferenceState(np.int32(0), {"w": np.float32(1)}, {})
    found = ff.EvalLoop(task, strategy=make()).measure(state)
    expected = np.average(info_nce(FIRST, SECOND, 1 / 0.07), weights=weights)
    assert found == pytest.approx({"nce": expected, "loss": expected}, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["replica", "rows"])
def test_replicas_may_have_another_name(given):
    task = ff.TrainTask(
        Towers(),
        optax.sgd(0.1),
        losses.info_nce(axis_name=given),
        ff.ArrayStream((FIRST, SECOND), (), batch_size=8),
        across="batch",
    )
    strategy = ff.DataParallel(axis_name="rows")
    found = ff.TrainLoop(Towers(), task, 0, strategy=strategy, stdout=False).next_step().loss
    assert found == pytest.approx(info_nce(FIRST, SECOND, 1 / 0.07).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((FIRST, SECOND[:4]), {}, r"rows are pairs, got \(8, 5\) and \(4, 5\)"),
        ((FIRST[0], SECOND[0]), {}, r"\(batch, features\)"),
        ((FIRST, SECOND, np.arange(8)), {}, r"no targets, got a third .* \(8,\): give empty"),
        ((FIRST, SECOND, 1.0), {"temperature": 1.0}, "leave one of them out"),
        ((FIRST, SECOND), {"temperature": 0}, "must be positive, got 0"),
    ],
)
def test_what_is_no_pair_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        losses.info_nce(*arguments, **options)
