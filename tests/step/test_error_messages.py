"""Errors of JAX in words: traced values that were kept or asked for, memory that ran out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from loops import given
from marks import thorough, usual

import flaxfit as ff
from flaxfit.step._error_messages import calls_explained

X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
STRATEGIES = {
    "one device": lambda: ff.DataParallel(jax.devices()[:1]),
    "two devices": lambda: ff.DataParallel(jax.devices()[:2]),
    "sharded": lambda: ff.Sharded(devices=jax.devices()[:2]),
}
strategies = pytest.mark.parametrize("strategy", usual("two devices", of=STRATEGIES))


def error_of_fit(loss="mse", metrics=(), module=None, strategy="one device"):
    options = {"loss": loss, "metrics": metrics, "strategy": STRATEGIES[strategy]()}
    model = ff.Model(module or nn.Dense(1), optax.sgd(0.1), **options)
    with pytest.raises((TypeError, ValueError, MemoryError)) as caught:
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    return caught.value


def squares(outputs, targets):
    return ((outputs - targets) ** 2).mean(-1)


class Keeps:
    """A loss, or a metric, that adds up what it has seen in an attribute."""

    def __init__(self):
        self.total = 0.0

    def __call__(self, outputs, targets):
        values = squares(outputs, targets)
        self.total = self.total + values.mean()
        return values


@strategies
def test_a_loss_that_keeps_an_array_is_told_to_return_it(strategy):
    error = error_of_fit(Keeps(), strategy=strategy)
    assert isinstance(error, TypeError) and isinstance(error.__cause__, TypeError)
    assert "kept an array of an earlier call" in str(error)
    assert "a metric returns one value per example, a loss returns (values, penalty)" in str(error)


def test_a_metric_that_keeps_an_array_is_told_to_return_it():
    assert "Return it instead" in str(error_of_fit(metrics={"kept": Keeps()}))


def step_of(apply, loss, strategy, **options):
    """The checkpoint of a step of a model whose weights are 1."""
    task = ff.TrainTask(apply, optax.sgd(0.1), loss, [(X, Y)] * 2, **options)
    init = given(lambda key, x: {"params": {"w": np.ones((2, 1), np.float32)}})
    return ff.TrainLoop(init, task, 0, strategy=STRATEGIES[strategy](), stdout=False).next_step()


class MovingMean:
    """A model that updates a running mean in an attribute, which only eager code could do."""

    mean = 0.0

    def __call__(self, variables, x, **_):
        outputs = x @ variables["params"]["w"]
        self.mean = 0.9 * self.mean + 0.1 * variables["params"]["w"].mean()
        return outputs - self.mean, {}


@strategies
def test_a_model_that_keeps_an_array_is_told_to_keep_it_in_a_variable(strategy):
    # Seen as the model is traced more than once: compiled at once, it would train, and wrongly.
    with pytest.raises(TypeError, match="a module keeps state in a variable"):
        step_of(MovingMean(), "mse", strategy)


@strategies
def test_a_loss_may_read_what_the_model_has_left_in_the_same_pass(strategy):
    left = {}

    def apply(variables, x, **_):
        left["penalty"] = (variables["params"]["w"] ** 2).sum()
        return x @ variables["params"]["w"], {}

    def loss(outputs, targets):
        return squares(outputs, targets) + left["penalty"]

    metrics = {"penalty_left": lambda outputs, targets: left["penalty"] + 0 * targets[:, 0]}
    found = step_of(apply, loss, strategy, metrics=metrics).metrics
    assert found["penalty_left"] == 2 and found["loss"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [thorough("one device"), "two devices"])
def test_a_loss_may_name_the_axis_of_replicas(strategy):
    def loss(outputs, targets):
        return squares(outputs, targets) + jax.lax.pmean(outputs.mean(), "replica")

    options = {"strategy": STRATEGIES[strategy](), "pad": False}  # It looks across the batch.
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), loss, **options)
    history = model.fit(X, Y, batch_size=4, verbose=0, validation_data=(X, Y))
    assert np.isfinite([history["loss"], history["val_loss"]]).all()


ASKING = {
    "float": lambda outputs, targets: float(squares(outputs, targets).mean()),
    "if": lambda outputs, targets: outputs.mean(-1) if outputs.sum() > 0 else targets.mean(-1),
    "numpy": lambda outputs, targets: np.abs(np.asarray(outputs) - np.asarray(targets))[:, 0],
    "item": lambda outputs, targets: squares(outputs, targets).sum().item(),
}


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("role", ["loss", "metric"])
def test_a_loss_or_metric_that_asks_for_values_is_told_what_to_do_and_where(name, role):
    function = ASKING[name]
    error = error_of_fit(function) if role == "loss" else error_of_fit(metrics={"m": function})
    assert isinstance(error, TypeError)
    assert isinstance(error.__cause__, jax.errors.JAXTypeError)
    line = function.__code__.co_firstlineno
    assert f"(test_error_messages.py, line {line}) needs a concrete value" in str(error)
    assert "jnp.where" in str(error) and "jax.debug.print" in str(error)


@pytest.mark.slow
def test_a_hook_of_examples_that_asks_for_values_in_eager_steps_is_told_what_shows_them():
    def hook(grads):
        return {name: grad / float(jnp.abs(grad).sum()) for name, grad in grads.items()}

    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", run_eagerly=True, example_grads_hook=hook)
    with pytest.raises(TypeError, match="value of an array of one example.*jax.debug.print") as its:
        model.fit(X, Y, verbose=0)
    assert "stop_gradient" not in str(its.value)


@pytest.mark.parametrize(
    ("returned", "kind"), [(None, "NoneType"), ("x", "str"), ({"a": 1}, "dict"), ((1, 2), "tuple")]
)
def test_a_metric_that_returns_no_array_is_told_what_to_return(returned, kind):
    error = error_of_fit(metrics={"mine": lambda outputs, targets: returned})
    assert isinstance(error, TypeError)
    assert f"returned {kind}; expected one value per example" in str(error)


class TooLarge(nn.Module):
    """A model that wants more memory than there is."""

    @nn.compact
    def __call__(self, x):
        row = jnp.arange(2**24) * x.sum()
        sorted_rows = jnp.sort(jnp.broadcast_to(row, (2**24, 2**24)), axis=0)
        return nn.Dense(1)(x) + sorted_rows[5:6, 3:4]


@pytest.mark.slow
def test_a_step_that_runs_out_of_memory_names_what_takes_less():
    error = error_of_fit(module=TooLarge())
    assert isinstance(error, MemoryError)
    assert isinstance(error.__cause__, jax.errors.JaxRuntimeError)
    assert "batches of 4 examples on 1 device, and 12 B of parameters" in str(error)
    knobs = "batch_size=2 find_batch_size accumulate=2 precision='bfloat16' nn.remat Sharded.fsdp()"
    for knob in (*knobs.split(), "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert knob in str(error)


def test_other_errors_are_left_as_they_are():
    def refuses(outputs, targets):
        raise TypeError("mine")

    error = error_of_fit(refuses)
    assert str(error) == "mine" and error.__cause__ is None


def test_the_shapes_follow_an_error_that_they_may_explain_and_no_other():
    def notes_of(loss):
        with pytest.raises(AttributeError) as info, calls_explained((X,), (X,)):
            loss(X)
        return getattr(info.value, "__notes__", [])

    assert "outputs first" in notes_of(lambda x: x.reduce())[0]
    assert "outputs first" in notes_of(jax.jit(lambda x: x.reduce()))[-1]
    module: Any = nn.Dense(1)
    assert notes_of(lambda x: module.other) == []


@pytest.mark.parametrize(
    ("layer", "field"),
    [(nn.Dropout(0.5), "deterministic"), (nn.BatchNorm(), "use_running_average")],
)
def test_a_layer_without_a_switch_names_the_argument_of_the_call(layer, field):
    model = nn.Sequential([nn.Dense(2), layer])
    task = ff.TrainTask(model, optax.sgd(0.1), "mse", (np.ones((4, 2)), np.ones((4, 2))))
    with pytest.raises(ValueError, match=f"`train` to the call and pass {field}=not train"):
        ff.TrainLoop(model, task, 0, stdout=False)
