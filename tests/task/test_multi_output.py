"""Several outputs: their losses by name, weighted; each with metrics of its own."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import assert_close, init_of, waves
from marks import thorough
from strategies import one_device

import flaxfit as ff
from flaxfit import metrics
from flaxfit.task._multi_output import as_loss
from flaxfit.task._output_metrics import as_metrics

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 3)).astype("f4")
CLASSES = RNG.integers(0, 4, 22)
NUMBERS = RNG.normal(size=(22, 2)).astype("f4")
LOSS = {"kind": "crossentropy", "size": "mse"}
TWO = (np.full(2, 3.0), np.full(2, 5.0))


class TwoHeads(nn.Module):
    """A model whose outputs are a mapping or a tuple."""

    form: type = dict

    @nn.compact
    def __call__(self, x):
        kind, size = nn.Dense(4, kernel_init=waves)(x), nn.Dense(2, kernel_init=waves)(x)
        return {"size": size, "kind": kind} if self.form is dict else (kind, size)


def measured(outputs, weights=None):
    """The two losses and an accuracy, each by its own weights, by NumPy."""
    weights = weights or dict.fromkeys(LOSS)
    logits, numbers = (np.asarray(outputs[name], "f8") for name in ("kind", "size"))
    kind = np.log(np.exp(logits).sum(1)) - logits[np.arange(22), CLASSES]
    size = ((numbers - NUMBERS) ** 2).mean(1)
    return {
        "kind_loss": np.average(kind, weights=weights["kind"]),
        "size_loss": np.average(size, weights=weights["size"]),
        "kind_accuracy": np.average(logits.argmax(1) == CLASSES, weights=weights["kind"]),
    }


@pytest.mark.parametrize("form", [dict, thorough(tuple)])
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
    expected = measured(outputs)
    expected["loss"] = expected["kind_loss"] + 0.1 * expected["size_loss"]
    expected["size_mae"] = np.mean(np.abs(outputs["size"] - NUMBERS))
    expected["size_rmse"] = np.sqrt(expected["size_loss"])
    found = model.evaluate(X, targets, batch_size=16)
    assert found == pytest.approx(expected, rel=1e-4)
    assert {f"val_{name}" for name in expected} <= history.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_devices", "form"), [(4, tuple), thorough(4, dict), thorough(1, dict), thorough(1, tuple)]
)
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
    expected = measured(before, weights)
    expected["loss"] = expected["kind_loss"] + 0.1 * expected["size_loss"]
    expected["n_sizes"] = 1.0
    found = model.evaluate(X, targets, batch_size=5, sample_weight=weights)
    assert found == pytest.approx(expected, rel=1e-4)
    options = {"validation_data": (X, targets, weights), "verbose": 0}
    history = model.fit(X, targets, batch_size=22, sample_weight=weights, **options)
    assert {name: history[name][0] for name in expected} == pytest.approx(expected, rel=1e-4)
    after = model.evaluate(X, targets, batch_size=5, sample_weight=weights)
    assert history["val_loss"][0] == pytest.approx(after["loss"], rel=1e-5)
    assert after["loss"] < found["loss"]


class Sizes(NamedTuple):
    """Outputs, or their targets, by the names of fields."""

    small: Any
    big: Any


SMALL, BIG = NUMBERS[:, :1], 5 + 2 * NUMBERS[:, 1:]


@pytest.mark.parametrize("targets", [Sizes(SMALL, BIG), {"big": BIG, "small": SMALL}])
@pytest.mark.parametrize("loss", [{"big": "mse", "small": "mse"}, None])
def test_fields_of_outputs_and_targets_are_their_names(loss, targets):
    metrics, weights = {"big": ["mae"], "small": ["mae"]}, {"big": 1.0 + np.arange(22)}
    options = {"loss": loss, "loss_weights": loss and {"big": 3.0}, "metrics": metrics}
    task = ff.EvalTask(lambda v, x: Sizes(x[:, :1], x[:, 1:2]), **options)
    state = ff.InferenceState(np.int32(0), {}, {})
    loop = ff.EvalLoop(task, strategy=one_device())
    found = loop.measure(state, [(X, targets, weights if loss else None)])
    errors, weights = X[:, 1] - BIG[:, 0], weights["big"] if loss else None
    assert found["big_mae"] == pytest.approx(np.average(abs(errors), weights=weights), 1e-5)
    if loss:
        assert found["big_loss"] == pytest.approx(np.average(errors**2, weights=weights), 1e-5)
        assert found["loss"] == pytest.approx(3 * found["big_loss"] + found["small_loss"], 1e-5)


def test_a_model_with_named_outputs_is_trained_by_their_names():
    def apply(variables, x, **_):
        return Sizes(x @ variables["params"]["small"], x @ variables["params"]["big"])

    def init(rngs, x):
        return {"params": dict.fromkeys(("small", "big"), np.zeros((3, 1), "f4"))}

    losses = {"big": "mse", "small": None}
    model = ff.Model((init, apply), optax.sgd(0.1), losses, strategy=one_device())
    model.fit(X, {"big": BIG, "small": SMALL}, batch_size=22, verbose=0)
    assert not np.any(model.state.params["small"])
    np.testing.assert_allclose(model.state.params["big"], 0.2 * X.T @ BIG / 22, rtol=1e-4)


def test_targets_in_order_beside_outputs_in_a_mapping_are_refused():
    outputs = dict(zip(LOSS, TWO, strict=True))
    with pytest.raises(ValueError, match="which of 2 targets belongs .* 'kind', 'size', as a map"):
        as_loss(LOSS)(outputs, *TWO)
    np.testing.assert_allclose(as_loss({"size": "mse"})(outputs, TWO[0]), 4)


TARGETS = {"kind": CLASSES, "size": NUMBERS}
WEIGHTS = {"kind": RNG.uniform(0, 3, 22), "size": (np.arange(22) % 3).astype(float)}


def batches_of(size, targets=TARGETS, weights=WEIGHTS):
    """The data in a list of batches, as a loader gives them."""
    data = (X, targets, weights)
    return [jax.tree.map(lambda a, i=i: a[i : i + size], data) for i in range(0, 22, size)]


def trained_on(data, **options):
    """The last checkpoint of a loop over data, with what an evaluation on it has measured."""
    metrics, apply = {"kind": "accuracy"}, TwoHeads().apply
    task = ff.TrainTask(apply, optax.adam(0.1), LOSS, data, metrics, loss_weights={"size": 0.1})
    measure = ff.EvalLoop(ff.EvalTask(apply, metrics, data, loss=task.loss))
    options = {"callbacks": [measure], "stdout": False, "strategy": one_device(), **options}
    return list(ff.TrainLoop(init_of(TwoHeads(), 3), task, 0, n_steps=10, **options))[-1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ff.DataParallel(), thorough(ff.Sharded())])
def test_batches_with_weights_by_output_give_what_arrays_give(strategy):
    expected = trained_on(ff.ArrayStream(X, TARGETS, WEIGHTS, batch_size=5))
    options = {"strategy": strategy, "steps_per_call": 4, "n_steps_per_checkpoint": 9}
    found = trained_on(batches_of(5) * 2, **options)
    assert_close(found.state.params, expected.state.params, rtol=2e-4, atol=1e-6)
    names = [name for name in expected.metrics if name.startswith("val_")]
    assert len(names) >= 4
    for name in names:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4)


@pytest.mark.slow
def test_targets_without_weight_leave_no_mark_whatever_they_are():
    weights = {name: np.where(np.arange(22) % 4, 1.0, 0.0) for name in LOSS}
    missing = {"kind": CLASSES.copy(), "size": NUMBERS.copy()}
    missing["kind"][::4], missing["size"][::4] = -1, np.nan
    everything, some = (batches_of(11, targets, weights) for targets in (TARGETS, missing))
    expected, found = map(trained_on, (everything, some))
    jax.tree.map(np.testing.assert_array_equal, found.state.params, expected.state.params)
    assert found.metrics == expected.metrics and np.isfinite(found.metrics["val_loss"])


@pytest.mark.slow
def test_metrics_see_the_targets_that_have_no_weight():
    def error(outputs, targets):
        return abs(outputs["size"] - targets["size"]).mean(-1)

    def count(output, target, weights=None):
        return (jnp.sum(target == 100),)

    numbers, weights = NUMBERS.copy(), {"size": (np.arange(22) % 4 > 0).astype("f4")}
    numbers[::4] = 100
    data = [(X, {"kind": CLASSES, "size": numbers}, weights)]
    hundreds = ff.metrics.Metric(count, lambda sums: sums[0], "hundreds")
    metrics = {"error": error, "size": [hundreds]}
    task = ff.TrainTask(TwoHeads().apply, optax.sgd(0.0), LOSS, data, metrics)
    loop = ff.TrainLoop(init_of(TwoHeads(), 3), task, 0, strategy=one_device(), stdout=False)
    found = loop.next_step()
    outputs = jax.jit(TwoHeads().apply)({"params": found.state.params}, X)
    expected = np.abs(np.asarray(outputs["size"]) - numbers).mean()
    assert found.metrics["error"] == pytest.approx(expected, 1e-5)
    assert found.metrics["size_loss"] < 100
    assert found.metrics["size_hundreds"] == np.sum(numbers == 100)


@pytest.mark.slow
def test_tasks_that_take_turns_may_have_weights_by_output():
    sgd, apply = optax.sgd(0.1), TwoHeads().apply
    weighted = ff.TrainTask(apply, sgd, LOSS, batches_of(22))
    plain = ff.TrainTask(apply, sgd, LOSS, [(X, TARGETS)])

    def first(task):
        options = {"strategy": one_device(), "stdout": False}
        return ff.TrainLoop(init_of(TwoHeads(), 3), task, 0, **options).next_step().metrics

    both, alone = first(ff.MultiTask({"weighted": weighted, "plain": plain})), first(weighted)
    for name in "loss", "kind_loss", "size_loss":
        assert both[f"weighted/{name}"] == pytest.approx(alone[name], rel=1e-5)


def own_step(state, batch):
    return state, {}


@pytest.mark.parametrize(
    ("loss", "weights", "options", "message"),
    [
        (LOSS, {"kin": np.ones(22)}, {}, "weights for 'kin', but losses by name for 'kind', 'siz"),
        (LOSS, {"kind": -np.ones(22)}, {}, "weights for 'kind', which must be finite and not neg"),
        (LOSS, {"kind": np.ones((22, 2))}, {}, r"'kind' has .*\(22,\) and weights .*\(22, 2\)"),
        ("mse", {"kind": np.ones(22)}, {}, "losses by name for no output: pass the weights as on"),
        (None, {"kind": np.ones(22)}, {"step": own_step}, "outputs 'kind', which a custom step"),
    ],
    ids=["name", "negative", "shape", "one loss", "own step"],
)
@pytest.mark.parametrize("is_array", [False, True], ids=["batches", "arrays"])
def test_weights_by_output_of_batches_that_do_not_fit_are_refused(
    loss, weights, options, message, is_array
):
    with pytest.raises(ValueError, match=message):
        data = (X, TARGETS, weights) if is_array else batches_of(22, weights=weights)
        task = ff.TrainTask(TwoHeads().apply, optax.sgd(0.1), loss, data, **options)
        ff.TrainLoop(init_of(TwoHeads(), 3), task, 0, stdout=False).next_step()


def test_an_evaluation_without_losses_by_name_refuses_weights_by_output():
    task = ff.EvalTask(TwoHeads().apply, ["mse"], (X, TARGETS, WEIGHTS))
    state = ff.init_state(TwoHeads().init, optax.sgd(0.1), jax.random.key(0), X)
    with pytest.raises(ValueError, match="'kind', 'size', but losses by name for no output"):
        ff.EvalLoop(task).measure(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_weight": {"kind": np.ones(21)}}, "22 rows but sample_weight"),
        (
            {"sample_weight": {"kind": -np.ones(22)}},
            r"sample_weight\['kind'\] must be finite and not negative",
        ),
        (
            {"sample_weight": {"kind": np.ones(22)}, "class_weight": {0: 2.0}},
            "multiply the weights of that output by the class weights",
        ),
    ],
)
def test_weights_by_output_that_do_not_fit_are_refused(options, message):
    model = ff.Model(TwoHeads(), optax.sgd(0.1), LOSS)
    with pytest.raises(ValueError, match=message):
        model.fit(X, {"kind": CLASSES, "size": NUMBERS}, **options, verbose=0)


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


@pytest.mark.parametrize(
    "given", [[["accuracy"], ["mae", "rmse"]], ("accuracy", ["mae", "rmse"]), [None, ["mae"]]]
)
def test_metrics_may_be_lists_in_the_order_of_the_outputs(given):
    by_name = dict(zip(LOSS, given, strict=True))
    expected = as_metrics(by_name, as_loss(LOSS))
    found = as_metrics(given, as_loss(LOSS))
    assert list(found) == list(expected)
    assert [each.output for each in found.values()] == [each.output for each in expected.values()]


def test_metrics_by_name_that_are_of_no_output_are_refused():
    for given in ["mae"], "mae", [["mae"], ["mse"], ["rmse"]]:
        with pytest.raises(
            ValueError, match=r"There are 2 outputs \(kind, size\), and metrics for"
        ):
            as_metrics(given, as_loss(LOSS))
    together = as_metrics([total := metrics.mean(lambda a, b, c, d: a, name="all")], as_loss(LOSS))
    assert together["all"] is total


def test_outputs_without_a_loss_are_left_alone():
    loss = as_loss({"a": "mse"})
    outputs = {"a": np.ones(2), "features": np.ones((2, 9))}
    np.testing.assert_allclose(loss(outputs, {"a": np.zeros(2)}), 1)


@pytest.mark.parametrize(
    "targets", [(np.zeros(2), np.ones(2)), (np.ones(2),), ({"output_1": np.ones(2)},)]
)
def test_none_is_the_loss_of_an_output_without_one(targets):
    loss = as_loss([None, "mse"], [None, 0.5])
    np.testing.assert_allclose(loss(*TWO, *targets), 8)
    assert as_loss({"a": None, "value": "mse"}, {"a": 3.0}).names == ("a", "value")
    again = as_loss(loss, [1.0, 2.0])
    np.testing.assert_allclose(again(*TWO, *targets), 32)


@pytest.mark.slow
def test_an_output_without_a_loss_is_measured_and_weighed_by_its_name():
    loss = {"kind": None, "size": "mse"}
    options = {"metrics": {"kind": "accuracy"}, "strategy": one_device()}
    model = ff.Model(TwoHeads(tuple), optax.sgd(0.1), loss, **options)
    weights = {"kind": (np.arange(22) < 10).astype(float), "size": np.ones(22)}
    history = model.fit(X, (CLASSES, NUMBERS), batch_size=22, sample_weight=weights, verbose=0)
    assert history.keys() >= {"loss", "size_loss", "kind_accuracy"}
    assert "kind_loss" not in history
    kind, size = model.predict(X)
    found = model.evaluate(X, (CLASSES, NUMBERS), sample_weight=weights)
    assert found["kind_accuracy"] == pytest.approx(np.mean(kind.argmax(1)[:10] == CLASSES[:10]))
    assert found["loss"] == pytest.approx(np.mean((size - NUMBERS) ** 2), rel=1e-5)


@pytest.mark.parametrize("weights", [0.5, np.float32(0.5), [0.5]])
def test_one_loss_has_one_weight(weights):
    task = ff.EvalTask(lambda v, x: x, {"mae": "mae"}, loss="mse", loss_weights=weights)
    state = ff.InferenceState(np.int32(0), {}, {})
    found = ff.EvalLoop(task).measure(state, (ONE, 3 * ONE))
    assert found == {"loss": 2.0, "mae": 2.0}


@pytest.mark.parametrize(
    ("loss", "weights", "message"),
    [
        ("mse", {"a": 1.0, "b": 2.0}, "there is one loss"),
        ("mse", {"nonsense": 2.0}, "there is one loss.*: give a number"),
        ("mse", "much", "there is one loss"),
        ([None, None], None, "There is no loss"),
        ({"a": "mse"}, {"b": 1.0}, "loss_weights contains 'b'.*losses only for 'a'"),
        (["mse", "mae"], [1.0], "2 losses, but 1 loss_weights"),
        ({"a": "mes"}, None, "Did you mean mse"),
        ({}, None, "There is no loss"),
        ({"val": "mse", "b": "mse"}, None, "cannot be called 'val': val_loss, its loss in train"),
        ({"b": "mse", "val_b": "mse"}, None, "cannot be called 'val_b'"),
    ],
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
        ((ONE, ONE, ONE, ONE[:, 0]), "output 'b': loss 'mse' expects targets and outputs of the s"),
    ],
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("squared", "target", "form"),
    [
        (lambda output, target: ((output[:, :1] - target) ** 2).mean(-1), NUMBERS[:, 0], dict),
        (lambda output, target: (output[:, 0] - target) ** 2, NUMBERS[:, :1], tuple),
    ],
    ids=["column against row", "row against column"],
)
def test_a_loss_that_broadcasts_one_of_the_outputs_is_refused(squared, target, form):
    losses = {"kind": "crossentropy", "size": squared}
    targets = {"kind": CLASSES, "size": target} if form is dict else (CLASSES, target)
    model = ff.Model(TwoHeads(form), optax.sgd(0.1), losses)
    name = "The loss of output 'size' broadcasts outputs against targets"
    with pytest.raises(ValueError, match=name):
        model.fit(X, targets, verbose=0)


@pytest.mark.parametrize("is_first_weighted", [True, thorough(False)])
def test_a_given_batch_with_other_weights_than_those_before_is_refused(is_first_weighted):
    whole = (X, {"kind": CLASSES, "size": NUMBERS})
    weighted = (*whole, WEIGHTS)
    first, other = (weighted, whole) if is_first_weighted else (whole, weighted)
    task = ff.TrainTask(TwoHeads().apply, optax.sgd(0.1), LOSS, [first] * 2)
    loop = ff.TrainLoop(init_of(TwoHeads(), 3), task, 0, strategy=one_device(), stdout=False)
    loop.next_step()
    with pytest.raises(ValueError, match="either it or the earlier batches have weights by output"):
        loop.next_step(other)
    assert loop.next_step(first).step == 2
