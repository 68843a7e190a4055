"""Mistakes that everyone makes, and their answers: what cannot be, what was given, what to do."""

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


def answer(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.type, str(caught.value)


def check_answer(call, kind, parts):
    """Checks that a mistake raises an error of this kind, with these parts in its message."""
    found, message = answer(call)
    assert found is kind
    assert [part for part in parts if part not in message] == [], message


def fit(*data, loss="crossentropy", n_out=3, n_devices=1, task=None, **options):
    strategy = ff.DataParallel(jax.devices()[:n_devices])
    model = ff.Model(nn.Dense(n_out), optax.sgd(0.1), loss, strategy=strategy, **(task or {}))
    return model.fit(*data, verbose=0, **options)


def test_a_batch_that_cannot_be_split_over_the_devices():
    kind, message = answer(lambda: fit(X, LABELS, batch_size=30, n_devices=4, task={"pad": False}))
    assert kind is ValueError
    assert "batch of 30" in message and "4 devices" in message
    assert "28" in message and "32" in message


def test_labels_in_a_column_for_crossentropy():
    kind, message = answer(lambda: fit(X, LABELS[:, None]))
    assert kind is ValueError
    assert (
        "'crossentropy' expects integer labels of shape (32,) for outputs of shape (32, 3)"
        in message
    )
    assert "(32, 1)" in message and "y[:, 0]" in message


def test_one_hot_labels_for_crossentropy():
    kind, message = answer(lambda: fit(X, np.eye(3, dtype=np.float32)[LABELS]))
    assert kind is ValueError and "'onehot_crossentropy'" in message


def test_a_label_out_of_range():
    kind, message = answer(lambda: fit(X, np.where(np.arange(32) == 9, 12, LABELS)))
    assert kind is ValueError
    assert "label 12 is out of range for 3 outputs" in message and "0..2" in message


def test_a_loss_that_broadcasts():
    kind, message = answer(
        lambda: fit(
            X, NUMBERS[:, 0], n_out=1, loss=lambda outputs, targets: (outputs - targets) ** 2
        )
    )
    assert kind is ValueError
    assert "(32, 32)" in message and "(32, 1)" in message and "reshape one of them" in message


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (lambda outputs, targets: (outputs.argmax(-1) != targets).astype(int), "int32"),
        (lambda outputs, targets: outputs.argmax(-1) != targets, "bool"),
        (lambda outputs, targets: 1j * outputs.sum(-1), "complex64"),
    ],
)
def test_a_loss_without_a_gradient(loss, dtype):
    kind, message = answer(lambda: fit(X, LABELS, loss=loss))
    assert kind is TypeError
    assert f"The loss returned {dtype} values; expected floating-point numbers" in message


def test_more_inputs_than_targets():
    kind, message = answer(lambda: fit(X, LABELS[:20]))
    assert kind is ValueError and "32 rows" in message and "20" in message


def test_batches_without_targets():
    kind, message = answer(lambda: fit([X[:8], X[8:16]], loss="mse"))
    assert kind is TypeError
    assert "The loss needs targets, but the data holds only inputs" in message
    assert "(8, 4)" in message and "batches (x, y)" in message


def test_validation_data_without_targets():
    kind, message = answer(lambda: fit(X, LABELS, validation_data=(X,)))
    assert kind is TypeError
    assert "but the validation or evaluation data holds only inputs of shape" in message


def test_a_loss_that_becomes_nan():
    stop = ff.callbacks.StopOnNaN()
    kind, message = answer(
        lambda: fit(X, 1e30 * NUMBERS, loss="mse", n_out=1, epochs=3, callbacks=[stop])
    )
    assert kind is FloatingPointError
    assert "at step" in message and "Lower the learning rate" in message and "clip" in message


def test_a_folder_to_resume_from_that_holds_nothing(tmp_path):
    kind, message = answer(lambda: fit(X, LABELS, checkpoint_dir=tmp_path, resume=True))
    assert kind is FileNotFoundError
    assert str(tmp_path) in message and "holds no checkpoint" in message and "'auto'" in message


@pytest.mark.slow
def test_a_checkpoint_of_another_model(tmp_path):
    fit(X, LABELS, checkpoint_dir=tmp_path)
    kind, message = answer(lambda: fit(X, LABELS, n_out=4, checkpoint_dir=tmp_path))
    assert kind is ValueError
    assert "does not fit this model" in message
    assert "params/kernel" in message and "(4, 3)" in message and "(4, 4)" in message


def loop_over(data, takes_any=False, **options):
    apply = nn.Dense(3).apply
    apply = (lambda *inputs, **named: nn.Dense(3).apply(*inputs, **named)) if takes_any else apply
    task = ff.TrainTask(apply, optax.sgd(0.1), "crossentropy", data)
    options = {"stdout": False, "devices": jax.devices()[:1], **options}
    return list(ff.TrainLoop(options.pop("init", nn.Dense(3).init), task, **{"rnkey": 0} | options))


def fitted():
    model = ff.Model(nn.Dense(3), optax.sgd(0.1), "crossentropy")
    model.fit(X, LABELS, verbose=0)
    return model


OTHER_INPUTS = "cannot take inputs of shape (32, 3)", "expect other shapes", "(4, 3)"


@pytest.mark.parametrize(
    ("call", "kind", "parts"),
    [
        (lambda: fit(X, LABELS, epochs="3"), TypeError, ["epochs must be an integer, got '3'"]),
        (
            lambda: fit(X, LABELS, steps_per_execution="fast"),
            TypeError,
            ["steps_per_execution must be an integer or 'auto', got 'fast'"],
        ),
        (
            lambda: ff.Model(nn.Dense(3), optax.constant_schedule(0.1), "mse"),
            TypeError,
            ["an Optax transformation", "Pass a schedule as the rate of an optimizer"],
        ),
        (
            lambda: fit([(X, LABELS)], LABELS),
            ValueError,
            ["y can be used with arrays only", "list"],
        ),
        (
            lambda: fit(X, LABELS, loss=lambda outputs: outputs.mean(-1)),
            TypeError,
            ["takes 1 positional argument but 2", "outputs and targets, of shape (32,)"],
        ),
        (
            lambda: fit((X, X), LABELS),
            TypeError,
            [
                "takes 2 positional arguments but 3",
                "the inputs, of shapes (32, 4), (32, 4) (a tuple or",
            ],
        ),
        (
            lambda: fit(X, LABELS, callbacks=[ff.callbacks.StopOnNaN]),
            TypeError,
            ["callbacks=[StopOnNaN(...)], not the class StopOnNaN"],
        ),
        (
            lambda: fit(X, LABELS, task={"lr": 0.1}),
            TypeError,
            ["Model has no option lr", "clip_norm"],
        ),
        (lambda: fit(X, LABELS, validation_data=(X[:, :3], LABELS)), ValueError, OTHER_INPUTS),
        (lambda: loop_over([(X, LABELS), (X[:, :3], LABELS)]), ValueError, OTHER_INPUTS),
        (lambda: fitted().evaluate([(X, LABELS), (X[:, :3], LABELS)]), ValueError, OTHER_INPUTS),
        (lambda: fitted().predict(X[:, :3]), ValueError, OTHER_INPUTS),
        (
            lambda: ff.Model(nn.Dense(3)).predict(X[0]),
            ValueError,
            ["cannot take inputs of shape (32,)", "make a batch of it: x[None]"],
        ),
        (
            lambda: fitted().predict((X, LABELS)),
            TypeError,
            [
                "takes 2 positional arguments but 3",
                "a tuple or a list of arrays holds several inputs",
                "of shapes (32, 4), (32,)",
            ],
        ),
        (
            lambda: loop_over([{"image": X, "caption": LABELS}]),
            ValueError,
            [
                "Cannot tell the roles of the columns 'image', 'caption'",
                "takes 'inputs'",
                "inputs='image'",
            ],
        ),
        (
            lambda: loop_over([{"image": X, "label": LABELS}], takes_any=True),
            TypeError,
            ["inputs by name, image, label", "batch {'x': .., 'y': ..} or (x, y)", "inputs=.."],
        ),
        (lambda: loop_over((X, LABELS), rnkey="seed"), TypeError, ["jax.random.key(0)", "'seed'"]),
        (lambda: loop_over((X, LABELS), devices=2), TypeError, ["jax.devices()[:2], got 2"]),
        (
            lambda: loop_over((X, LABELS), init=nn.Dense),
            TypeError,
            ["TrainLoop needs a module or its init, got Dense: pass Dense(...)"],
        ),
        (
            lambda: ff.EvalTask(nn.Dense, ["mse"]),
            TypeError,
            ["EvalTask needs a module or its apply, got Dense"],
        ),
        (
            lambda: ff.TrainTask(nnx.Linear, optax.sgd(0.1), "mse"),
            TypeError,
            ["a factory of one that takes rngs", "lambda rngs: Linear(..., rngs=rngs)"],
        ),
        (
            lambda: ff.EvalLoop(ff.EvalTask(nn.Dense(3).apply, ["mse"])).measure(None),
            ValueError,
            ["nothing to evaluate", "EvalTask(..., data=(x, y))"],
        ),
    ],
    ids=[
        "a count as text",
        "several steps",
        "a schedule for an optimizer",
        "targets beside batches",
        "a loss of the outputs alone",
        "inputs too many",
        "the class of a callback",
        "an unknown option",
        "features in validation",
        "features in training",
        "features in evaluation",
        "features in prediction",
        "one example in prediction",
        "targets to predict",
        "batches of other names",
        "batches of other names for a call that takes any",
        "a key",
        "devices",
        "a module for its init",
        "a class of linen to measure",
        "a class of nnx",
        "nothing to measure",
    ],
)
def test_what_newcomers_confuse(call, kind, parts):
    check_answer(call, kind, parts)


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


class Noisy(nn.Module):
    """A model that asks for a random stream of its own."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) + jax.random.normal(self.make_rng("noise"), (3,))


def mean_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def with_nan(array):
    return np.where(np.arange(len(array))[:, None] == 5, np.nan, array)


@pytest.mark.parametrize(
    ("call", "kind", "parts"),
    [
        (
            lambda: fit(X[:30], LABELS[:30], loss=mean_loss, batch_size=30, n_devices=4),
            ValueError,
            ["batch of 30 examples over 4 devices", "returns a scalar", "28 or 32"],
        ),
        (
            lambda: fit(X, LABELS, loss=mean_loss, sample_weight=np.ones(32)),
            ValueError,
            ["Weights cannot be applied", "returns a scalar", "shape (32,)"],
        ),
        (lambda: fit(X, LABELS.astype(float)), ValueError, ["(32,) float32", "astype('int32')"]),
        (lambda: fit(X, LABELS, loss=lambda o, t: o[:7, 0]), ValueError, ["(7,)", "() or (32,)"]),
        (lambda: fit(with_nan(X), LABELS), ValueError, ["NaN", "input '0', 1 of 32", "row 5"]),
        (lambda: fit([(with_nan(X), LABELS)]), ValueError, ["The first batch", "NaN", "row 5"]),
        (lambda: fit(X[:0], LABELS[:0]), ValueError, ["no examples", "0 rows"]),
        (lambda: fit([]), ValueError, ["list of batches is empty"]),
        (lambda: fit([None]), TypeError, ["must be made of arrays", "(x, y)", "got None"]),
        (lambda: fit([(X, LABELS) * 2]), TypeError, ["(x, y, weights)", "got 4"]),
        (lambda: fit("mnist"), TypeError, ["Cannot read batches from 'mnist'", "Give arrays"]),
        (lambda: fit(X, LABELS, loss="crossentropi"), ValueError, ["Did you mean crossentropy"]),
        (
            lambda: fit(X, LABELS, task={"metrics": ["acuracy"]}),
            ValueError,
            ["no metric 'acuracy'", "Did you mean accuracy"],
        ),
        (
            lambda: ff.Model(Noisy(), optax.sgd(0.1), "crossentropy").fit(X, LABELS, verbose=0),
            ValueError,
            ['needs PRNG for "noise"', "rngs=('dropout',)", "add its name"],
        ),
        (
            lambda: loop_over((X, LABELS), n_steps_per_checkpoint=0),
            ValueError,
            ["n_steps_per_checkpoint must be 1 or more, got 0"],
        ),
    ],
    ids=[
        "a batch that does not divide",
        "weights of a scalar loss",
        "labels of floats",
        "the shape of a loss",
        "NaN in arrays",
        "NaN in a batch",
        "no rows",
        "no batches",
        "None",
        "four parts",
        "text",
        "a loss",
        "a metric",
        "a random stream",
        "steps per checkpoint",
    ],
)
def test_bad_input(call, kind, parts):
    check_answer(call, kind, parts)


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
    kind, message = answer(lambda: fit(X, LABELS, checkpoint_dir=path))
    assert kind is NotADirectoryError and f"{path} is a file" in message
