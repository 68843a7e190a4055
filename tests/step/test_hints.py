"""Hints and an error: probable mistakes in the values and shapes of a batch."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import flaxfit as ff
from flaxfit.data._batch import normalize
from flaxfit.step._hints import check_classes
from flaxfit.step._validate import inspect

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
LABELS = np.arange(4) % 3
KERNEL = np.ones((8, 3), np.float32)
NUMBERS, CLASSES = np.linspace(0, 1, 8, dtype=np.float32), (np.arange(8) % 2).astype(np.float32)
scaled: Any = lambda v, x: x * v["params"]  # noqa: E731


def hints(apply, params, x, y=LABELS, data=None):
    """What is said about a model, given as a function of its parameters and inputs."""
    task = ff.TrainTask(
        lambda variables, x, **_: (apply(variables["params"], x), {}),
        optax.sgd(0.1),
        "crossentropy",
    )
    state = ff.TrainState.create(task.optimizer, {"params": params})
    data = None if data is None else normalize((data, y))
    return list(inspect(task, state, normalize((x, y)), data).hints)


def logits(params, x):
    return x @ params


def look_up(params, tokens):
    return nn.Embed(6, 3).apply({"params": params}, tokens).mean(1)


def look_up_nnx(params, tokens):
    graph, state = nnx.split(nnx.eval_shape(lambda: nnx.Embed(6, 3, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)(tokens).mean(1)


TOKENS, TABLE = np.array([[0, 1], [2, 9], [5, 1], [0, 0]]), np.ones((6, 3), np.float32)


@pytest.mark.parametrize("apply", [look_up, look_up_nnx])
def test_an_index_without_a_row_is_named(apply):
    params = {"embedding": TABLE}
    (hint,) = hints(apply, params, TOKENS)
    assert "input '0' go from 0 to 9" in hint and "has 6 rows" in hint and "10 rows" in hint
    assert hints(apply, params, TOKENS % 6, data=TOKENS) == [hint]  # Of all data, if available.
    assert not hints(apply, params, TOKENS % 6)
    (hint,) = hints(apply, params, TOKENS % 6 - 1)  # Of pandas, -1 is a missing category.
    assert "go from -1 to 4" in hint and "counts those below 0 from its end" in hint


def test_where_an_index_may_have_a_row_nothing_is_said():
    def with_positions(params, tokens):
        return (
            look_up(params["words"], jnp.clip(tokens, 0, 5)) + 0 * params["places"]["embedding"][0]
        )

    def params(n):
        return {"words": {"embedding": TABLE}, "places": {"embedding": np.ones((n, 3), np.float32)}}

    assert len(hints(with_positions, params(9), TOKENS)) == 1
    assert not hints(with_positions, params(10), TOKENS)
    assert not hints(look_up, {"embedding": TABLE}, TOKENS.astype(np.uint8))  # As of images.
    assert not hints(logits, KERNEL, np.tile(TOKENS, 4))


def convolve(params, images):
    found = nn.Conv(5, (3, 3)).apply({"params": params["Conv_0"]}, images)
    return nn.Conv(5, (3, 3)).apply({"params": params["Conv_1"]}, found)


def convolve_rows(params, images):
    return convolve(params, images).reshape(len(images), -1, 5).mean(1)


def convolve_with_channel(params, images):
    return convolve(params, images[..., None]).mean((1, 2))


def kernels(*n_channels):
    return {
        f"Conv_{i}": {"bias": np.zeros(5, np.float32), "kernel": np.ones((3, 3, n, 5), np.float32)}
        for i, n in enumerate(n_channels)
    }


def test_a_convolution_that_takes_the_batch_for_an_image_is_named():
    x = np.stack([X[:, :6]] * 4, 1)
    (hint,) = hints(convolve_rows, kernels(6, 5), x)
    assert "batch of 4 examples as one image" in hint and "x[..., None]" in hint
    assert not hints(convolve_rows, kernels(6, 5), x[:1], y=LABELS[:1])
    # As many columns as the features of a later layer.
    assert not hints(convolve_with_channel, kernels(1, 5), x[..., :5])
    images = np.zeros((4, 3, 3, 6), np.float32)
    assert not hints(lambda p, x: convolve(p, x).mean((1, 2)), kernels(6, 5), images)


def test_kernels_of_other_layers_are_no_convolutions():
    def attend(params, x):
        return jnp.einsum("btd,ldhf->bf", x, params)

    assert not hints(attend, np.ones((2, 6, 6, 5), np.float32), np.stack([X[:, :6]] * 4, 1))


def test_inputs_of_a_large_scale_are_named_and_integers_are_not():
    (hint,) = hints(logits, KERNEL, -3000 * X)
    assert "input '0' has values up to 3,000" in hint and "x.std(0)" in hint
    assert "up to 1e+30," in hints(logits, KERNEL, np.full_like(X, 1e30))[0]
    assert not hints(logits, KERNEL, 900 * X)
    assert not hints(logits, KERNEL, (3000 * X).astype(int))


@pytest.mark.slow
def test_fit_says_it_once(capsys):
    model = ff.Model(nn.Dense(3), optax.sgd(0.1), "crossentropy")
    for _ in range(2):
        model.fit(3000 * X, LABELS, batch_size=2, epochs=2, verbose=2)
    assert capsys.readouterr().err.count("warning: input '0' has values up to 3,000") == 1


def check(loss, metrics, targets):
    task = ff.EvalTask(scaled, metrics, loss=loss)
    check_classes(task, ff.Batch((NUMBERS,), (targets,)))


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "log_cosh", optax.squared_error])
@pytest.mark.parametrize("metric", ["accuracy", "f1", "auc", ff.metrics.accuracy(threshold=0.3)])
@pytest.mark.parametrize("targets", [NUMBERS, 10 * NUMBERS[:, None]])
def test_a_classification_metric_of_regression_targets_is_refused(loss, metric, targets):
    with pytest.raises(ValueError, match="'hits' compares classes, .* use 'mae', 'rmse' or 'r2'"):
        check(loss, {"hits": metric}, targets)


@pytest.mark.parametrize(
    ("loss", "metrics", "targets"),
    [
        ("mse", ["accuracy"], CLASSES),
        ("mse", ["accuracy"], np.where(CLASSES > 0, np.nan, CLASSES)),
        ("mse", ["mae", "r2"], NUMBERS),
        ("binary_crossentropy", ["accuracy"], NUMBERS),
        ("mse", ["accuracy"], np.full((8, 3), 1 / 3, np.float32)),
        (lambda outputs, targets: outputs, ["accuracy"], NUMBERS),
    ],
    ids=["classes", "nan", "regression", "soft", "shares", "own"],
)
def test_other_targets_pass(loss, metrics, targets):
    check(loss, metrics, targets)


def test_training_and_evaluation_refuse_it():
    task = ff.TrainTask(
        lambda v, x, **_: (scaled(v, x), {}),
        optax.sgd(0.1),
        "mse",
        (CLASSES, NUMBERS),
        ["accuracy"],
    )
    one = np.ones((), np.float32)
    with pytest.raises(ValueError, match="'accuracy' compares classes"):
        next(ff.TrainLoop(lambda rngs, x: {"params": one}, task, 0, stdout=False))
    measure = ff.EvalLoop(ff.EvalTask(scaled, ["accuracy"], (CLASSES, NUMBERS), loss="mse")).measure
    with pytest.raises(ValueError, match="'accuracy' compares classes"):
        measure(ff.InferenceState(np.int32(0), one, {}))
