"""Which values of a metric are better: one rule for everything that monitors."""

import functools
import io
import itertools
import math

import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit import Checkpoint, callbacks, checkpoints, losses, metrics
from flaxfit.losses._names import _ALIASES as LOSS_ALIASES
from flaxfit.losses._names import _LOSSES
from flaxfit.metrics._aliases import ALIASES, known_as
from flaxfit.metrics._monitor import Monitor, default_monitor, is_better, known_mode, resolve_mode
from flaxfit.metrics._names import _BUILT_IN, as_metric

HIGHER = ["accuracy", "binary_accuracy", "precision", "recall", "f1", "auc", "r2"]
HIGHER += ["acc", "f1_score", "roc_auc", "r2_score", "top_5", "top_10"]
X = np.ones((8, 1), np.float32)


def score(outputs, targets):
    return outputs[..., 0] - targets[..., 0]


def make_loop(given, *, measured=(), step=None, loss="mse"):
    def init(rngs, x):
        return {"params": np.zeros(1, np.float32)}

    apply, loss = (None, None) if step else (lambda v, x, **_: (v["params"] * x, {}), loss)
    task = ff.TrainTask(apply, optax.sgd(0.1), loss, [(X, 2 * X)] * 4, measured, step=step)
    return ff.TrainLoop(init, task, 0, n_steps=2, callbacks=given, stdout=False)


def evaluation(measured=(), **options):
    task = ff.EvalTask(lambda v, x: v["params"] * x, measured, (X, 2 * X), loss="mse")
    return ff.EvalLoop(task, **options)


@pytest.mark.slow
def test_values_of_a_collected_metric_by_name_can_be_monitored():
    both = metrics.collected(lambda o, t: {"f1": 0.5, "regret": 1.0}, name="both")
    for monitor in ("val_f1", "val_regret"):
        stop = callbacks.EarlyStopping(monitor, mode="max", patience=1)
        assert "regret" in str([*make_loop([evaluation([both]), stop])][-1].metrics)
    stop = callbacks.EarlyStopping("val_regrets", mode="max")
    with pytest.raises(
        ValueError,
        match="cannot monitor 'val_regrets'.*val_f1, val_regret.*Did you mean 'val_regret'",
    ):
        list(make_loop([evaluation([both]), stop]))


@pytest.mark.parametrize("prefix", ["", "val_"])
def test_names_of_metrics_and_losses_of_flaxfit_and_optax_have_a_mode(prefix):
    lower = ["loss", "head_loss", "penalty", *_LOSSES, *LOSS_ALIASES, "huber_loss", "hinge_loss"]
    lower = [
        name for name in lower if known_as(name) not in {*_BUILT_IN, "cosine_similarity"}
    ]  # "dice" is the metric.
    names = [*_BUILT_IN, *ALIASES, *HIGHER, *lower, "RMSE", "cosine_similarity"]
    known = {name: known_mode(prefix + name) for name in names}
    higher = {*HIGHER, "cosine_similarity"}
    assert {name for name, mode in known.items() if mode == "min"} >= {*lower, "RMSE", "mse"}
    assert {name for name, mode in known.items() if mode == "max"} >= higher
    assert None not in known.values()


def test_every_metric_by_name_knows_its_mode_as_its_name_does():
    names = [name for name in (*_BUILT_IN, *ALIASES) if name != "confusion_matrix"]
    modes = {name: as_metric(name).mode for name in names}
    assert None not in modes.values()
    assert modes == {name: known_mode(name) for name in names}


@pytest.mark.parametrize("name", ["nll", "grad_norm", "lossless", "one_minus_auc"])
def test_another_name_needs_a_mode(name):
    assert known_mode(name) is None
    with pytest.raises(ValueError, match=f"'val_{name}' are better: pass mode='min' or mode='max'"):
        resolve_mode(f"val_{name}")
    assert resolve_mode(name, "min") == "min"
    assert resolve_mode("loss", "max") == "max"
    assert resolve_mode(name, "auto", {name: "max"}) == "max"


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'auto', 'min' or 'max', got 'lowest'"):
        resolve_mode("loss", "lowest")
    with pytest.raises(ValueError, match="'min', 'max' or None, got 'lowest'"):
        metrics.Metric(len, len, mode="lowest")


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        (metrics.f1(average="macro"), "max"),
        (optax.huber_loss, "min"),
        (functools.partial(optax.losses.hinge_loss), "min"),
        (losses.crossentropy, "min"),
        (optax.cosine_similarity, "max"),
        (metrics.on(lambda *each: each, optax.huber_loss), "min"),
        (metrics.Metric(len, len, mode="max"), "max"),
        (score, None),
    ],
)
def test_a_metric_knows_its_mode_whatever_it_is_called(metric, mode):
    assert metrics.as_metrics({"x": metric})["x"].mode == mode


def test_every_loss_of_optax_that_is_named_there_is_known():
    unknown = [
        name
        for name, value in vars(optax.losses).items()
        if callable(value) and not name.startswith("_") and known_mode(name) is None
    ]
    assert set(unknown) <= {
        "ctc_loss_with_forward_probs",
        "make_fenchel_young_loss",
        "smooth_labels",
    }


WATCHING = {
    "EarlyStopping": callbacks.EarlyStopping,
    "ReduceLROnPlateau": callbacks.ReduceLROnPlateau,
    "Export": lambda monitor, **options: callbacks.Export("unused", monitor, **options),
    "ProgressBar": lambda monitor, **options: callbacks.ProgressBar(monitor=monitor, **options),
}


@pytest.fixture(params=[*WATCHING, "CheckpointFileWriter"])
def watching(request, tmp_path):
    """Makes each callback that looks for best values."""
    if request.param in WATCHING:
        return WATCHING[request.param]
    return lambda monitor, **options: checkpoints.CheckpointFileWriter(
        tmp_path, monitor=monitor, **options
    )


def test_a_metric_of_unknown_mode_is_told_before_the_first_step(watching):
    with pytest.raises(ValueError, match="higher values of 'x' are better: pass mode="):
        make_loop(watching("x"), measured={"x": score})
    with pytest.raises(ValueError, match="higher values of 'val_x' are better: pass mode="):
        make_loop([evaluation({"x": score}), watching("val_x")])


def test_a_metric_that_will_not_be_there_is_told_before_the_first_step(watching):
    with pytest.raises(ValueError, match=r"'acc': the checkpoints will hold loss, mae\."):
        make_loop(watching("acc"), measured=["mae"])
    with pytest.raises(ValueError, match="'val_loss': .* hold loss. .*validation_data in fit"):
        make_loop(watching("val_loss"))
    with pytest.raises(ValueError, match="'val_acc': .* hold loss, val_loss, val_mae"):
        make_loop([evaluation(["mae"]), callbacks.every(2, watching("val_acc"))])


def test_a_loss_of_validation_that_is_missing_is_asked_of_the_task(watching):
    unmeasured = ff.EvalLoop(ff.EvalTask(lambda v, x: v["params"] * x, ["mae"], (X, X)))
    with pytest.raises(ValueError, match=r"'val_loss': .* val_mae\. .*EvalTask\(\.\.\., loss="):
        make_loop([unmeasured, watching("val_loss")])


def test_only_those_that_save_see_what_callbacks_behind_them_add(tmp_path):
    writer = checkpoints.CheckpointFileWriter(tmp_path, monitor="val_loss")
    make_loop([writer, evaluation()])
    with pytest.raises(ValueError, match="EarlyStopping cannot monitor 'val_loss'"):
        make_loop([callbacks.EarlyStopping(), evaluation()])


@pytest.mark.slow
def test_what_callbacks_and_steps_of_the_users_own_add_is_not_refused(tmp_path):
    make_loop([lambda checkpoint: None, callbacks.EarlyStopping("val_loss")])
    make_loop(callbacks.EarlyStopping("td_loss"), step=lambda state, batch: (state, {}))
    make_loop([callbacks.Rollback(), callbacks.EarlyStopping("rollbacks")])
    make_loop(callbacks.EarlyStopping("penalty"))
    make_loop([evaluation(), callbacks.EarlyStopping("val_penalty")])
    with pytest.raises(ValueError, match="'val_penalty': .* Validation metrics need"):
        make_loop([callbacks.EarlyStopping("val_penalty"), evaluation()])
    with pytest.raises(ValueError, match="higher values of 'reward' are better"):
        make_loop(callbacks.EarlyStopping("reward"), step=lambda state, batch: (state, {}))


@pytest.mark.slow
def test_modes_of_the_task_come_with_each_checkpoint():
    measured = {"size": optax.huber_loss, "x": score, "accuracy": score}
    history, validate = ff.History(), evaluation({"size": optax.huber_loss}, name="test")
    checkpoint = [c for c in make_loop([validate, history.append], measured=measured)][-1]
    assert checkpoint.modes == {
        "size": "min",
        "x": None,
        "accuracy": "max",
        "test_loss": "min",
        "test_size": "min",
    }
    assert history.best("test_size").value == min(history["test_size"])
    restored = ff.History()
    restored.set_state(history.get_state())
    assert restored.best("test_size") == history.best("test_size")
    with pytest.raises(ValueError, match="'x' are better: pass mode="):
        history.best("x")
    assert "test_size" in history._repr_html_()


def test_the_metrics_of_several_outputs_have_modes():
    loop = make_loop((), loss={"a": "mse"}, measured={"a": ["r2", optax.huber_loss], "x": score})
    modes = {name: metric.mode for name, metric in loop.task.metrics.items()}
    assert modes == {"a_loss": None, "a_r2": "max", "a_huber_loss": "min", "x": None}
    assert known_mode("a_loss", modes) == "min"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "values"), [("val_crossentropy", [0.9, 0.2, 0.5]), ("val_accuracy", [0.1, 0.8, 0.5])]
)
def test_all_that_monitors_finds_the_same_best(name, values, tmp_path):
    """The default mode of each, for a metric that is minimised and one that is maximised."""

    def init(rngs, x):
        return {"params": x}

    state = ff.init_state(init, optax.sgd(0.1), 0, (X,))
    stopping, history = callbacks.EarlyStopping(name, patience=9), ff.History()
    bar = callbacks.ProgressBar(file=io.StringIO())
    with checkpoints.CheckpointFileWriter(tmp_path / "run", keep=1, monitor=name) as writer:
        for step, value in enumerate(values, start=1):
            checkpoint = Checkpoint(step=step, state=state, metrics={name: value})
            for each in (stopping, history.append, bar, writer):
                each(checkpoint)
    best = (stopping.best_step, history.best(name).step, bar.get_state()["best"][1])
    assert (*best, checkpoints.best(tmp_path / "run")) == (2, 2, 2, 2)


def test_better_is_finite_and_lower_or_higher_by_more_than_min_delta():
    assert is_better(0.25, 0.5, "min") and not is_better(0.5, 0.25, "min")
    assert is_better(0.5, 0.25, "max") and not is_better(0.25, 0.5, "max")
    assert not is_better(0.25, 0.5, "min", 0.25) and is_better(0.25, 0.5, "min", 0.125)
    assert not is_better(0.5, 0.5, "min") and not is_better(0.5, 0.5, "max")
    for mode, bad in itertools.product(["min", "max"], [math.nan, math.inf, -math.inf]):
        assert is_better(0.0, None, mode)
        assert not is_better(bad, None, mode) and not is_better(bad, 0.5, mode)


def test_the_first_validation_metric_of_known_mode_is_watched_else_its_loss_else_nothing():
    assert default_monitor(["loss", "f1", "val_loss", "val_f1", "val_auc"]) == "val_f1"
    assert default_monitor(["loss", "val_loss"]) == "val_loss"
    assert default_monitor(["loss", "val_loss", "val_x"]) == "val_loss"
    assert default_monitor(["loss", "val_x"], {"val_x": "max"}) == "val_x"
    assert default_monitor(["loss", "f1"]) is None


def test_a_metric_that_is_not_there_is_an_error_that_lists_what_is():
    def read(name, **found):
        return Monitor(name, "auto", "X").read(Checkpoint(step=1, state=None, metrics=found))

    assert read("loss", loss=0.5) == 0.5
    with pytest.raises(ValueError, match=r"X cannot monitor 'val_f1': .* loss, f1\..* EvalLoop"):
        read("val_f1", loss=0.5, f1=0.5)
    with pytest.raises(ValueError, match="hold no metrics"):
        read("loss")


@pytest.mark.slow
def test_fit_tells_before_the_first_step():
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", ["mae"])
    seen = []
    for monitor, options in (("val_acc", {"validation_data": (X, X)}), ("val_loss", {})):
        with pytest.raises(ValueError, match=f"EarlyStopping cannot monitor '{monitor}'"):
            stopping = callbacks.EarlyStopping(monitor)
            model.fit(X, X, callbacks=[stopping, seen.append], verbose=0, **options)
    assert not seen
    stopping = callbacks.EarlyStopping("val_mae")
    model.fit(X, X, callbacks=stopping, validation_data=(X, X), verbose=0)
    model.fit(X, X, callbacks=None, verbose=0)
