"""Hints: what a first batch shows to be probably meant otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import flaxfit as ff
from flaxfit.data._batch import normalize
from flaxfit.step._origins import origins_of
from flaxfit.step._validate import inspect

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
LABELS = np.arange(4)
CLASSES = np.ones((8, 3), np.float32)


def hints(apply, params, loss="crossentropy", x=X, y=LABELS % 3):
    """What is said about a model, given as a function of its variables and inputs."""
    task = ff.TrainTask(lambda variables, x, **_: (apply(variables, x), {}), optax.sgd(0.1), loss)
    state = ff.TrainState.create(task.optimizer, {"params": params})
    return inspect(task, state, normalize((x, y))).hints


def logits(variables, x):
    return x @ variables["params"]


def of_probabilities(outputs, labels):
    return -jnp.log(jnp.take_along_axis(outputs, labels[:, None], 1)[:, 0])


@pytest.mark.parametrize("softmax", [nn.softmax, jax.vmap(nn.softmax)])
def test_a_softmax_before_a_loss_of_logits_is_named(softmax):
    (hint,) = hints(lambda variables, x: softmax(logits(variables, x)), CLASSES)
    assert "ends with a softmax" in hint and "losses.crossentropy(from_logits=False)" in hint
    smoothed = ff.losses.crossentropy(label_smoothing=0.1)
    for loss in optax.softmax_cross_entropy_with_integer_labels, smoothed:
        assert hints(lambda variables, x: softmax(logits(variables, x)), CLASSES, loss) == [hint]


def test_a_sigmoid_before_a_binary_loss_is_named():
    (hint,) = hints(
        lambda variables, x: nn.sigmoid(x.sum(-1) * variables["params"]),
        np.float32(1),
        "binary_crossentropy",
        y=LABELS % 2,
    )
    assert "ends with a sigmoid" in hint and "losses.binary_crossentropy(from_logits" in hint


@pytest.mark.parametrize("form", [dict, lambda outputs: tuple(outputs.values())])
def test_the_output_whose_loss_takes_logits_is_named(form):
    def heads(variables, x):
        found = logits(variables, x)
        return form({"a": found, "b": nn.softmax(found), "c": nn.softmax(found)})

    losses = {"a": "crossentropy", "b": "crossentropy", "c": "mse"}
    targets = form({"a": LABELS % 3, "b": LABELS % 3, "c": np.ones((4, 3), np.float32)})
    (hint,) = hints(heads, CLASSES, losses, y=targets)
    assert hint.startswith("output 'b': the model ends with a softmax")
    if form is not dict:
        assert hints(heads, CLASSES, [None, "crossentropy", "mse"], y=targets)[0].startswith(
            "output 'output_1': "
        )
    assert not hints(heads, CLASSES, losses | {"b": None}, y=targets)


@pytest.mark.parametrize(
    ("apply", "loss"),
    [
        (logits, "crossentropy"),
        (lambda v, x: nn.log_softmax(logits(v, x)), "crossentropy"),
        (lambda v, x: nn.softmax(x) @ v["params"], "crossentropy"),
        (lambda v, x: nn.softmax(logits(v, x)), ff.losses.crossentropy(from_logits=False)),
        (lambda v, x: nn.softmax(logits(v, x)), of_probabilities),
    ],
)
def test_logits_and_losses_of_probabilities_are_not(apply, loss):
    assert not hints(apply, CLASSES, loss)


def look_up(variables, tokens):
    table = {"params": {"embedding": variables["params"]}}
    return nn.Embed(6, 3).apply(table, tokens).mean(1)


def look_up_twice(variables, tokens):
    return look_up(variables, tokens) + look_up(variables, jnp.clip(tokens + 1, 0, 5))


def look_up_nnx(variables, tokens):
    graph, state = nnx.split(nnx.eval_shape(lambda: nnx.Embed(6, 3, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, {"embedding": variables["params"]})
    return nnx.merge(graph, state)(tokens).mean(1)


@pytest.mark.parametrize("apply", [look_up, look_up_twice, look_up_nnx])
def test_an_index_without_a_row_is_named(apply):
    tokens, table = np.array([[0, 1], [2, 9], [5, 1], [0, 0]]), np.ones((6, 3), np.float32)
    (hint,) = hints(apply, table, x=tokens)
    assert "go from 0 to 9" in hint and "has 6 rows" in hint and "Give it 10 rows" in hint
    assert not hints(apply, table, x=tokens % 6)
    (hint,) = hints(apply, table, x=tokens % 6 - 1)  # Of pandas, -1 is a missing category.
    assert "go from -1 to 4" in hint and "counts those below 0 from its end" in hint


def convolve(variables, images):
    found = nn.Conv(3, (3, 3)).apply({"params": variables["params"]}, images)
    return found.reshape(len(images), -1, 3).mean(1)


def test_a_convolution_that_takes_the_batch_for_an_image_is_named():
    x = X.reshape(4, 4, 2)
    kernel = {"bias": np.zeros(3, np.float32), "kernel": np.ones((3, 3, 2, 3), np.float32)}
    (hint,) = hints(convolve, kernel, x=x)
    assert "batch of 4 examples as one image" in hint and "x[..., None]" in hint
    assert not hints(convolve, kernel, x=np.stack([x, x], -1)[..., 0, :].reshape(4, 2, 2, 2))
    assert not hints(convolve, kernel, x=x[:1].reshape(1, 2, 2, 2), y=LABELS[:1])


def test_inputs_of_a_large_scale_are_named_and_integers_are_not():
    (hint,) = hints(logits, CLASSES, x=-3000 * X)
    assert "input '0' has values up to 3,000" in hint and "x.std(0)" in hint
    assert "up to 1e+30," in hints(logits, CLASSES, x=np.full_like(X, 1e30))[0]
    assert not hints(logits, CLASSES, x=900 * X)
    assert not hints(logits, CLASSES, x=(3000 * X).astype(int))


def test_origins_are_told_apart_between_calls_of_one_program():
    softmax = jax.jit(lambda x: nn.softmax(x))

    def function(x, n):
        jax.debug.print("{}", n)
        return softmax(x), jax.lax.cond(n > 0, jnp.sin, jnp.exp, x), n[None], softmax(x * 2) + 1

    outputs = origins_of(jax.make_jaxpr(function)(X, 3)).outputs
    assert outputs == ["softmax", None, 1, None]


@pytest.mark.slow
def test_fit_says_it_once(capsys):
    model = ff.Model(nn.Dense(3), optax.sgd(0.1), "crossentropy")
    for _ in range(2):
        model.fit(3000 * X, LABELS % 3, batch_size=2, epochs=2, verbose=2)
    assert capsys.readouterr().err.count("warning: input '0' has values up to 3,000") == 1
