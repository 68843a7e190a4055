"""Objectives that call the model by themselves, with all options of a task."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from loops import assert_close, waves
from marks import slow, thorough
from strategies import options_of_loops

import flaxfit as ff
from flaxfit import losses
from flaxfit.callbacks import EarlyStopping

N, BATCH = 22, 8
RNG = np.random.default_rng(0)
CHOSEN = RNG.normal(size=(N, 5)).astype(np.float32)
REJECTED = RNG.normal(size=(N, 5)).astype(np.float32)
LABELS = RNG.integers(0, 3, N).astype(np.int32)
WEIGHTS = RNG.uniform(0.5, 2, N).astype(np.float32)
DEVICES = jax.devices()[:4]
STRATEGIES = options_of_loops()
REWARD = nn.Dense(1)
PARAMS = {"kernel": RNG.normal(size=(5, 1)).astype(np.float32), "bias": np.zeros(1, np.float32)}
REFERENCE = {"kernel": RNG.normal(size=(5, 1)).astype(np.float32), "bias": np.ones(1, np.float32)}
FROZEN = {"companions": {"reference": (REWARD, {"params": REFERENCE})}}


def preference(apply, batch, rngs, reference):
    """The loss of DPO, with a frozen reference."""
    chosen, rejected = batch.inputs
    now = apply(chosen) - apply(rejected)
    lead = (now - (reference(chosen) - reference(rejected)))[:, 0]
    return -jax.nn.log_sigmoid(0.5 * lead), {"accuracy": lead > 0}


def pairs(n=N, weights=None, epochs=1):
    return ff.ArrayStream((CHOSEN[:n], REJECTED[:n]), (), weights, batch_size=BATCH, epochs=epochs)


def loop_of(objective, strategy="one", *, params=PARAMS, debug=False, **options):
    usual = {"apply": REWARD, "optimizer": optax.sgd(0.5), "data": pairs(weights=WEIGHTS)}
    task = ff.TrainTask(**{**usual, **options}, objective=objective)
    given = {"n_steps_per_checkpoint": 3, "first_checkpoint": 3, "stdout": False, "debug": debug}
    return ff.TrainLoop(lambda *_: {"params": params}, task, 0, **given, **STRATEGIES[strategy])


@functools.cache
def preference_by_hand():
    """The parameters, the loss and the accuracy of an epoch, by NumPy."""
    kernel, sums = PARAMS["kernel"], np.zeros(3)
    for start in range(0, N, BATCH):
        rows = slice(start, start + BATCH)
        apart, w = (CHOSEN - REJECTED)[rows], WEIGHTS[rows]
        ahead = (apart @ (kernel - REFERENCE["kernel"]))[:, 0]
        values = np.logaddexp(0, -0.5 * ahead)
        sums += (w * values).sum(), (w * (ahead > 0)).sum(), w.sum()
        # The slope of log(1 + exp(-z)) is -1 / (1 + exp(z)).
        slopes = -0.5 * w / (1 + np.exp(0.5 * ahead)) / w.sum()
        kernel = kernel - 0.5 * apart.T @ slopes[:, None]
    return {**PARAMS, "kernel": kernel}, sums[0] / sums[2], sums[1] / sums[2]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [thorough("bfloat16"), "float16"])
def test_it_calls_a_model_of_low_precision_with_inputs_of_its_own(precision):
    low = loop_of(preference, precision=precision, **FROZEN).next_step()
    assert low.loss == pytest.approx(loop_of(preference, **FROZEN).next_step().loss, rel=1e-2)
    assert low.state.params["kernel"].dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [("data parallel", 2), ("fsdp", 2), *(thorough(name, 1) for name in STRATEGIES)],
)
def test_preferences_are_trained_as_by_hand_on_every_strategy(strategy, accumulate):
    (checkpoint,) = loop_of(preference, strategy, accumulate=accumulate, **FROZEN)
    params, loss, accuracy = preference_by_hand()
    assert_close(dict(checkpoint.state.params), params, rtol=1e-5, atol=1e-6)
    assert checkpoint.loss == pytest.approx(loss, rel=1e-6)
    assert checkpoint.metrics["accuracy"] == pytest.approx(accuracy, rel=1e-6)


class Net(nn.Module):
    """A network with dropout, running statistics and a term of the loss."""

    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=not self.train)(nn.Dense(8, kernel_init=waves)(x))
        self.sow("losses", "size", 1e-3 * jnp.mean(x**2))
        x = nn.Dropout(0.3, deterministic=not self.train)(x)
        return nn.Dense(3, kernel_init=waves)(x)


class Dropping(nn.Module):
    """A network with dropout in evaluation, too."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, kernel_init=waves)(nn.Dropout(0.5, deterministic=False)(x))


def crossentropy(apply, batch, rngs):
    return losses.crossentropy(apply(*batch.inputs), *batch.targets)


def masked(apply, batch, rngs):
    is_counted = batch.targets[0] != 1
    return crossentropy(apply, batch, rngs), is_counted, {"is_counted": is_counted}


def scored(apply, batch, rngs):
    outputs = apply(*batch.inputs)
    right = outputs.argmax(-1) == batch.targets[0]
    return losses.crossentropy(outputs, *batch.targets), {"right": right}


OPTIONS = {
    "plain": {},
    "clip, ema and norms": {"clip_norm": 0.1, "ema": 0.9, "norms": ".*kernel"},
    "freeze": {"freeze": "Dense_0/.*"},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "skip": {"skip_nonfinite": True},
    "accumulate": {"accumulate": 2},
}


MARKS = dict.fromkeys(OPTIONS, thorough) | dict.fromkeys(("plain", "float16"), slow)


@pytest.mark.parametrize("name", [mark(name) for name, mark in MARKS.items()])
def test_one_call_is_a_loss_bit_for_bit(name):
    def run(**given):
        data = ff.ArrayStream(CHOSEN, LABELS, batch_size=BATCH, epochs=1, drop_remainder=True)
        task = ff.TrainTask(Net(), optax.adam(0.1), data=data, **given, **OPTIONS[name])
        loop = ff.TrainLoop(Net(), task, 0, stdout=False, devices=DEVICES[:1])
        *_, last = loop
        return last

    one, other = run(loss="crossentropy"), run(objective=crossentropy)
    jax.tree.map(np.testing.assert_array_equal, one.state.variables, other.state.variables)
    left_out = {name for name in one.metrics if name.startswith("labels")}
    assert one.metrics.keys() - left_out == other.metrics.keys()
    assert one.loss == other.loss


def consistency(apply, batch, rngs):
    """Two passes with different dropout, as in R-Drop."""
    first, second = apply(*batch.inputs), apply(*batch.inputs)
    values = losses.crossentropy(first, *batch.targets)
    return values, {"distance": jnp.abs(first - second).max(-1)}


@pytest.mark.slow
def test_each_call_has_its_own_dropout_and_the_state_that_the_one_before_left():
    def first_step(objective):
        data = ff.ArrayStream(CHOSEN, LABELS, batch_size=BATCH)
        task = ff.TrainTask(Net(), optax.sgd(0.0), objective=objective, data=data)
        checkpoint = ff.TrainLoop(Net(), task, 0, stdout=False, devices=DEVICES[:1]).next_step()
        return checkpoint.metrics, checkpoint.model_state["batch_stats"]["BatchNorm_0"]["mean"]

    _, after_one = first_step(crossentropy)
    metrics, after_two = first_step(consistency)
    assert metrics["distance"] > 0
    # Of a momentum of 0.99, from 0.
    np.testing.assert_allclose(after_two, after_one * (1 + 0.99), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_own_keys_make_two_calls_equal():
    def same(apply, batch, rngs):
        first, second = (apply(*batch.inputs, rngs=rngs) for _ in range(2))
        return losses.crossentropy(first, *batch.targets), {"d": jnp.abs(first - second).max(-1)}

    assert first_of(same, module=Dropping()).metrics["d"] == 0


@pytest.mark.slow
def test_fit_and_evaluate_report_the_objective():
    module = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    model = ff.Model(module, optax.adam(0.1), None, metrics=["accuracy"], objective=scored)
    data = (CHOSEN, LABELS)
    history = model.fit(*data, epochs=2, verbose=0, validation_data=data)
    assert {"loss", "right", "val_loss", "val_right", "val_accuracy"} <= history.keys()
    found = model.evaluate(*data)
    assert found["right"] == pytest.approx(found["accuracy"])
    usual = ff.Model(module, optax.adam(0.1), "crossentropy")
    assert found["loss"] == pytest.approx(usual.evaluate(*data)["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("objective", "error", "message"),
    [
        (lambda a, b, r: a(b.inputs[0]).mean(), ValueError, r"shape \(\); expected one value per"),
        (
            lambda a, b, r: None,
            TypeError,
            r"returned NoneType; expected values of shape \(8, ...\)",
        ),
        (
            lambda a, b, r: (a(b.inputs[0])[:, 0], a(b.inputs[1])[:, 0]),
            ValueError,
            "the objective returned is taken for weights",
        ),
        (
            lambda a, b, r: (a(b.inputs[0])[:, 0], {"x": 1.0}),
            ValueError,
            r"reports 'x' of shape \(\); expected one value per example",
        ),
        (
            lambda a, b, r: a(b.inputs[0])[:, 0] - a(b.inputs[0])[:, 0].mean(),
            ValueError,
            "depends on the other examples of the batch",
        ),
        (lambda a, b, r: a(b.inputs[0], x=1)[:, 0], TypeError, "by position or by keyword"),
        (
            lambda a, b, r: b.inputs[0].sum(-1),
            ValueError,
            "did not call the model: compute its values from apply",
        ),
        (
            lambda a, b, r: (a(b.inputs[0])[:, 0], {"loss": b.inputs[0]}),
            ValueError,
            "cannot report loss: the loop reports its own number",
        ),
        (
            lambda a, b, r: (a(b.inputs[0])[:, 0], {"val_x": b.inputs[0]}),
            ValueError,
            "cannot report val_x: it would pass for a",
        ),
    ],
    ids=["scalar", "none", "two losses", "aux", "coupled", "inputs", "no call", "loss", "val_x"],
)
def test_what_is_no_objective_is_refused_in_words(objective, error, message):
    with pytest.raises(error, match=message):
        loop_of(objective).next_step()


@pytest.mark.slow
def test_one_that_compares_examples_needs_a_whole_batch():
    def centred(apply, batch, rngs):
        values = apply(batch.inputs[0])[:, 0]
        return (values - values.mean()) ** 2

    def trained(strategy):
        (*_, last) = loop_of(centred, strategy, data=pairs(16, epochs=None), pad=False).run(3)
        return last.loss

    assert trained("fsdp") == pytest.approx(trained("one"), rel=1e-5)
    with pytest.raises(ValueError, match="Cannot compute this objective with 4 devices"):
        trained("data parallel")


def gathered(apply, batch, rngs):
    """Each row of this device against those of all, by the library's loss and by hand."""
    first, second = (apply(x) for x in batch.inputs)
    mean = jax.lax.all_gather(first, "replica", tiled=True).mean()
    pairs = (jnp.sin(each * AXES) for each in (first, second))
    values = losses.info_nce(*pairs, temperature=1.0)
    return values + ((first - mean) ** 2)[:, 0], {"first": first[:, 0]}


AXES = np.arange(1.0, 5.0, dtype=np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data parallel", thorough("fsdp")])
def test_one_that_gathers_the_examples_of_all_devices_is_that_of_one(strategy):
    def trained(strategy):
        # The rest of an epoch is half a batch.
        options = {"data": pairs(20, epochs=2), "pad": False, "optimizer": optax.sgd(0.01)}
        return list(loop_of(gathered, strategy, **options))

    found, one = trained(strategy), trained("one")
    assert len(found) == len(one) == 2
    for mine, theirs in zip(found, one, strict=True):
        assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-5)
    assert_close(*(dict(each[-1].state.params) for each in (found, one)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "with batches that may be padded: the value of an example depends on the other"),
        ({"pad": False, "accumulate": 2}, "with accumulate=2: the value of an example depends"),
    ],
    ids=str,
)
@pytest.mark.parametrize("debug", [False, thorough(True)])
def test_one_that_gathers_is_refused_where_rows_are_padded_or_divided(options, message, debug):
    with pytest.raises(ValueError, match=message):
        loop_of(gathered, debug=debug, **options).next_step()


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [
        lambda apply, batch, rngs: apply(*batch.inputs).sum(-1) / len(batch.inputs[0]),
        lambda apply, batch, rngs: apply(batch.inputs[0] - batch.inputs[0].mean(0)).sum(-1),
        lambda apply, batch, rngs: apply(*batch.inputs)[::-1].sum(-1),
    ],
    ids=["number", "inputs", "order"],
)
def test_the_debug_mode_finds_by_trial_that_examples_are_compared(objective):
    with pytest.raises(ValueError, match="batches that may be padded"):
        first_of(objective, debug=True)
    assert np.isfinite(first_of(objective, debug=True, pad=False).loss)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [thorough(1), 2])
def test_the_debug_mode_takes_noise_weights_and_slopes_by_example(accumulate):
    def objective(apply, batch, rngs):
        (x,) = batch.inputs
        noise = jax.random.normal(rngs["dropout"], x.shape)
        slope = jax.grad(lambda x: apply(x).sum())(x)
        values = jnp.square(apply(x + noise)).sum(-1) + slope.sum(-1)
        return values, batch.targets[0] != 1

    debugged = first_of(objective, debug=True, accumulate=accumulate)
    compiled = first_of(objective, accumulate=accumulate)
    assert debugged.loss == pytest.approx(compiled.loss, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse"}, "either a loss or an objective"),
        ({"metrics": ["accuracy"]}, "return them as its aux"),
        ({"across": "batch"}, "across='batch' is for a loss of the outputs"),
        ({"step": lambda state, batch: (state, {})}, "objective would have no effect"),
    ],
)
def test_options_that_exclude_it_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ff.TrainTask(REWARD, optax.sgd(0.1), objective=crossentropy, **options)


CLASSIFIER = nn.Dense(3, kernel_init=waves)
THREE = {"kernel": RNG.normal(size=(5, 3)).astype(np.float32), "bias": np.zeros(3, np.float32)}


def first_of(objective, data=(CHOSEN, LABELS), module=CLASSIFIER, debug=False, **options):
    init = (lambda rngs, *x: {"params": THREE}) if module is CLASSIFIER else module
    task = ff.TrainTask(module, optax.sgd(0.5), objective=objective, data=data, **options)
    given = {"stdout": False, "devices": DEVICES[:1], "debug": debug, "grad_norm": not debug}
    return ff.TrainLoop(init, task, 0, **given).next_step()


@pytest.mark.slow
def test_results_are_weighted_as_its_values():
    assert first_of(masked).metrics["is_counted"] == 1


@pytest.mark.slow
def test_a_slope_over_the_inputs_may_be_a_term():
    def smooth(apply, batch, rngs):
        (x,) = batch.inputs
        slope = jax.grad(lambda x: apply(x).sum())(x)
        return crossentropy(apply, batch, rngs) + jnp.square(slope).sum(-1)

    assert first_of(smooth).loss - first_of(crossentropy).loss == pytest.approx(
        (THREE["kernel"].sum(1) ** 2).sum(), rel=1e-5
    )


@pytest.mark.slow
def test_two_calls_in_evaluation_have_two_dropouts():
    options = {"objective": consistency, "eval_rngs": ("dropout",)}
    model = ff.Model(Dropping(), optax.sgd(0.1), None, **options)
    assert model.fit(CHOSEN, LABELS, verbose=0)["distance"][0] > 0
    assert model.evaluate(CHOSEN, LABELS)["distance"] > 0


@pytest.mark.slow
def test_it_takes_turns_with_a_loss():
    optimizer, module, data = optax.sgd(0.1), CLASSIFIER, (CHOSEN, LABELS)
    tasks = {
        "a": ff.TrainTask(module, optimizer, objective=masked, data=data),
        "b": ff.TrainTask(module, optimizer, "crossentropy", data),
    }
    loop = ff.TrainLoop(module, ff.MultiTask(tasks), 0, stdout=False, devices=DEVICES[:1])
    assert np.isfinite(loop.next_step().metrics["a/loss"])


@pytest.mark.parametrize("monitor", [*map(slow, ("loss", "val_loss", "right")), "val_right"])
def test_what_it_reports_can_be_monitored(monitor):
    stopping = EarlyStopping(monitor, mode="auto" if "loss" in monitor else "max", patience=5)
    options = {"objective": scored, "strategy": ff.DataParallel(DEVICES[:1])}
    model = ff.Model(CLASSIFIER, optax.sgd(0.1), None, **options)
    data = (CHOSEN, LABELS)
    history = model.fit(*data, verbose=0, validation_data=data, callbacks=[stopping])
    assert stopping.best_value == history[monitor][-1]


def follows_average(apply, batch, rngs, ema):
    """Its weights come from the average, which has no slope."""
    guesses, goals = apply(*batch.inputs), ema(*batch.inputs)
    return jnp.square(guesses - goals).sum(-1), jax.nn.softmax(goals).max(-1), {"goal": goals}


@pytest.mark.parametrize(
    ("strategy", "accumulate"), [slow("data parallel", 2), thorough("fsdp", 1)]
)
def test_the_average_is_a_fixed_target_on_every_strategy(strategy, accumulate):
    def run(strategy, **options):
        options = {"params": THREE, "ema": 0.5, "freeze": "bias", **options}
        data = ff.ArrayStream(CHOSEN, (), batch_size=BATCH, epochs=1)
        (last,) = loop_of(follows_average, strategy, apply=CLASSIFIER, data=data, **options)
        return last

    found, one = run(strategy, accumulate=accumulate), run("one")
    assert found.metrics == pytest.approx(one.metrics, rel=1e-5)


@pytest.mark.slow
def test_the_first_average_is_the_model_itself_and_gives_no_gradient():
    def drift(apply, batch, rngs, ema):
        return apply(*batch.inputs)[:, 0] - ema(*batch.inputs)[:, 0]

    first = first_of(drift, ema=0.5)
    alone = first_of(lambda apply, batch, rngs: apply(*batch.inputs)[:, 0])
    assert first.loss == 0 and first.metrics["grad_norm"] == alone.metrics["grad_norm"]


@pytest.mark.slow
def test_the_average_gives_no_gradient_through_its_inputs_either():
    """Other than a companion."""

    def seen_by(average):
        def objective(apply, batch, rngs, ema, companion):
            outputs = apply(*batch.inputs)
            return (outputs + (ema if average else companion)(outputs))[:, 0]

        variables = {"params": {"kernel": 2 * np.eye(5, dtype="f4"), "bias": np.zeros(5, "f4")}}
        module = nn.Dense(5)
        options = {"companions": {"companion": (module, variables)}, "ema": 0.5}
        return first_of(objective, (CHOSEN, LABELS), module, **options).metrics["grad_norm"]

    alone = first_of(lambda apply, batch, rngs: apply(*batch.inputs)[:, 0], module=nn.Dense(5))
    assert seen_by(average=True) == pytest.approx(alone.metrics["grad_norm"], rel=1e-6)
    assert seen_by(average=False) == pytest.approx(3 * alone.metrics["grad_norm"], rel=1e-6)


@pytest.mark.slow
def test_in_evaluation_the_average_is_the_model_that_is_measured():
    def drift(apply, batch, rngs, ema):
        goals = ema(*batch.inputs)
        return jnp.square(apply(*batch.inputs) - 1 - goals), {"goal": goals}

    options = {"objective": drift, "ema": 0.5}
    model = ff.Model(CLASSIFIER, optax.sgd(0.1), None, **options)
    model.fit(CHOSEN, (), epochs=2, verbose=0)
    found = model.evaluate(CHOSEN, ())
    assert found["loss"] == 1
    assert found["goal"] == pytest.approx(model.predict(CHOSEN).mean(), rel=1e-5)


def test_one_that_asks_for_an_average_needs_one_and_calls_the_model_itself():
    with pytest.raises(ValueError, match="has a parameter ema.*such as ema=0.99"):
        first_of(follows_average)
    with pytest.raises(ValueError, match="did not call the model"):
        first_of(lambda apply, batch, rngs, ema: ema(*batch.inputs)[:, 0], ema=0.5)
    bound = functools.partial(lambda apply, batch, rngs, ema: apply(*batch.inputs) * ema, ema=0)
    assert first_of(bound).loss == 0


def denoise(apply, batch, rngs):
    (x,) = batch.inputs
    return ((apply(x + jax.random.normal(rngs["noise"], x.shape)) - x) ** 2).mean(-1)


@pytest.mark.slow
def test_an_objective_names_streams_that_an_nnx_module_does_not_have():
    def model(**options):
        net = nnx.Linear(5, 5, rngs=nnx.Rngs(0))
        return ff.Model(net, optax.sgd(0.1), objective=denoise, **options)

    with pytest.raises(KeyError) as raised:
        model(eval_rngs="noise").fit(CHOSEN, (), verbose=0)
    words = "streams of the objective are dropout: rngs=('dropout', 'noise') of"
    assert words in str(raised.value.__notes__)
    both = model(rngs="noise", eval_rngs="noise")
    both.fit(CHOSEN, (), verbose=0)
    assert np.isfinite(both.evaluate(CHOSEN, (), verbose=0)["loss"])
    with pytest.raises(KeyError) as raised:
        model(rngs="noise").evaluate(CHOSEN, (), verbose=0)
    assert "are none: eval_rngs=('noise',) of the Model" in str(raised.value.__notes__)
