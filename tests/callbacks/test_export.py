import functools

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.callbacks import Export, _export, every

pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        ones = nn.initializers.ones
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4, kernel_init=ones)(x))
        return nn.Dense(1, kernel_init=ones)(nn.Dropout(0.5, deterministic=not train)(x))


x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
y = x.sum(1, keepdims=True)


evaluated = jax.jit(functools.partial(Net().apply, train=False))


def assert_exported(path, outputs):
    np.testing.assert_allclose(ff.export.load(path)(x), outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_fit_leaves_the_best_model_in_the_file(tmp_path):
    exporting = Export(tmp_path / "best", monitor="val_loss")
    seen = {}

    def remember(checkpoint):
        seen[checkpoint.step] = checkpoint.metrics["val_loss"], checkpoint.state.variables

    model = ff.Model(Net(), optax.adam(0.3), "mse")
    model.fit(x, y, epochs=4, validation_data=(x, y), callbacks=[remember, exporting], verbose=0)
    best = min(seen, key=lambda step: seen[step][0])
    assert exporting.best_step == best
    assert exporting.best_value == seen[best][0]
    assert_exported(tmp_path / "best", evaluated(seen[best][1], x))


def test_a_worse_checkpoint_leaves_the_file(tmp_path, monkeypatch):
    writes = []
    monkeypatch.setattr(ff.export, "write", lambda *a, **options: writes.append((a[1:], options)))
    options = {"apply": lambda v, x: x, "input_spec": ff.export.InputSpec((1,)), "opset": 19}
    exporting = Export(tmp_path / "best", "accuracy", "onnx", **options)
    state = ff.InferenceState(np.int32(0), {}, {})
    values = [0.5, 0.4, float("nan"), 0.5, 0.6]
    for step, value in enumerate(values):
        given = ff.Checkpoint(step=step, state=state, metrics={"accuracy": value})
        assert exporting(given) is given
    assert writes == [((tmp_path / "best", "onnx"), {"opset": 19})] * 2
    assert exporting.get_state() == {"best_value": 0.6, "best_step": 4}


@pytest.mark.slow
def test_of_several_processes_the_first_writes(tmp_path, monkeypatch):
    writes = []
    monkeypatch.setattr(_export, "process_count", lambda: 2)
    monkeypatch.setattr(_export, "from_main", lambda topic, write: writes.append(write))
    spec = ff.export.InputSpec(("batch", 3))
    exporting = Export(tmp_path / "best", None, apply=nn.Dense(1).apply, input_spec=spec)
    state = ff.init_state(nn.Dense(1).init, optax.sgd(0.1), 0, (x,))
    exporting(ff.Checkpoint(step=1, state=state, metrics={}))
    assert not (tmp_path / "best").exists()
    writes[0]()
    assert_exported(tmp_path / "best", nn.Dense(1).apply({"params": state.params}, x))


def test_a_resumed_run_keeps_what_is_better(tmp_path):
    exporting = Export(tmp_path / "best", "loss")
    exporting.set_state({"best_value": 0.1, "best_step": 7})
    exporting(ff.Checkpoint(step=8, state=None, metrics={"loss": 0.2}))
    assert not (tmp_path / "best").exists()


@pytest.mark.slow
def test_a_loop_needs_to_be_told_the_model_in_evaluation(tmp_path):
    apply = functools.partial(Net().apply, train=True)
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", [(x, y)] * 2)
    init, path = functools.partial(Net().init, train=True), tmp_path / "last"
    loop = ff.TrainLoop(init, task, 0, callbacks=Export(path, None), stdout=False)
    with pytest.raises(ValueError, match="evaluation mode: pass apply="):
        next(loop)
    exporting = Export(path, None, apply=functools.partial(Net().apply, train=False))
    *_, last = ff.TrainLoop(init, task, 0, callbacks=every(2, exporting), stdout=False)
    assert_exported(path, evaluated(last.state.variables, x))


def test_outside_a_loop_the_inputs_are_asked_for(tmp_path):
    state = ff.InferenceState(np.int32(0), {}, {})
    exporting = Export(tmp_path / "best", None, apply=lambda v, x: x)
    with pytest.raises(ValueError, match="pass input_spec="):
        exporting(ff.Checkpoint(step=1, state=state, metrics={}))


@pytest.mark.slow
def test_a_moving_average_is_written_where_the_task_keeps_one(tmp_path):
    path = tmp_path / "best"
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", ema=0.9)
    model.fit(x, y, epochs=2, callbacks=[Export(path, "loss")], verbose=0)
    average = ff.optim.swap_ema(model.state).params
    assert_exported(path, nn.Dense(1).apply({"params": average}, x))
    model.fit(x, y, callbacks=[Export(path, "loss", ema=False)], verbose=0)
    assert_exported(path, nn.Dense(1).apply({"params": model.state.params}, x))


@pytest.mark.slow
def test_a_model_is_exported_in_one_line_but_a_loaded_one_asks_for_its_inputs(tmp_path):
    model = ff.Model(Net(), optax.adam(0.1), "mse")
    model.fit(x, y, epochs=1, verbose=0)
    report = model.export(tmp_path / "model")
    assert_exported(tmp_path / "model", model.predict(x))
    assert report.path == tmp_path / "model"
    zeros = jax.tree.map(np.zeros_like, model.state.params)
    model.export(tmp_path / "model", params=zeros)
    assert float(np.abs(ff.export.load(tmp_path / "model")(x)).max()) == 0
    model.save(tmp_path / "run")
    fresh = ff.Model(Net(), optax.adam(0.1), "mse")
    fresh.load(tmp_path / "run")
    with pytest.raises(ValueError, match="needs input_spec="):
        fresh.export(tmp_path / "model")
    fresh.export(tmp_path / "model", input_spec=ff.export.InputSpec(("batch", 3)))
    with pytest.raises(ValueError, match="format must be one of"):
        fresh.export(tmp_path / "model", "tflite", ff.export.InputSpec(("batch", 3)))


def test_an_unknown_format_is_refused_before_anything_is_trained():
    with pytest.raises(ValueError, match="format must be one of 'stablehlo'.*got 'tflite'"):
        Export("model", format="tflite")
