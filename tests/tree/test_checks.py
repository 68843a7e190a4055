"""Arguments are checked: whole numbers, paths of this machine, and outputs before targets."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit import callbacks, checkpoints, export, importers, losses, metrics
from flaxfit.loop._compilation_cache import use_compilation_cache
from flaxfit.tree._checks import check_order, local_path, whole_number

URL = "gs://bucket/run.safetensors"
MODEL = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")
X = np.ones((4, 2), np.float32)
MODULE = export.JaxModule({}, lambda params, x: x, input_spec=export.InputSpec((2,)))


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3)], ids=["int", "int64", "array"])
def test_whole_numbers_of_any_kind_become_int(value):
    number = whole_number("n", value)
    assert type(number) is int and number == 3


@pytest.mark.parametrize("value", ["3", 3.0, None, True, [3]])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(TypeError, match="epochs must be an integer, got"):
        whole_number("epochs", value)
    with pytest.raises(ValueError, match="n_steps must be 1 or more, got 0"):
        whole_number("n_steps", 0)
    assert whole_number("n", 0, least=0) == 0


@pytest.mark.parametrize("path", ["run", "~/run", "./a:b/run", "C:/run", Path("x/gs:")])
def test_paths_of_this_machine_are_taken(path):
    assert local_path(path) == Path(path).expanduser()


@pytest.mark.parametrize(
    "use",
    [
        lambda: local_path(Path("s3://bucket/run")),
        lambda: MODEL.fit(X, X[:, :1], checkpoint_dir=URL, verbose=0),
        lambda: MODEL.load(URL),
        lambda: MODEL.load_weights(URL),
        lambda: checkpoints.save_weights(URL, {"w": X}),
        lambda: checkpoints.CheckpointFileWriter(URL),
        lambda: checkpoints.CheckpointFileReader(URL, lambda: None),
        lambda: checkpoints.latest(URL),
        lambda: importers.load(URL),
        lambda: export.save(MODULE, URL),
        lambda: export.load(URL),
        lambda: callbacks.CSVLogger(URL),
        lambda: callbacks.JSONLogger(URL),
        lambda: callbacks.Profiler(URL),
        lambda: callbacks.TensorBoardLogger(URL),
        lambda: callbacks.Export(URL),
        lambda: use_compilation_cache(URL),
        lambda: importers.load_msgpack(URL),
        lambda: importers.load_npz(URL),
        lambda: importers.load_orbax(URL),
        lambda: importers.load_safetensors(URL),
        lambda: importers.load_t5x(URL),
        lambda: importers.load_tf_ckpt(URL),
    ],
)
def test_a_url_is_refused_before_anything_is_made(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Cannot use the URL '(gs|s3):.*Mount the store"):
        use()
    assert not list(tmp_path.iterdir())


def quantile(q, y_true, y_pred):
    return jnp.maximum(q * (y_true - y_pred), (q - 1) * (y_true - y_pred))


def targets_first(targets, outputs):
    return outputs - targets


def labels_first(labels, logits, weight=1):
    return logits[..., 0] * labels * weight


class Loss:
    def __call__(self, y, y_hat):
        return y_hat - y


SWAPPED = [functools.partial(quantile, 0.9), targets_first, jax.jit(labels_first), Loss()]


@pytest.mark.parametrize("function", SWAPPED, ids=["partial", "function", "jit", "object"])
def test_targets_first_are_refused_by_their_names(function):
    with pytest.raises(
        TypeError, match=r"calls loss\(outputs, targets\), .* takes \(.*Wrap it: la"
    ):
        losses.resolve(function)
    with pytest.raises(TypeError, match=r"calls metric\(outputs, targets\)"):
        metrics.as_metrics([function])
    apply: Any = lambda v, x, **_: x  # noqa: E731
    with pytest.raises(TypeError, match=r"calls loss\(outputs, targets\)"):
        ff.TrainTask(apply, optax.sgd(0.1), {"a": "mse", "b": function})
    with pytest.raises(TypeError, match=r"calls metric\(outputs, targets\)"):
        ff.EvalTask(apply, {"shift": function})


@pytest.mark.parametrize("function", [lambda params, batch: 0.0, lambda model, batch, rng: 0.0])
def test_a_loss_that_calls_the_model_is_an_objective(function):
    with pytest.raises(TypeError, match=r"takes \((params|model), batch\)\. A .*objective=f"):
        losses.resolve(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda params, x: params,  # Of a distribution, as its model returns them.
        lambda outputs, targets: outputs,
        lambda y_pred, y_true: y_pred,
        lambda o, t: o,
        lambda *both: both[0],
        lambda first, second, targets, mask: first,
        lambda y: y,
        lambda target_outputs, targets: targets,
        lambda y, labels: y,
        optax.l2_loss,
        optax.losses.sigmoid_focal_loss,
        functools.partial(optax.huber_loss, delta=2.0),
        jnp.subtract,
    ],
)
def test_other_functions_pass(function):
    check_order("loss", function)
    assert losses.resolve(function) is function


def of(library, **attributes):
    """An object such as that library has."""
    attributes = {"__module__": library, "__call__": lambda self, *both: both[0], **attributes}
    return type("Squared", (), attributes)()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (of("keras.src.losses"), r"takes \(y_true, y_pred\). Wrap it"),
        (
            of("keras.src.metrics", update_state=None, get_config=dict),
            "cannot trace Squared of keras: use a",
        ),
        (of("torch.nn.modules.loss"), "cannot trace Squared of torch"),
        (functools.partial(of("sklearn.metrics")), "cannot trace Squared of sklearn"),
    ],
    ids=["keras", "keras metric", "torch", "sklearn"],
)
def test_those_of_other_libraries_are_refused(function, message):
    for refuse in (losses.resolve, lambda metric: metrics.as_metrics([metric])):
        with pytest.raises(TypeError, match=message):
            refuse(function)


@pytest.mark.slow
def test_other_libraries_call_theirs_so(keras, torch):
    sklearn = pytest.importorskip("sklearn.metrics")
    for function in (
        *(keras.losses.MeanSquaredError(), keras.losses.mean_squared_error),
        *(keras.metrics.MeanSquaredError(), torch.nn.MSELoss(), torch.nn.functional.mse_loss),
        sklearn.f1_score,
    ):
        with pytest.raises(TypeError, match="Wrap it|JAX traces"):
            check_order("loss", function)
