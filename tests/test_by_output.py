"""Several outputs: their losses by name, weighted; each with metrics of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit._by_output import LossByOutput, as_loss

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 3)).astype("f4")
CLASSES = RNG.integers(0, 4, 22)
NUMBERS = RNG.normal(size=(22, 2)).astype("f4")
LOSS = {"kind": "crossentropy", "size": "mse"}


class TwoHeads(nn.Module):
    """A model whose outputs are a mapping or a tuple."""

    form: type = dict

    @nn.compact
    def __call__(self, x):
        kind, size = nn.Dense(4)(x), nn.Dense(2)(x)
        return {"size": size, "kind": kind} if self.form is dict else (kind, size)


def losses_of(outputs):
    """The two losses, by NumPy."""
    logits, numbers = (np.asarray(outputs[name], "f8") for name in ("kind", "size"))
    logs = np.log(np.exp(logits).sum(1))
    return np.mean(logs - logits[np.arange(22), CLASSES]), np.mean((numbers - NUMBERS) ** 2)


@pytest.mark.parametrize("form", [dict, tuple])
def test_a_model_is_trained_on_the_weighted_sum_and_reports_each_loss(form):
    targets = {"kind": CLASSES, "size": NUMBERS} if form is dict else (CLASSES, NUMBERS)
    metrics = {"kind": "accuracy", "size": ["mae", "rmse"]}
    model = ff.Model(TwoHeads(form), optax.adam(0.05), LOSS, metrics, loss_weights={"size": 0.1})
    history = model.fit(
        X, targets, batch_size=16, epochs=6, verbose=0, validation_data=(X, targets)
    )
    assert history["loss"][-1] < history["loss"][0]
    np.testing.assert_allclose(
        history["loss"],
        np.array(history["kind_loss"]) + 0.1 * np.array(history["size_loss"]),
        rtol=1e-5,
    )

    outputs = model.predict(X)
    outputs = outputs if form is dict else dict(zip(LOSS, outputs, strict=True))
    kind, size = losses_of(outputs)
    found = model.evaluate(X, targets)
    expected = {
        "loss": kind + 0.1 * size,
        "kind_loss": kind,
        "size_loss": size,
        "kind_accuracy": np.mean(outputs["kind"].argmax(1) == CLASSES),
        "size_mae": np.mean(np.abs(outputs["size"] - NUMBERS)),
        "size_rmse": np.sqrt(size),
    }
    assert found == pytest.approx(expected, rel=1e-4)
    assert {f"val_{name}" for name in expected} <= history.keys()


def weighted_sums(outputs, weights):
    """The two losses and an accuracy, each by its own weights, by NumPy."""
    logits, numbers = (np.asarray(outputs[name], "f8") for name in ("kind", "size"))
    kind = np.log(np.exp(logits).sum(1)) - logits[np.arange(22), CLASSES]
    size = ((numbers - NUMBERS) ** 2).mean(1)
    return {
        "kind_loss": np.average(kind, weights=weights["kind"]),
        "size_loss": np.average(size, weights=weights["size"]),
        "kind_accuracy": np.average(logits.argmax(1) == CLASSES, weights=weights["kind"]),
    }


@pytest.mark.parametrize("form", [dict, tuple])
@pytest.mark.parametrize("n_devices", [1, 4])
def test_each_output_may_have_weights_of_its_own(form, n_devices):
    targets = {"kind": CLASSES, "size": NUMBERS} if form is dict else (CLASSES, NUMBERS)
    weights = {"kind": RNG.uniform(0, 3, 22), "size": (np.arange(22) % 3).astype(float)}
    strategy = ff.DataParallel(jax.devices()[:n_devices])
    model = ff.Model(
        TwoHeads(form),
        optax.sgd(0.1),
        LOSS,
        {"kind": "accuracy", "n_sizes": lambda *given: jnp.ones(len(jax.tree.leaves(given)[0]))},
        loss_weights={"size": 0.1},
        strategy=strategy,
    )
    model.fit(X, targets, batch_size=22, sample_weight=weights, verbose=0)
    before = model.predict(X)
    before = before if form is dict else dict(zip(LOSS, before, strict=True))
    expected = weighted_sums(before, weights)
    expected["loss"] = expected["kind_loss"] + 0.1 * expected["size_loss"]
    expected["n_sizes"] = 1.0
    found = model.evaluate(X, targets, batch_size=5, sample_weight=weights)
    assert found == pytest.approx(expected, rel=1e-4)
    history = model.fit(
        X,
        targets,
        batch_size=22,
        sample_weight=weights,
        validation_data=(X, targets, weights),
        verbose=0,
    )
    assert {name: history[name][0] for name in expected} == pytest.approx(expected, rel=1e-4)
    after = model.evaluate(X, targets, sample_weight=weights)
    assert history["val_loss"][0] == pytest.approx(after["loss"], rel=1e-5)
    assert after["loss"] < found["loss"]


@pytest.mark.slow
def test_weights_of_an_output_act_as_they_would_for_it_alone():
    """One head whose other has no weight trains as a model of one output does."""
    weights = RNG.uniform(0, 3, 22)
    targets = {"kind": CLASSES, "size": NUMBERS}
    both = ff.Model(TwoHeads(), optax.sgd(0.1), LOSS)

    class Alone(nn.Module):
        @nn.compact
        def __call__(self, x):
            return TwoHeads(name="heads")(x)["kind"]

    def init(rngs, x):
        return {"params": {"heads": TwoHeads().init(rngs, x)["params"]}}

    alone = ff.Model((init, Alone().apply), optax.sgd(0.1), "crossentropy")
    given = {"kind": weights, "size": np.zeros(22)}
    both.fit(X, targets, batch_size=22, epochs=3, sample_weight=given, verbose=0)
    alone.fit(X, CLASSES, batch_size=22, epochs=3, sample_weight=weights, verbose=0)
    kernel = both.state.params["Dense_0"]["kernel"]
    np.testing.assert_allclose(kernel, alone.state.params["heads"]["Dense_0"]["kernel"], rtol=1e-4)


@pytest.mark.parametrize(
    ("loss", "weights", "message"),
    [
        (LOSS, {"kin": np.ones(22)}, "weights for 'kin', and losses by name for 'kind', 'size'"),
        ("mse", {"kind": np.ones(22)}, "losses by name for no output: give sample_weight as one"),
        (LOSS, {"kind": np.ones(21)}, "22 rows but sample_weight"),
        (LOSS, {"kind": -np.ones(22)}, r"sample_weight\['kind'\] must be finite and not negative"),
        (LOSS, {"kind": np.ones((22, 2))}, r"sample_weight\['kind'\] must hold one number per ex"),
    ],
    ids=["name", "one loss", "rows", "negative", "shape"],
)
def test_weights_by_output_that_do_not_fit_are_refused(loss, weights, message):
    model = ff.Model(TwoHeads(), optax.sgd(0.1), loss)
    with pytest.raises(ValueError, match=message):
        model.fit(X, {"kind": CLASSES, "size": NUMBERS}, sample_weight=weights, verbose=0)


def test_weights_of_classes_go_into_those_of_their_output():
    model = ff.Model(TwoHeads(), optax.sgd(0.1), LOSS)
    with pytest.raises(ValueError, match="put the weights of the classes into those of their out"):
        model.fit(X, CLASSES, sample_weight={"kind": np.ones(22)}, class_weight={0: 2.0}, verbose=0)


def test_losses_in_a_sequence_are_called_by_their_position():
    loss = as_loss(["mse", "mae"], [1.0, 0.5])
    assert list(loss.losses) == ["output_0", "output_1"]
    one = np.ones(3, "f4")
    np.testing.assert_allclose(loss(3 * one, 4 * one, 0 * one, 0 * one), 11 * one)


def test_a_task_that_is_replaced_keeps_losses_weights_and_metrics():
    def apply(variables, x):
        return x, x

    task = ff.EvalTask(apply, {"b": "mae"}, loss={"a": "mse", "b": "mse"}, loss_weights=(1, 3))
    again = dataclasses.replace(task, data=[])
    assert again.loss.weights == {"a": 1, "b": 3}
    assert list(again.metrics) == list(task.metrics) == ["a_loss", "b_loss", "b_mae"]


def test_outputs_without_a_loss_are_left_alone():
    loss = as_loss({"a": "mse"})
    outputs = {"a": np.ones(2), "features": np.ones((2, 9))}
    np.testing.assert_allclose(loss(outputs, {"a": np.zeros(2)}), 1)


@pytest.mark.parametrize(
    ("loss", "weights", "message"),
    [
        ("mse", {"a": 1.0}, "there is one loss"),
        ({"a": "mse"}, {"b": 1.0}, "loss_weights name 'b'.*losses for 'a'"),
        (["mse", "mae"], [1.0], "2 losses, but 1 loss_weights"),
        ({"a": "mes"}, None, "Did you mean mse"),
        ({}, None, "There is no loss"),
    ],
    ids=["one loss", "unknown weight", "too few weights", "unknown loss", "none"],
)
def test_losses_and_weights_that_do_not_fit_are_refused(loss, weights, message):
    with pytest.raises(ValueError, match=message):
        as_loss(loss, weights)


ONE = np.ones((4, 2), "f4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ONE, ONE, ONE), r"a tuple of 2; got outputs and targets of shapes \(4, 2\), \(4, 2\)"),
        (({"a": ONE}, {"a": ONE, "b": ONE}), "a loss for 'b', but no such output: there are 'a'"),
        (({"a": ONE, "b": ONE}, {"a": ONE}), "a loss for 'b', but no such target"),
        ((ONE, ONE, ONE, ONE[:, 0]), "output 'b': loss 'mse' wants targets of the shape"),
    ],
    ids=["three", "output", "target", "shape"],
)
def test_outputs_and_targets_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        as_loss({"a": "mse", "b": "mse"})(*arguments)


def test_a_scalar_loss_of_one_of_several_outputs_is_refused():
    loss = as_loss({"a": lambda output, target: output.mean(), "b": "mse"})
    with pytest.raises(ValueError, match=r"output 'a': the loss returned a scalar.*\(4,\)"):
        loss(ONE, ONE, ONE, ONE)


def test_a_label_that_is_out_of_range_is_found_with_its_output():
    model = ff.Model(TwoHeads(), optax.sgd(0.1), LOSS)
    with pytest.raises(ValueError, match="output 'kind': label 4 is out of range"):
        model.fit(X, {"kind": CLASSES + 1, "size": NUMBERS}, verbose=0)


def test_a_loss_that_broadcasts_one_of_the_outputs_is_refused():
    def squared(output, target):
        return ((output[:, :1] - target) ** 2).mean(-1)

    model = ff.Model(TwoHeads(tuple), optax.sgd(0.1), {"kind": "crossentropy", "size": squared})
    with pytest.raises(ValueError, match="'size_loss' broadcasts outputs against targets"):
        model.fit(X, (CLASSES, NUMBERS[:, 0]), verbose=0)


def test_the_loss_is_the_object_that_a_task_holds():
    task = ff.TrainTask(lambda v, x, **_: x, optax.sgd(0.1), LOSS)
    assert isinstance(task.loss, LossByOutput)
