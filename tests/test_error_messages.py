"""Mistakes that everyone makes, and their answers: what cannot be, what was given, what to do."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import flaxfit as ff

rng = np.random.default_rng(0)
X = rng.normal(size=(32, 4)).astype(np.float32)
LABELS = rng.integers(0, 3, 32)
NUMBERS = rng.normal(size=(32, 1)).astype(np.float32)


def fit(*data, loss="crossentropy", n_out=3, n_devices=1, task=None, **options):
    strategy = ff.DataParallel(jax.devices()[:n_devices])
    model = ff.Model(nn.Dense(n_out), optax.sgd(0.1), loss, strategy=strategy, **(task or {}))
    return model.fit(*data, verbose=0, **options)


def loop_over(data, takes_any=False, **options):
    apply = nn.Dense(3).apply
    apply = (lambda *inputs, **named: nn.Dense(3).apply(*inputs, **named)) if takes_any else apply
    task = ff.TrainTask(apply, optax.sgd(0.1), "crossentropy", data)
    options = {"stdout": False, "devices": jax.devices()[:1], **options}
    return list(ff.TrainLoop(options.pop("init", nn.Dense(3).init), task, **{"rnkey": 0} | options))


@functools.cache
def fitted():
    model = ff.Model(nn.Dense(3), optax.sgd(0.1), "crossentropy")
    model.fit(X, LABELS, verbose=0)
    return model


class Noisy(nn.Module):
    """A model that asks for a random stream of its own."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) + jax.random.normal(self.make_rng("noise"), (3,))


def mean_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def squares(outputs, targets):
    return (outputs - targets) ** 2


def with_nan(array):
    return np.where(np.arange(len(array))[:, None] == 5, np.nan, array)


OTHER_INPUTS = "cannot take inputs of shape (32, 3)", "expect other shapes", "(4, 3)"
NO_GRADIENT = "The loss returned {} values; expected floating-point numbers".format
ONE_HOT = np.eye(3, dtype=np.float32)[LABELS]
OUT_OF_RANGE = np.where(np.arange(32) == 9, 12, LABELS)

# What is called, and the error and parts of its message.
MISTAKES = {
    "a batch that the devices do not divide": (
        lambda: fit(X, LABELS, batch_size=30, n_devices=4, task={"pad": False}),
        ValueError,
        ["batch of 30", "4 devices", "28", "32"],
    ),
    "labels in a column": (
        lambda: fit(X, LABELS[:, None]),
        ValueError,
        [
            "'crossentropy' expects integer labels of shape (32,) for outputs of shape (32, 3)",
            "(32, 1)",
            "y[:, 0]",
        ],
    ),
    "one-hot labels": (lambda: fit(X, ONE_HOT), ValueError, ["'onehot_crossentropy'"]),
    "a label out of range": (
        lambda: fit(X, OUT_OF_RANGE),
        ValueError,
        ["label 12 is out of range for 3 outputs", "0..2"],
    ),
    "a loss that broadcasts": (
        lambda: fit(X, NUMBERS[:, 0], n_out=1, loss=squares),
        ValueError,
        ["(32, 32)", "(32, 1)", "reshape one of them"],
    ),
    "a loss of integers": (
        lambda: fit(X, LABELS, loss=lambda o, t: (o.argmax(-1) != t).astype(int)),
        TypeError,
        [NO_GRADIENT("int32")],
    ),
    "a loss of truth values": (
        lambda: fit(X, LABELS, loss=lambda o, t: o.argmax(-1) != t),
        TypeError,
        [NO_GRADIENT("bool")],
    ),
    "a complex loss": (
        lambda: fit(X, LABELS, loss=lambda o, t: 1j * o.sum(-1)),
        TypeError,
        [NO_GRADIENT("complex64")],
    ),
    "more inputs than targets": (lambda: fit(X, LABELS[:20]), ValueError, ["32 rows", "20"]),
    "batches without targets": (
        lambda: fit([X[:8], X[8:16]], loss="mse"),
        TypeError,
        ["The loss needs targets, but the data holds only inputs", "(8, 4)", "batches (x, y)"],
    ),
    "validation data without targets": (
        lambda: fit(X, LABELS, validation_data=(X,)),
        TypeError,
        ["but the validation or evaluation data holds only inputs of shape"],
    ),
    "a loss that becomes NaN": (
        lambda: fit(
            X, 1e30 * NUMBERS, loss="mse", n_out=1, epochs=3, callbacks=[ff.callbacks.StopOnNaN()]
        ),
        FloatingPointError,
        ["at step", "Lower the learning rate", "clip"],
    ),
    "a count as text": (
        lambda: fit(X, LABELS, epochs="3"),
        TypeError,
        ["epochs must be an integer, got '3'"],
    ),
    "several steps": (
        lambda: fit(X, LABELS, steps_per_execution="fast"),
        TypeError,
        ["steps_per_execution must be an integer or 'auto', got 'fast'"],
    ),
    "a schedule for an optimizer": (
        lambda: ff.Model(nn.Dense(3), optax.constant_schedule(0.1), "mse"),
        TypeError,
        ["an Optax transformation", "Pass a schedule as the rate of an optimizer"],
    ),
    "targets beside batches": (
        lambda: fit([(X, LABELS)], LABELS),
        ValueError,
        ["y can be used with arrays only", "list"],
    ),
    "a loss of the outputs alone": (
        lambda: fit(X, LABELS, loss=lambda outputs: outputs.mean(-1)),
        TypeError,
        ["takes 1 positional argument but 2", "outputs and targets, of shape (32,)"],
    ),
    "inputs too many": (
        lambda: fit((X, X), LABELS),
        TypeError,
        [
            "takes 2 positional arguments but 3",
            "the inputs, of shapes (32, 4), (32, 4) (a tuple or",
        ],
    ),
    "the class of a callback": (
        lambda: fit(X, LABELS, callbacks=[ff.callbacks.StopOnNaN]),
        TypeError,
        ["callbacks=[StopOnNaN(...)], not the class StopOnNaN"],
    ),
    "an unknown option": (
        lambda: fit(X, LABELS, task={"lr": 0.1}),
        TypeError,
        ["Model has no option lr", "clip_norm"],
    ),
    "features in validation": (
        lambda: fit(X, LABELS, validation_data=(X[:, :3], LABELS)),
        ValueError,
        OTHER_INPUTS,
    ),
    "features in training": (
        lambda: loop_over([(X, LABELS), (X[:, :3], LABELS)]),
        ValueError,
        OTHER_INPUTS,
    ),
    "features in evaluation": (
        lambda: fitted().evaluate([(X, LABELS), (X[:, :3], LABELS)]),
        ValueError,
        OTHER_INPUTS,
    ),
    "features in prediction": (lambda: fitted().predict(X[:, :3]), ValueError, OTHER_INPUTS),
    "one example in prediction": (
        lambda: ff.Model(nn.Dense(3)).predict(X[0]),
        ValueError,
        ["cannot take inputs of shape (32,)", "make a batch of it: x[None]"],
    ),
    "targets to predict": (
        lambda: fitted().predict((X, LABELS)),
        TypeError,
        [
            "takes 2 positional arguments but 3",
            "a tuple or a list of arrays holds several inputs",
            "of shapes (32, 4), (32,)",
        ],
    ),
    "batches of other names": (
        lambda: loop_over([{"image": X, "caption": LABELS}]),
        ValueError,
        [
            "Cannot tell the roles of the columns 'image', 'caption'",
            "takes 'inputs'",
            "inputs='image'",
        ],
    ),
    "batches of other names for a call that takes any": (
        lambda: loop_over([{"image": X, "label": LABELS}], takes_any=True),
        TypeError,
        ["inputs by name, image, label", "batch {'x': .., 'y': ..} or (x, y)", "inputs=.."],
    ),
    "a key": (
        lambda: loop_over((X, LABELS), rnkey="seed"),
        TypeError,
        ["jax.random.key(0)", "'seed'"],
    ),
    "devices": (lambda: loop_over((X, LABELS), devices=2), TypeError, ["jax.devices()[:2], got 2"]),
    "a module for its init": (
        lambda: loop_over((X, LABELS), init=nn.Dense),
        TypeError,
        ["TrainLoop needs a module or its init, got Dense: pass Dense(...)"],
    ),
    "a class of linen to measure": (
        lambda: ff.EvalTask(nn.Dense, ["mse"]),
        TypeError,
        ["EvalTask needs a module or its apply, got Dense"],
    ),
    "a class of nnx": (
        lambda: ff.TrainTask(nnx.Linear, optax.sgd(0.1), "mse"),
        TypeError,
        ["a factory of one that takes rngs", "lambda rngs: Linear(..., rngs=rngs)"],
    ),
    "nothing to measure": (
        lambda: ff.EvalLoop(ff.EvalTask(nn.Dense(3).apply, ["mse"])).measure(None),
        ValueError,
        ["nothing to evaluate", "EvalTask(..., data=(x, y))"],
    ),
    "a batch that does not divide": (
        lambda: fit(X[:30], LABELS[:30], loss=mean_loss, batch_size=30, n_devices=4),
        ValueError,
        ["batch of 30 examples over 4 devices", "returns a scalar", "28 or 32"],
    ),
    "weights of a scalar loss": (
        lambda: fit(X, LABELS, loss=mean_loss, sample_weight=np.ones(32)),
        ValueError,
        ["Weights cannot be applied", "returns a scalar", "shape (32,)"],
    ),
    "labels of floats": (
        lambda: fit(X, LABELS.astype(float)),
        ValueError,
        ["(32,) float32", "astype('int32')"],
    ),
    "the shape of a loss": (
        lambda: fit(X, LABELS, loss=lambda o, t: o[:7, 0]),
        ValueError,
        ["(7,)", "() or (32,)"],
    ),
    "NaN in arrays": (
        lambda: fit(with_nan(X), LABELS),
        ValueError,
        ["NaN", "input '0', 1 of 32", "row 5"],
    ),
    "NaN in a batch": (
        lambda: fit([(with_nan(X), LABELS)]),
        ValueError,
        ["The first batch", "NaN", "row 5"],
    ),
    "no rows": (lambda: fit(X[:0], LABELS[:0]), ValueError, ["no examples", "0 rows"]),
    "no batches": (lambda: fit([]), ValueError, ["list of batches is empty"]),
    "None": (lambda: fit([None]), TypeError, ["must be made of arrays", "(x, y)", "got None"]),
    "four parts": (lambda: fit([(X, LABELS) * 2]), TypeError, ["(x, y, weights)", "got 4"]),
    "text": (lambda: fit("mnist"), TypeError, ["Cannot read batches from 'mnist'", "Give arrays"]),
    "a loss": (
        lambda: fit(X, LABELS, loss="crossentropi"),
        ValueError,
        ["Did you mean crossentropy"],
    ),
    "a metric": (
        lambda: fit(X, LABELS, task={"metrics": ["acuracy"]}),
        ValueError,
        ["no metric 'acuracy'", "Did you mean accuracy"],
    ),
    "a random stream": (
        lambda: ff.Model(Noisy(), optax.sgd(0.1), "crossentropy").fit(X, LABELS, verbose=0),
        ValueError,
        ['needs PRNG for "noise"', "rngs=('dropout',)", "add its name"],
    ),
    "steps per checkpoint": (
        lambda: loop_over((X, LABELS), n_steps_per_checkpoint=0),
        ValueError,
        ["n_steps_per_checkpoint must be 1 or more, got 0"],
    ),
}


def check_answer(call, kind, parts):
    """Checks that a mistake raises an error of this kind, with these parts in its message."""
    with pytest.raises(Exception) as caught:
        call()
    assert caught.type is kind
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered(name):
    check_answer(*MISTAKES[name])


def test_a_folder_to_resume_from_that_holds_nothing(tmp_path):
    check_answer(
        lambda: fit(X, LABELS, checkpoint_dir=tmp_path, resume=True),
        FileNotFoundError,
        [str(tmp_path), "holds no checkpoint", "'auto'"],
    )


@pytest.mark.slow
def test_a_checkpoint_of_another_model(tmp_path):
    fit(X, LABELS, checkpoint_dir=tmp_path)
    parts = ["does not fit this model", "params/kernel", "(4, 3)", "(4, 4)"]
    check_answer(lambda: fit(X, LABELS, n_out=4, checkpoint_dir=tmp_path), ValueError, parts)


class Plain(nnx.Module):
    """Keeps a plain array where a parameter is meant."""

    def __init__(self):
        self.layers = nnx.List([nnx.data(np.zeros((4, 3), np.float32))])

    def __call__(self, x):
        return x @ self.layers[0]


@pytest.mark.parametrize(
    ("module", "part"),
    [
        (Plain(), r"plain arrays in .*constants: self.layers.0 \[4, 3\].*nnx.Param\(array\)"),
        ((lambda *_: {"state": X[0]}, lambda v, x, **_: x[:, :3]), "collections: state"),
        ((lambda *_: {}, lambda v, x, **_: x[:, :3]), "collections: none"),
    ],
    ids=["plain arrays", "a collection", "nothing"],
)
def test_a_model_without_parameters(module, part):
    with pytest.raises(ValueError, match=f"The model has no parameters.*{part}"):
        ff.Model(module, optax.sgd(0.1), "crossentropy").fit(X, LABELS, verbose=0)


def test_a_call_without_a_return():
    class Forgetful(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Dense(3)(x)

    model = ff.Model(Forgetful(), optax.sgd(0.1), "crossentropy")
    with pytest.raises(TypeError, match="returned None: its call needs a `return`"):
        model.fit(X, LABELS, verbose=0)
    state = ff.TrainState(np.int32(0), {}, (), {}, jax.random.key(0))
    with pytest.raises(TypeError, match="returned None"):
        ff.make_predict_step(lambda variables, x: None)(state, ff.Batch((X,)))
    task = ff.EvalTask(lambda variables, x: None, ["accuracy"])
    with pytest.raises(TypeError, match="returned None"):
        ff.make_eval_step(task)(state, ff.Batch((X,), (LABELS,)))


def test_what_a_model_itself_raises_stays_and_has_a_note_of_the_shapes():
    class Broken(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ jax.numpy.ones((5, 3)) * self.param("scale", nn.initializers.ones, ())

    model = ff.Model(Broken(), optax.sgd(0.1), "crossentropy")
    with pytest.raises(TypeError, match="contracting dim") as caught:
        model.fit(X, LABELS, verbose=0)
    assert "called with the inputs, of shape (32, 4)" in "".join(caught.value.__notes__)


def test_a_file_in_the_place_of_a_folder_of_checkpoints(tmp_path):
    path = tmp_path / "run"
    path.write_text("")
    call = functools.partial(fit, X, LABELS, checkpoint_dir=path)
    check_answer(call, NotADirectoryError, [f"{path} is a file"])
