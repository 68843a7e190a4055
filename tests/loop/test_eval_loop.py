"""EvalLoop as a callback and on its own, and what it measures of any number of examples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
import sklearn.metrics
from flax import linen as nn
from loops import some_devices
from marks import diagonal, thorough
from redex import combinator

import flaxfit as ff
from flaxfit.export import InputSpec
from flaxfit.strategies._eager import Eager

X = np.arange(12, dtype=np.float32)[:, None]
Y = 2 * X[:, 0]
STATE = ff.InferenceState(np.int32(0), np.float32(1), {})
MSE = np.mean((X[:, 0] - Y) ** 2)


def apply(variables, x, **options):
    outputs = (x * variables["params"])[:, 0]
    return (outputs, {}) if "mutable" in options else outputs


def make_loop(**options):
    task = ff.TrainTask(apply, optax.sgd(1e-3), "mse", [(X, Y)] * 4)
    return ff.TrainLoop(lambda rngs, x: {"params": jnp.ones(1)}, task, 0, stdout=False, **options)


def make_eval(data=(X, Y), **options):
    return ff.EvalLoop(ff.EvalTask(apply, ["mae"], data, loss="mse"), **options)


def test_the_repr_of_an_eval_loop_shows_its_task_and_its_name():
    loop = make_eval(name="test")
    assert repr(loop) == f"EvalLoop({loop.task}, name='test')"


def test_as_a_callback_it_adds_metrics_under_its_name_and_composes_with_redex():
    process = combinator.serial(make_eval(), make_eval((X[:5], Y[:5]), name="first"))
    found = [checkpoint.metrics for checkpoint in make_loop(callbacks=process)]
    assert found[0].keys() >= {"loss", "val_loss", "val_mae", "first_loss", "first_mae"}
    assert found[0]["first_mae"] < found[0]["val_mae"]
    values = [metrics["val_loss"] for metrics in found]
    assert len(values) == 4 and values == sorted(values, reverse=True)


def test_it_takes_over_the_strategy_of_its_loop():
    strategy = ff.DataParallel(jax.devices()[:2])
    evaluate = make_eval()
    make_loop(callbacks=[evaluate], strategy=strategy)
    assert evaluate.strategy is strategy
    assert make_eval().strategy.n_devices == len(jax.local_devices())
    own = make_eval(strategy=ff.DataParallel(jax.devices()[:1]))
    make_loop(callbacks=[own], strategy=strategy)
    assert own.strategy.n_devices == 1


def test_n_steps_limits_it_or_one_measurement_which_may_be_watched():
    batches, seen = [(X[:5], Y[:5]), (X[5:], Y[5:])], []
    limited, evaluate = make_eval(batches, n_steps=1), make_eval(batches)
    cut = limited.measure(STATE)
    assert cut == evaluate.measure(STATE, n_steps=1, watch=seen.append)
    assert cut["loss"] == pytest.approx(np.mean((X[:5, 0] - Y[:5]) ** 2))
    assert evaluate.measure(STATE, watch=seen.append)["loss"] == pytest.approx(MSE)
    assert seen == [1, 1, 2]
    with pytest.raises(ValueError, match="n_steps must be 1 or more"):
        make_eval(n_steps=0)


def test_an_endless_stream_is_measured_for_one_epoch():
    evaluate = make_eval(ff.ArrayStream(X, Y, batch_size=5, shuffle=True))
    for _ in range(2):
        assert evaluate.measure(STATE)["loss"] == pytest.approx(MSE)


def test_a_generator_cannot_be_measured_twice():
    evaluate = make_eval(batch for batch in [(X, Y)])
    evaluate.measure(STATE)
    with pytest.raises(ValueError, match="consumed before|iterated only once"):
        evaluate.measure(STATE)


def test_weights_weigh_the_metrics():
    weights = np.linspace(0, 1, 12).astype(np.float32)
    measured = make_eval((X, Y, weights)).measure(STATE)
    assert measured["mae"] == pytest.approx(np.average(np.abs(X[:, 0] - Y), weights=weights))


@pytest.mark.slow
def test_a_stochastic_evaluation_is_given_its_keys():
    def noisy(variables, x, *, rngs):
        return x[:, 0] + jax.random.normal(rngs["sample"], x.shape[:1])

    task = ff.EvalTask(noisy, [], (X, X[:, 0]), loss="mse", rngs="sample")
    state = make_loop().state
    one = ff.EvalLoop(task).measure(state)
    assert one["loss"] > 0 and one == ff.EvalLoop(task).measure(state)
    assert one != ff.EvalLoop(task).measure(state.replace_step(1))


def test_labels_are_checked_in_evaluation_too():
    def logits(variables, x):
        return jnp.zeros((x.shape[0], 3))

    task = ff.EvalTask(logits, [], (X, np.full(12, 3)), loss="crossentropy")
    with pytest.raises(ValueError, match="label 3 is out of range for 3 outputs"):
        ff.EvalLoop(task).measure(STATE)


STRATEGIES = {
    "1": ff.DataParallel(jax.devices()[:1]),
    "4": ff.DataParallel(jax.devices()[:4]),
    "fsdp": ff.Sharded.fsdp(jax.devices()[:4]),
    "virtual": ff.DataParallel(jax.devices()[:2], virtual_replicas=8),
    "eager": Eager(),
}
RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(203, 1)).astype(np.float32)
LABELS = (SCORES[:, 0] + RNG.normal(size=203) > 0).astype(np.int32)


def ranks(scores, labels):
    """As a `compute_metrics` returns them; the last depends on the order of the rows."""
    return {
        "rho": scipy.stats.spearmanr(scores, labels).statistic,
        "precision": sklearn.metrics.average_precision_score(labels, scores),
        "area": sklearn.metrics.roc_auc_score(labels, scores),
        "order": float(np.arange(len(scores)) @ scores),
    }


@pytest.mark.parametrize(
    ("name", "rows"),
    diagonal(STRATEGIES, ["all padded", "weighted narrowed", "all narrowed", "weighted padded"]),
)
def test_a_collected_metric_is_that_of_all_rows_in_order(name, rows):
    strategy, is_weighted, pad = STRATEGIES[name], "weighted" in rows, "padded" in rows
    weights = (RNG.random(203) > 0.3).astype(np.float32) if is_weighted else np.ones(203)
    data = ff.ArrayStream(SCORES, LABELS, weights if is_weighted else None, batch_size=64)
    task = ff.EvalTask(apply, [ff.metrics.collected(ranks)], data, pad=pad)
    kept = weights > 0
    expected = ranks(SCORES[kept, 0], LABELS[kept])
    assert ff.EvalLoop(task, strategy=strategy).measure(STATE) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_collected_metric_stands_beside_others_and_is_exact_where_auc_is_binned():
    def area(scores, labels, weights):
        return sklearn.metrics.roc_auc_score(labels, scores, sample_weight=weights)

    weights = RNG.uniform(0, 2, 203).astype(np.float32)
    listed = ["auc", ff.metrics.collected(area), "binary_accuracy"]
    task = ff.EvalTask(apply, listed, ff.ArrayStream(SCORES, LABELS, weights, batch_size=50))
    found = ff.EvalLoop(task, strategy=STRATEGIES["1"]).measure(STATE)
    expected = area(SCORES[:, 0], LABELS, weights)
    assert found["area"] == expected
    assert found["auc"] == pytest.approx(expected, abs=1e-3) and "binary_accuracy" in found


def test_a_collected_metric_sees_the_weights_of_its_output():
    def shares(outputs, targets, weights):
        return {"n": len(targets), "weight": weights.sum()}

    def two(variables, x):
        return {"a": x[:, 0], "b": -x[:, 0]}

    weights = {"a": (LABELS * 2).astype(np.float32), "b": np.ones(203, np.float32)}
    metric = ff.metrics.collected(shares)
    task = ff.EvalTask(
        two,
        {"a": [metric], "b": {"all": metric}},
        (SCORES, {"a": SCORES[:, 0], "b": SCORES[:, 0]}, weights),
        loss={"a": "mse", "b": "mse"},
    )
    found = ff.EvalLoop(task).measure(STATE)
    assert (found["a_n"], found["a_weight"]) == (LABELS.sum(), 2 * LABELS.sum())
    assert (found["b_all_n"], found["b_all_weight"]) == (203, 203)


def test_a_collected_metric_of_another_pass_begins_anew():
    task = ff.EvalTask(apply, [ff.metrics.collected(ranks)], [(SCORES, LABELS)])
    evaluate = ff.EvalLoop(task)
    first = evaluate.measure(STATE)
    assert evaluate.measure(STATE) == first
    assert evaluate.measure(STATE, [(SCORES[:90], LABELS[:90])])["order"] != first["order"]


def test_a_collected_metric_over_its_bound_is_refused_before_and_while_it_is_measured():
    metric = ff.metrics.collected(ranks, max_rows=200)
    evaluate = ff.EvalLoop(ff.EvalTask(apply, [metric], (SCORES, LABELS)))
    with pytest.raises(ValueError, match="203 rows and more are over its bound of 200"):
        evaluate.check(STATE)
    batches = [(SCORES[:100], LABELS[:100])] * 3
    with pytest.raises(ValueError, match=r"300 rows, .* over its bound of 200.*max_rows="):
        evaluate.measure(STATE, batches)
    assert ff.EvalLoop(evaluate.task, n_steps=2).measure(STATE, batches)


class Noisy(nn.Module):
    """Adds noise to its only input, a draw for each example."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, ())
        return scale * x[:, 0] + jax.random.normal(self.make_rng("noise"), (len(x),))


def fit_noisy(strategy, **options):
    model = ff.Model(Noisy(), optax.sgd(0.0), "mse", strategy=strategy, rngs="noise", **options)
    validation = model.fit(X, Y, batch_size=4, verbose=0, validation_data=(X, Y))["val_loss"]
    return model, validation


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        thorough(ff.DataParallel(jax.devices()[:1])),
        ff.DataParallel(jax.devices()[:4]),
        thorough(ff.Sharded.fsdp(jax.devices()[:4])),
        thorough(ff.DataParallel(jax.devices()[:2], virtual_replicas=4)),
    ],
    ids=["1", "4", "fsdp", "virtual"],
)
def test_evaluate_predict_and_validation_of_a_model_draw_the_same_noise(strategy):
    model, validation = fit_noisy(strategy, eval_rngs="noise")
    outputs = model.predict(X, batch_size=4)
    noise = outputs - X[:, 0]
    assert len(np.unique(noise.round(4))) == len(X)  # Of each batch and replica another one.
    np.testing.assert_array_equal(outputs, model.predict(X, batch_size=4))
    loss = model.evaluate(X, Y, batch_size=4)["loss"]
    assert [loss] == validation == [pytest.approx(np.mean((outputs - Y) ** 2), rel=1e-5)]
    model.fit(X, Y, batch_size=4, verbose=0)
    assert not np.allclose(model.predict(X, batch_size=4), outputs)


@pytest.mark.slow
def test_virtual_replicas_draw_the_same_noise_on_any_number_of_devices():
    strategies = [ff.DataParallel(jax.devices()[:n], virtual_replicas=4) for n in (1, 4)]
    one, four = (fit_noisy(each, eval_rngs="noise")[0] for each in strategies)
    outputs = (each.predict(X[:10], batch_size=4) for each in (one, four))
    np.testing.assert_array_equal(*outputs)


@pytest.mark.slow
def test_evaluation_without_a_stream_says_where_to_name_it():
    model = ff.Model(Noisy(), optax.sgd(0.0), "mse", rngs="noise")
    model.fit(X, Y, verbose=0)
    for call in (lambda: model.evaluate(X, Y), lambda: model.predict(X)):
        with pytest.raises(ValueError, match=r'"noise"[\s\S]*Model\(\.\.\., eval_rngs=\.\.\.\) s'):
            call()
    noisy = ff.Model(Noisy(), optax.sgd(0.0), "mse", rngs="noise", eval_rngs="noise")
    with pytest.raises(ValueError, match="Cannot export a model that draws random numbers"):
        noisy.export("nowhere", input_spec=InputSpec(("batch", 1)))


def test_what_is_not_a_task_is_refused():
    with pytest.raises(TypeError, match=r"EvalLoop needs a task, .*, got Dense\."):
        ff.EvalLoop(nn.Dense(1))  # pyright: ignore[reportArgumentType]


KERNEL = np.array([0.3, 0.1, -0.4], np.float32)
ROWS = RNG.normal(size=(25, 3)).astype(np.float32)
ROW_WEIGHTS = RNG.uniform(0.2, 2, 25).astype(np.float32)
CLASSES = RNG.integers(0, 3, 25).astype(np.int32)


def score(variables, x, **options):
    return x @ variables["params"]


def class_scores(variables, x, **options):
    return jnp.stack([x @ variables["params"], x[:, 0], x[:, 1]], -1)


BY_CLASS = [getattr(ff.metrics, name)(average="macro") for name in ("precision", "recall", "f1")]
OF_ROWS = {
    "numbers": (score, ROWS @ np.float32([1, -2, 0.5]), ["mse", "mae", "rmse", "r2"]),
    "two classes": (
        score,
        (CLASSES > 0).astype(np.int32),
        ["accuracy", "precision", "recall", "f1", "auc"],
    ),
    "classes": (
        class_scores,
        CLASSES,
        ["accuracy", "top_2", "perplexity", *BY_CLASS, ff.metrics.confusion_matrix(n_classes=3)],
    ),
}


@functools.cache
def sums_by_row(name, is_weighted):
    """The task, and the sums of each example on its own, in float64."""
    model, targets, chosen = OF_ROWS[name]
    loss = "mse" if name == "numbers" else None
    task = ff.EvalTask(model, chosen, loss=loss)
    outputs = np.asarray(model({"params": KERNEL}, ROWS))
    w, sums = ROW_WEIGHTS if is_weighted else np.ones_like(ROW_WEIGHTS), {}
    for key, metric in task.metrics.items():

        def measure(o, t, w, metric=metric):
            return metric.measure(o[None], t[None], weights=w[None])

        found = jax.jit(jax.vmap(measure))(outputs, targets, w)
        sums[key] = jax.tree.map(lambda s: np.asarray(s, np.float64), found)
    return task, sums


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("is_weighted", [thorough(False), True], ids=["equal", "weighted"])
@pytest.mark.parametrize("n_devices", some_devices(1, 3))
@pytest.mark.parametrize("name", ["numbers", "two classes", "classes"])
def test_any_number_of_examples_has_the_metrics_of_all_of_them(name, n_devices, is_weighted):
    task, sums = sums_by_row(name, is_weighted)
    evaluate = ff.EvalLoop(task, strategy=ff.DataParallel(jax.devices()[:n_devices]))
    state = ff.InferenceState(np.int32(0), KERNEL, {})
    targets = OF_ROWS[name][1]
    for n in range(1, 26):
        w = ROW_WEIGHTS[:n] if is_weighted else None
        found = evaluate.measure(state, ff.ArrayStream(ROWS[:n], targets[:n], w, batch_size=8))
        for key, rows in sums.items():
            whole = task.metrics[key].compute(jax.tree.map(lambda s, n=n: s[:n].sum(0), rows))
            # r2 is 1 minus a quotient of sums; the quotient is what rounding must not touch.
            ours, theirs = (1 - found[key], 1 - whole) if key == "r2" else (found[key], whole)
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=f"{key} of {n}")
        if name == "numbers":
            errors = ROWS[:n].astype(np.float64) @ KERNEL - targets[:n]
            mse, mae = (np.average(each, weights=w) for each in (errors**2, abs(errors)))
            expected = {"loss": mse, "mse": mse, "mae": mae}
            assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6), n
