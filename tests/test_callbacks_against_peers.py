"""Callbacks, the choice of checkpoints and schedules beside those of Keras and torch.

They decide alike, and the rates are at most 1e-5 apart. What differs on purpose is in
`DIFFERENCES`; what has no peer, in `WITHOUT_PEER`.
"""

import csv
import functools
import itertools
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit import callbacks
from flaxfit.checkpoints import CheckpointFileWriter, best, list_steps
from flaxfit.optim import MultiOptimizer, OptimizerDef

DIFFERENCES = {  # What: in Keras, in flaxfit.
    "`EarlyStopping` on `nan`": ("counts as no improvement", "stops at once"),
    "the best of equal checkpoints": ("the first", "the last"),
    "the moving average begins": ("after the first step", "with the initial parameters"),
}
WITHOUT_PEER = {
    **dict.fromkeys(["Callback", "StatefulCallback", "Logger", "ExitCode"], "A type, no callback."),
    **dict.fromkeys(["JSONLogger", "LogTo", "SummaryLogger"], "Writes as CSVLogger, elsewhere."),
    **dict.fromkeys(["MLflowLogger", "TensorBoardLogger", "WandbLogger"], "Writes to a service."),
    **dict.fromkeys(["ProgressBar", "Timer", "Throughput", "MemoryReport", "Profiler"], "Watches."),
    **dict.fromkeys(["every", "at", "when"], "Chooses checkpoints."),
    **dict.fromkeys(["SaveOnSignal", "Watchdog", "Rollback", "Unfreeze"], "Keras has none."),
    "Export": "Compared with the model itself, in tests/export.",
    "Norms": "Compared with NumPy, in tests/callbacks.",
}

# They get the same values of a metric, one at each epoch.
SEQUENCES = {
    "falling": [5.0, 4.0, 3.0, 2.5, 2.25, 2.0, 1.0],
    "standing": [5.0, 4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0],
    "in small steps": [1.0, 0.995, 0.98, 0.978, 0.976, 0.974, 0.95, 0.949],
    "rising": [1.0, 2.0, 3.0, 4.0, 5.0],
    "up and down": np.random.default_rng(0).integers(0, 6, 30).astype(float).tolist(),
}


class Trained:
    """What a callback of Keras, or one of ours, asks of the model or loop that it belongs to."""

    def __init__(self):
        self.optimizer = SimpleNamespace(learning_rate=0.5)
        self.stop_training = False
        self.saved = []

    def save(self, path, **options):
        self.saved.append(int(Path(path).stem))

    @property
    def hyperparams(self):
        return {"learning_rate": self.optimizer.learning_rate}

    @property
    def state_in_place(self):
        return SimpleNamespace(opt_state=())

    def set_hyperparams(self, group, learning_rate):
        self.optimizer.learning_rate = learning_rate

    def get_weights(self):
        return []


def after_each(callback, values, read):
    """What is read of a model after each epoch of a callback of Keras."""
    model = Trained()
    callback.set_model(model)
    callback.on_train_begin()
    for epoch, value in enumerate(values):
        callback.on_epoch_begin(epoch)
        callback.on_epoch_end(epoch, {"val_loss": value})
        yield read(model)


def checkpoints_of(values, state=None):
    for step, value in enumerate(values, start=1):
        yield ff.Checkpoint(step=step, state=state, metrics={"val_loss": value})


@pytest.mark.parametrize("values", SEQUENCES.values(), ids=list(SEQUENCES))
@pytest.mark.parametrize("mode", ["auto", "min", "max"])
def test_early_stopping_stops_where_keras_does(values, mode, keras):
    for patience, min_delta, baseline, first in itertools.product(
        range(4), (0.0, 0.01), (None, 2.6), (0, 3)
    ):
        options = {"mode": mode, "patience": patience, "min_delta": min_delta}
        options |= {"baseline": baseline, "start_from_epoch": first}
        theirs = keras.callbacks.EarlyStopping("val_loss", **options)
        ours = callbacks.EarlyStopping("val_loss", restore_best=False, **options)
        expected = after_each(theirs, values, lambda model: model.stop_training)
        for checkpoint, stops in zip(checkpoints_of(values), expected, strict=True):
            assert ours(checkpoint).stop == stops, (options, checkpoint.step)
            assert ours.best == theirs.best, (options, checkpoint.step)
            assert ours.best_epoch == (None if theirs.best is None else theirs.best_epoch)
            assert ours.stopped_epoch == theirs.stopped_epoch
            if stops:
                break


def rates_of_plateau(values, **options):
    loop, plateau = Trained(), callbacks.ReduceLROnPlateau("val_loss", factor=0.5, **options)
    plateau.attach(loop)
    for checkpoint in checkpoints_of(values):
        plateau(checkpoint)
        yield loop.optimizer.learning_rate


VALUES = {"patience": (0, 1, 3), "min_delta": (0, 0.01), "cooldown": range(4), "min_lr": (0, 0.2)}
OF_PLATEAUS = [dict(zip(VALUES, each, strict=True)) for each in itertools.product(*VALUES.values())]


@pytest.mark.parametrize("values", SEQUENCES.values(), ids=list(SEQUENCES))
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_lowers_the_rate_where_keras_does(values, mode, keras):
    for options in OF_PLATEAUS:
        theirs = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, mode=mode, **options)
        expected = after_each(theirs, values, lambda model: float(model.optimizer.learning_rate))
        rates = rates_of_plateau(values, mode=mode, **options)
        np.testing.assert_allclose(list(rates), list(expected), rtol=1e-6, err_msg=str(options))


@pytest.mark.parametrize("values", SEQUENCES.values(), ids=list(SEQUENCES))
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_lowers_the_rate_where_torch_does(values, mode, torch):
    for options in OF_PLATEAUS:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer,
            mode,
            factor=0.5,
            patience=max(0, options["patience"] - 1),
            threshold=options["min_delta"],
            threshold_mode="abs",
            # That of Keras counts the epoch of the reduction itself.
            cooldown=max(0, options["cooldown"] - 1),
            min_lr=options["min_lr"],
            eps=0,
        )
        expected = []
        for value in values:
            scheduler.step(value)
            expected.append(optimizer.param_groups[0]["lr"])
        rates = rates_of_plateau(values, mode=mode, **options)
        np.testing.assert_allclose(list(rates), expected, rtol=1e-6, err_msg=str(options))


def make_loop(optimizer, params, n_steps, **options):
    """A loop of steps whose gradient is 1."""

    def apply(variables, x, **_):
        return x * sum(jax.tree.leaves(variables["params"])), {}

    x = np.ones((1, 1), np.float32)
    given = options.pop("task", {})
    task = ff.TrainTask(apply, optimizer, lambda outputs, _: outputs, [(x, x)] * n_steps, **given)

    def init(rngs, x):
        return {"params": params}

    return ff.TrainLoop(init, task, 0, stdout=False, devices=jax.devices()[:1], **options)


@pytest.mark.parametrize(
    "rule",
    [lambda epoch, rate: 0.1 * (epoch + 1), lambda epoch, rate: 0.5 * rate],
    ids=["absolute", "relative"],
)
def test_a_scheduler_sets_the_rates_that_keras_sets(rule, keras):
    theirs = keras.callbacks.LearningRateScheduler(rule)
    expected = list(after_each(theirs, [0.0] * 4, lambda model: model.optimizer.learning_rate))
    scheduler = callbacks.LearningRateScheduler(rule)
    loop = make_loop(optax.sgd(0.5), {"w": np.zeros(1)}, 4, callbacks=[scheduler])
    moved = np.diff([0.0] + [float(checkpoint.state.params["w"][0]) for checkpoint in loop])
    np.testing.assert_allclose(-moved, expected, rtol=1e-5)


def best_of(values, mode, keras, folder):
    """The best step of a folder of ours, and the last that Keras saves."""
    theirs = keras.callbacks.ModelCheckpoint(
        "{epoch}.keras", monitor="val_loss", mode=mode, save_best_only=True
    )
    *_, saved = after_each(theirs, values, lambda model: model.saved)
    with CheckpointFileWriter(folder, keep=1, monitor="val_loss", mode=mode) as write:
        for checkpoint in checkpoints_of(values, OF_NOTHING):
            write(checkpoint)
    return best(folder), saved[-1]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_checkpoint_is_that_of_keras(mode, keras, tmp_path):
    ours, theirs = best_of([3.0, 5.0, 4.0, 1.0, 2.0], mode, keras, tmp_path)
    assert ours == theirs


@pytest.mark.parametrize("threshold", [None, 3.5, 0.5])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_checkpoints_that_are_saved_are_those_of_keras(mode, threshold, keras, tmp_path):
    options = {"monitor": "val_loss", "mode": mode, "save_best_only": True}
    options["initial_value_threshold"] = threshold
    values = [3.0, 5.0, 5.0, 4.0, 1.0, 2.0, 6.0, 0.2]
    theirs = keras.callbacks.ModelCheckpoint("{epoch}.keras", **options)
    *_, saved = after_each(theirs, values, lambda model: model.saved)
    with CheckpointFileWriter(tmp_path, keep=None, **options) as write:
        for checkpoint in checkpoints_of(values, OF_NOTHING):
            write(checkpoint)
    assert list_steps(tmp_path) == saved


OF_NOTHING = ff.init_state(
    lambda *_: {"params": {"w": np.zeros(1)}}, optax.sgd(1.0), 0, (np.ones(1),)
)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_training_stops_at_the_loss_that_keras_stops_at(bad, keras):
    theirs, model = keras.callbacks.TerminateOnNaN(raise_error=True), Trained()
    theirs.set_model(model)
    ours = callbacks.StopOnNaN()
    for step, loss in enumerate([3.0, 1e30]):
        theirs.on_train_batch_end(step, {"loss": loss})
        ours(ff.Checkpoint(step=step, state=None, metrics={"loss": loss}))
    with pytest.raises(RuntimeError):
        theirs.on_train_batch_end(2, {"loss": bad})
    with pytest.raises(FloatingPointError):
        ours(ff.Checkpoint(step=2, state=None, metrics={"loss": bad}))


def test_a_table_of_numbers_holds_those_of_keras(keras, tmp_path):
    theirs = keras.callbacks.CSVLogger(tmp_path / "theirs.csv")
    *_, _ = after_each(theirs, SEQUENCES["standing"], lambda model: None)
    theirs.on_train_end()
    ours = callbacks.CSVLogger(tmp_path / "ours.csv")
    for checkpoint in checkpoints_of(SEQUENCES["standing"]):
        ours(checkpoint)
    ours.close()
    texts = [(tmp_path / f"{name}.csv").read_text() for name in ("ours", "theirs")]
    for text in texts:
        column = [float(row["val_loss"]) for row in csv.DictReader(text.splitlines())]
        assert column == SEQUENCES["standing"]


def test_the_moving_average_is_that_of_keras_but_for_its_start(keras):
    """Ours begins with the initial parameters, that of Keras with those after the first step."""
    momentum, n_steps = 0.9, 5
    options = {"task": {"ema": momentum}, "callbacks": [callbacks.SwapEMA()]}
    loop = make_loop(optax.sgd(0.5), {"w": np.ones(1, np.float32)}, n_steps, **options)
    list(loop)
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=momentum)
    variable = keras.Variable(np.ones(1, np.float32))
    for _ in range(n_steps):
        optimizer.apply([np.ones(1, np.float32)], [variable])
    optimizer.finalize_variable_values([variable])
    expected = float(variable.value[0]) + momentum**n_steps * 0.5
    np.testing.assert_allclose(loop.state.params["w"], expected, rtol=1e-5)


# Schedules, as the rates that a loop reports and takes.
SCHEDULES = {
    "exponential": optax.exponential_decay(0.1, 3, 0.5),
    "staircase": optax.exponential_decay(0.1, 3, 0.5, staircase=True),
    "polynomial": optax.polynomial_schedule(0.1, 0.01, 2.0, 6),
    "linear": optax.linear_schedule(0.1, 0.01, 6),
    "cosine": optax.cosine_decay_schedule(0.1, 8, alpha=0.1),
    "warm-up": optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 10, end_value=0.01),
}


def schedules_of_keras(keras):
    of = keras.optimizers.schedules
    return {
        "exponential": of.ExponentialDecay(0.1, 3, 0.5),
        "staircase": of.ExponentialDecay(0.1, 3, 0.5, staircase=True),
        "polynomial": of.PolynomialDecay(0.1, 6, 0.01, power=2.0),
        "linear": of.PolynomialDecay(0.1, 6, 0.01),
        "cosine": of.CosineDecay(0.1, 8, alpha=0.1),
        "warm-up": of.CosineDecay(0.0, 7, alpha=0.1, warmup_target=0.1, warmup_steps=3),
    }


@functools.cache
def rates_of_schedules(n_steps=12):
    """The rates that a loop reports, and those that its parameters move by."""
    each = {name: OptimizerDef(optax.sgd, learning_rate=rate) for name, rate in SCHEDULES.items()}
    params = {name: np.zeros(1, np.float32) for name in SCHEDULES}
    seen = list(make_loop(MultiOptimizer(*each.items()), params, n_steps))
    reported = {name: [c.metrics[f"learning_rate/{name}"] for c in seen] for name in SCHEDULES}
    at = {name: [0.0, *(float(c.state.params[name][0]) for c in seen)] for name in SCHEDULES}
    return {name: (reported[name], -np.diff(at[name])) for name in SCHEDULES}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_rates_of_keras(name, keras):
    reported, moved = rates_of_schedules()[name]
    expected = [float(schedules_of_keras(keras)[name](step)) for step in range(len(reported))]
    np.testing.assert_allclose(reported, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-5)


def test_the_average_overwrites_the_weights_when_that_of_keras_does(keras):
    """The averages differ by their start, the steps that overwrite the weights do not."""
    momentum, n_steps, options = 0.5, 7, {"ema_overwrite_frequency": 3}
    loop = make_loop(
        optax.sgd(0.5), {"w": np.ones(1, np.float32)}, n_steps, task={"ema": momentum, **options}
    )
    ours = [float(checkpoint.state.params["w"][0]) for checkpoint in loop]
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=momentum, **options)
    variable, theirs, average = keras.Variable(np.ones(1, np.float32)), [], 1.0
    for _ in range(n_steps):
        optimizer.apply([np.ones(1, np.float32)], [variable])
        theirs.append(float(variable.value[0]))
    overwritten = [step for step in range(1, n_steps) if theirs[step] - theirs[step - 1] != -0.5]
    assert overwritten == [2, 5]
    expected, w = [], 1.0
    for step in range(1, n_steps + 1):
        w -= 0.5
        average = momentum * average + (1 - momentum) * w
        w = average if step % 3 == 0 else w
        expected.append(w)
    assert ours == expected


def test_the_average_of_weights_is_that_of_torch(torch):
    average, layer = callbacks.AverageWeights(1), torch.nn.Linear(1, 1, bias=False)
    theirs = torch.optim.swa_utils.AveragedModel(layer)
    for epoch, value in enumerate([9.0, 0.1, 0.7, -0.3, 1e3]):
        state = ff.TrainState(epoch, {"w": np.float32([[value]])}, (), {}, None)
        average(ff.Checkpoint(step=epoch, state=state, metrics={}))
        with torch.no_grad():
            layer.weight.fill_(value)
        if epoch >= 1:
            theirs.update_parameters(layer)
    expected = theirs.module.weight.detach().numpy()
    np.testing.assert_allclose(average.get_state()["params"]["w"], expected, rtol=1e-6)


def test_differences_are_in_the_page_on_keras(assert_on_page_on_keras):
    assert_on_page_on_keras(DIFFERENCES)


def test_keras_differs_where_the_page_says_so(keras, tmp_path):
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=2)
    assert not any(after_each(stopping, [3.0, np.nan, 2.0], lambda model: model.stop_training))
    ours = callbacks.EarlyStopping("val_loss", patience=2, restore_best=False)
    stops = [ours(checkpoint).stop for checkpoint in checkpoints_of([3.0, np.nan])]
    assert stops == [False, True]
    assert best_of([2.0, 1.0, 1.0], "min", keras, tmp_path) == (3, 2)


def test_nothing_lacks_a_peer_without_a_reason():
    public = {name for name in vars(callbacks) if name[0] != "_"}
    assert public - WITHOUT_PEER.keys() == {
        "AverageWeights",
        "CSVLogger",
        "EarlyStopping",
        "Events",  # In its own tests.
        "LearningRateScheduler",
        "ReduceLROnPlateau",
        "StopOnNaN",
        "SwapEMA",
    }
