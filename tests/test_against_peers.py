"""Losses and metrics beside those of Keras, scikit-learn, SciPy and torch.

The same inputs go to both, the awkward ones too, and the answers are at most 1e-5 apart.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import sklearn.metrics

import flaxfit as ff
from flaxfit import losses, metrics

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def keras(tmp_path_factory):
    """Keras on JAX. What it is set up with must not reach other tests, nor a home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        patch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))
        keras = pytest.importorskip("keras")
    assert keras.backend.backend() == "jax"
    return keras


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def torchmetrics():
    return pytest.importorskip("torchmetrics")


# Losses. They are by example, so all inputs are rows of one array, and few programs do.
N_ROWS, N_CLASSES = 7, 4
GENERATOR = np.random.default_rng(0)


def normal(*shape):
    return GENERATOR.normal(size=shape).astype(np.float32)


ROWS = {
    "random": normal(N_ROWS, N_CLASSES),
    "far apart": 30 * normal(N_ROWS, N_CLASSES),
    "tied": np.tile(normal(N_ROWS, 1), N_CLASSES),
    "zero": np.zeros((N_ROWS, N_CLASSES), np.float32),
    "of 1e4": 1e4 * np.sign(normal(N_ROWS, N_CLASSES)),
    "near 1e4": 1e4 + normal(N_ROWS, N_CLASSES).round(1),
    "with NaN": np.where(np.arange(N_CLASSES) == 1, np.nan, normal(N_ROWS, N_CLASSES)),
}
OUTPUTS = np.concatenate(list(ROWS.values())).astype(np.float32)
KINDS_OF_ROWS = np.repeat(list(ROWS), N_ROWS)
LABELS = GENERATOR.integers(0, N_CLASSES, len(OUTPUTS))
WEIGHTS = GENERATOR.uniform(0, 2, len(OUTPUTS)).astype(np.float32)
WEIGHTS[1::N_ROWS] = 0
NUMBERS = normal(*OUTPUTS.shape)
NUMBERS[2::N_ROWS] = OUTPUTS[2::N_ROWS]  # Errors of zero; and of NaN.
NUMBERS[3::N_ROWS] = 0
BITS = GENERATOR.integers(0, 2, OUTPUTS.shape)
ONEHOT = np.eye(N_CLASSES, dtype=np.float32)[LABELS]
SHARES = scipy.special.softmax(normal(*OUTPUTS.shape), -1)
SHARES[::N_ROWS] = ONEHOT[::N_ROWS]

INTEGERS = ["uint8", "int8", "uint32", "int64"]
HALVES = ["float16", "bfloat16"]


def as_types(array, dtypes):
    return {"float32": array.astype(np.float32)} | {name: array.astype(name) for name in dtypes}


COUNTS = GENERATOR.integers(0, 256, OUTPUTS.shape).astype("uint8")
OF_NUMBERS = as_types(NUMBERS, HALVES) | {"uint8": COUNTS, "bool": BITS > 0}
TARGETS = {
    "crossentropy": {"int32": LABELS.astype("int32")} | {n: LABELS.astype(n) for n in INTEGERS},
    "onehot_crossentropy": as_types(SHARES, HALVES) | {"uint8": ONEHOT.astype("uint8")},
    "binary_crossentropy": as_types(BITS, [*INTEGERS, "bool", *HALVES]),
    "mse": OF_NUMBERS,
    "mae": OF_NUMBERS,
    "huber": OF_NUMBERS,
    "log_cosh": OF_NUMBERS,
    "hinge": as_types(2 * BITS - 1, ["int8", "int64", "float16"]),
    "kl_divergence": as_types(SHARES, HALVES),
    "cosine_distance": OF_NUMBERS,
}


def of_scipy(name, outputs, targets):
    """Values by row or by element, in 64 bits."""
    outputs, of = outputs.astype(float), scipy.special
    if name == "crossentropy":
        targets = np.eye(N_CLASSES)[targets]
    targets = targets.astype(float)
    errors = np.abs(outputs - targets)
    logs = of.log_softmax(outputs, -1)
    match name:
        case "crossentropy" | "onehot_crossentropy":
            return -(targets * logs).sum(-1)
        case "binary_crossentropy":
            return -targets * of.log_expit(outputs) - (1 - targets) * of.log_expit(-outputs)
        case "mse":
            return errors**2
        case "mae":
            return errors
        case "huber":
            return of.huber(1, errors)
        case "log_cosh":
            return errors + np.log1p(np.exp(-2 * errors)) - np.log(2)
        case "hinge":
            return np.maximum(0, 1 - outputs * targets)
        case "kl_divergence":
            return (of.xlogy(targets, targets) - targets * logs).sum(-1)
        case "cosine_distance":
            norms = np.linalg.norm(outputs, axis=-1) * np.linalg.norm(targets, axis=-1)
            return 1 - (outputs * targets).sum(-1) / np.maximum(norms, 1e-8)


def of_keras(keras):
    of = keras.losses
    return {
        "crossentropy": lambda o, t: of.sparse_categorical_crossentropy(t, o, from_logits=True),
        "onehot_crossentropy": lambda o, t: of.categorical_crossentropy(t, o, from_logits=True),
        "binary_crossentropy": lambda o, t: of.binary_crossentropy(t, o, from_logits=True),
        "mse": lambda o, t: of.mean_squared_error(t, o),
        "mae": lambda o, t: of.mean_absolute_error(t, o),
        "huber": lambda o, t: of.huber(t, o),
        "log_cosh": lambda o, t: of.log_cosh(t, o),
        "hinge": lambda o, t: of.hinge(t, o),
        "kl_divergence": lambda o, t: of.kl_divergence(t, keras.ops.softmax(o)),
        "cosine_distance": lambda o, t: 1 + of.cosine_similarity(t, o),
    }


def of_torch(torch):
    of, by_element = torch.nn.functional, {"reduction": "none"}
    return {
        "crossentropy": lambda o, t: of.cross_entropy(o.movedim(-1, 1), t, **by_element),
        "onehot_crossentropy": lambda o, t: of.cross_entropy(
            o.movedim(-1, 1), t.movedim(-1, 1), **by_element
        ),
        "binary_crossentropy": lambda o, t: of.binary_cross_entropy_with_logits(o, t, **by_element),
        "mse": lambda o, t: of.mse_loss(o, t, **by_element),
        "mae": lambda o, t: of.l1_loss(o, t, **by_element),
        "huber": lambda o, t: of.huber_loss(o, t, **by_element),
        "log_cosh": lambda o, t: (o - t) + of.softplus(2 * (t - o)) - np.log(2),
        "hinge": lambda o, t: of.margin_ranking_loss(o, 0 * o, t, margin=1, **by_element),
        "kl_divergence": lambda o, t: of.kl_div(of.log_softmax(o, -1), t, **by_element).sum(-1),
        "cosine_distance": lambda o, t: 1 - of.cosine_similarity(o, t, dim=-1),
    }


def cases_with_gradients(name):
    """Outputs of each type, and with one more axis."""
    targets = next(iter(TARGETS[name].values()))
    deep = tuple(x.reshape(N_ROWS, -1, *x.shape[1:]) for x in (OUTPUTS, targets))
    halves = {dtype: (OUTPUTS.astype(dtype), targets) for dtype in HALVES}
    return {"2-D": (OUTPUTS, targets), "3-D": deep} | halves


def cases_of_targets(name):
    return {f"{dtype} targets": (OUTPUTS, x) for dtype, x in list(TARGETS[name].items())[1:]}


def by_example(values):
    return values.reshape(len(OUTPUTS), -1).mean(-1)


def with_gradient(loss):
    """The values of a loss by row, and the gradient of their weighted sum."""

    def weighted(outputs, targets):
        values = by_example(loss(outputs, targets))
        return (values * WEIGHTS).sum(), values

    def of_case(outputs, targets):
        gradient, values = jax.grad(weighted, has_aux=True)(outputs, targets)
        return values, gradient.reshape(OUTPUTS.shape)

    return of_case


@functools.cache
def ours_of(name):
    """The values and gradients of all cases, as one program."""
    loss = losses.resolve(name)
    of_case = with_gradient(loss)

    @jax.jit
    def measure(with_gradients, others):
        values = {case: (by_example(loss(*arrays)), None) for case, arrays in others.items()}
        return values | {case: of_case(*arrays) for case, arrays in with_gradients.items()}

    return jax.device_get(measure(cases_with_gradients(name), cases_of_targets(name)))


NOWHERE = np.zeros(len(OUTPUTS), bool)


def in_float32(outputs, targets):
    """What a peer is given: the same numbers, in the type that it computes best in."""
    is_index = targets.ndim < outputs.ndim
    return outputs.astype(np.float32), targets.astype(np.int64 if is_index else np.float32)


def assert_same_gradient(ours, theirs, rows, case):
    """A gradient has the type of the outputs, and as many digits."""
    digits = max(1e-5, float(jnp.finfo(ours.dtype).eps))
    ours, theirs = (x[rows].astype(ours.dtype).astype(float) for x in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=digits, atol=1e-5, err_msg=case)


def assert_losses(name, peer, cases, *, but=NOWHERE, kinks=NOWHERE):
    """Ours are those of a peer, and so are the gradients where there is one: not at kinks."""
    is_number = ~np.isnan(OUTPUTS).any(-1)
    for case in cases:
        values, gradient = ours_of(name)[case]
        arrays = in_float32(*cases_with_gradients(name)[case])
        their_values, their_gradient = (np.asarray(x) for x in peer(*arrays))
        np.testing.assert_allclose(values[~but], their_values[~but], **TOLERANCE, err_msg=case)
        assert np.isfinite(gradient[is_number].astype(float)).all(), case
        assert_same_gradient(gradient, their_gradient, is_number & ~but & ~kinks, case)


@pytest.mark.parametrize("name", TARGETS)
def test_losses_are_those_of_scipy(name):
    for case, arrays in (cases_with_gradients(name) | cases_of_targets(name)).items():
        expected = by_example(of_scipy(name, *in_float32(*arrays)))
        np.testing.assert_allclose(ours_of(name)[case][0], expected, **TOLERANCE, err_msg=case)


# Vectors of length 0 have no direction, and the gradient of their angle is any number.
HAS_NO_ANGLE = (OUTPUTS == 0).all(-1) | (NUMBERS == 0).all(-1)
IS_RIGHT = (OUTPUTS == NUMBERS).all(-1)
IS_CLIPPED = np.isin(KINDS_OF_ROWS, ["far apart", "of 1e4"]) | (SHARES == 0).any(-1)


@pytest.mark.parametrize("name", TARGETS)
def test_losses_and_gradients_are_those_of_keras(name, keras):
    peer = jax.jit(with_gradient(of_keras(keras)[name]))
    but = IS_CLIPPED if name == "kl_divergence" else NOWHERE
    kinks = {"mae": IS_RIGHT, "cosine_distance": HAS_NO_ANGLE}.get(name, NOWHERE)
    assert_losses(name, peer, ["2-D", *HALVES], but=but, kinks=kinks)


@pytest.mark.parametrize("name", TARGETS)
def test_losses_and_gradients_are_those_of_torch(name, torch):
    loss = of_torch(torch)[name]

    def peer(outputs, targets):
        outputs = torch.tensor(outputs, dtype=torch.float64, requires_grad=True)
        targets = torch.tensor(targets)
        targets = targets if targets.dtype == torch.int64 else targets.double()
        values = by_example(loss(outputs, targets))
        (values * torch.tensor(WEIGHTS)).sum().backward()
        return values.detach().numpy(), outputs.grad.numpy().reshape(OUTPUTS.shape)

    kinks = HAS_NO_ANGLE if name == "cosine_distance" else NOWHERE
    assert_losses(name, peer, ["2-D", "3-D", *HALVES], kinks=kinks)


SOME_LOSSES = ["crossentropy", "binary_crossentropy", "mse", "cosine_distance"]


@pytest.mark.parametrize("n_devices", [1, 4])
def test_a_step_takes_the_weighted_mean_of_losses_and_gradients(n_devices):
    """Each loss is that of an output whose parameter scales it; 27 rows do not divide."""
    rows = np.arange(27)
    x, weights = OUTPUTS[rows], WEIGHTS[rows]

    def apply(variables, x, **_):
        return {name: x * scale for name, scale in variables["params"].items()}, {}

    targets = {name: cases_with_gradients(name)["2-D"][1][rows] for name in SOME_LOSSES}
    task = ff.TrainTask(
        apply, optax.sgd(1.0), {name: name for name in SOME_LOSSES}, [(x, targets, weights)]
    )
    loop = ff.TrainLoop(
        lambda rngs, x: {"params": {name: np.ones(N_CLASSES, "float32") for name in SOME_LOSSES}},
        task,
        0,
        stdout=False,
        devices=jax.devices()[:n_devices],
    )
    checkpoint = loop.next_step()
    for name in SOME_LOSSES:
        values, gradient = ours_of(name)["2-D"]
        moved = 1 - checkpoint.state.params[name]
        expected = (x * gradient[rows]).sum(0) / weights.sum()
        np.testing.assert_allclose(moved, expected, **TOLERANCE, err_msg=name)
        expected = np.average(values[rows], weights=weights)
        np.testing.assert_allclose(checkpoint.metrics[f"{name}_loss"], expected, **TOLERANCE)


# Metrics, of all kinds of outputs in one program, through an EvalLoop with an uneven rest.
N, BATCH_SIZE = 45, 16


def kinds_of_data():
    """Outputs and targets by kind: scores of classes and labels, or numbers and numbers."""
    scores, answers = normal(N), GENERATOR.integers(0, 2, N)
    logits, labels = normal(N, 5), GENERATOR.integers(0, 4, N)  # The last class never occurs.
    return {
        "score": (scores, answers),
        "column": (scores[:, None], answers[:, None]),
        "two": (normal(N, 2), answers),
        "classes": (logits, labels),
        "onehot": (logits, np.eye(5, dtype=np.float32)[labels]),
        "tokens": (normal(N, 3, 4), GENERATOR.integers(0, 4, (N, 3))),
        "number": (normal(N), normal(N)),
        "numbers": (normal(N, 3), normal(N, 3)),
        "deep": (normal(N, 2, 3), normal(N, 2, 3)),
    }


def rates(*names):
    """Metrics by name, such as "f1_macro"."""
    parts = (name.split("_") for name in names)
    return {f"{name}_{how}": getattr(metrics, name)(average=how) for name, how in parts}


# Together every metric, with every average; each is tried on several kinds, not on all.
METRICS = {
    "score": metrics.as_metrics(["accuracy", "binary_accuracy", "precision", "recall", "f1"])
    | {"confusion_matrix": metrics.confusion_matrix(2)},
    "column": metrics.as_metrics(["accuracy", "binary_accuracy"]) | rates("f1_micro"),
    "two": metrics.as_metrics(["accuracy", "precision"]) | rates("recall_macro"),
    "classes": metrics.as_metrics(["accuracy", "top_2", "perplexity"])
    | rates("precision_macro", "recall_macro", "f1_macro", "precision_micro", "f1_micro")
    | {"confusion_matrix": metrics.confusion_matrix(5)},
    "onehot": metrics.as_metrics(["accuracy", "top_4", "perplexity"]) | rates("f1_macro"),
    "tokens": metrics.as_metrics(["accuracy", "top_2", "perplexity"]) | rates("recall_macro"),
    "number": metrics.as_metrics(["mse", "mae", "rmse"]),
    "numbers": metrics.as_metrics(["mse", "mae", "rmse"]),
    "deep": metrics.as_metrics(["mae", "rmse"]),
}
IS_NUMBER = {"number", "numbers", "deep"}
DATA = kinds_of_data()
SOME = GENERATOR.uniform(0.1, 3, N).astype(np.float32)
EQUAL = np.ones(N, np.float32)
IDLE = np.arange(N) % 4 == 0
LARGEST = np.finfo(np.float32).max


def each(change, weights=SOME):
    """A case: what `change` makes of the outputs and targets of each kind, and the weights."""
    return {kind: change(kind, *arrays) for kind, arrays in DATA.items()}, weights


def one_class(kind, outputs, targets):
    first = targets[:1] if kind not in IS_NUMBER else np.ones_like(targets[:1])
    return outputs, np.broadcast_to(first, targets.shape).copy()


def all_right(kind, outputs, targets):
    if kind in IS_NUMBER:
        return targets, targets
    if kind in ("score", "column"):
        return outputs, (outputs > 0).astype(int)
    actual = outputs.argmax(-1)
    return outputs, np.eye(5, dtype=np.float32)[actual] if kind == "onehot" else actual


def spoiled(kind, outputs, targets):
    """What would spoil any number that it got into; the model makes NaN of the largest number."""
    outputs, targets = outputs.copy(), targets.copy()
    outputs[IDLE] = LARGEST
    targets[IDLE] = np.nan if targets.dtype.kind == "f" else -1
    return outputs, targets


CASES = {
    "plain": each(lambda kind, *arrays: arrays, EQUAL),
    "weighted": each(lambda kind, *arrays: arrays),
    "one class": each(one_class, EQUAL),
    "all right": each(all_right, EQUAL),
    "tied": each(lambda kind, o, t: (o.round() + 0.25, t), EQUAL),
    "of 1e4": each(lambda kind, o, t: (1e4 * o, 1e4 * t if kind in IS_NUMBER else t)),
    "near 1e4": each(lambda kind, o, t: (1e4 + o, 1e4 + t) if kind in IS_NUMBER else (o, t)),
    "idle rows": each(spoiled, np.where(IDLE, 0, SOME)),
}


def of_kind(place, metric):
    return metrics.on(lambda *arrays: (arrays[place], arrays[place + len(DATA)]), metric)


@functools.cache
def evaluator(n_devices):
    named = {
        f"{kind} {name}": of_kind(place, metric)
        for place, kind in enumerate(DATA)
        for name, metric in METRICS[kind].items()
    }

    def apply(variables, *outputs):
        return tuple(jnp.where(x == LARGEST, jnp.nan, x) for x in outputs)

    task = ff.EvalTask(apply, named)
    return ff.EvalLoop(task, strategy=ff.DataParallel(jax.devices()[:n_devices]))


@functools.cache
def measured(case, n_devices):
    arrays, weights = CASES[case]
    outputs, targets = (tuple(arrays[kind][i] for kind in DATA) for i in (0, 1))
    data = ff.ArrayStream(outputs, targets, weights, batch_size=BATCH_SIZE)
    state = ff.InferenceState(np.int32(0), {}, {})
    return evaluator(n_devices).measure(state, data)


def of_sklearn(kind, outputs, targets, weights):
    """What scikit-learn says, and where it has a formula only, NumPy."""
    if kind in IS_NUMBER:
        return numbers_of_sklearn(outputs, targets, weights)
    if kind in ("score", "column"):
        scores, labels = outputs.ravel(), targets.ravel()
        return binary_of_sklearn(scores, labels, weights) | rates_of_sklearn(
            labels, scores > 0, weights
        )
    logits = outputs.reshape(-1, outputs.shape[-1])
    labels = targets.argmax(-1) if kind == "onehot" else targets.ravel()
    weights = np.repeat(weights, len(labels) // len(weights))
    rates = rates_of_sklearn(labels, logits.argmax(-1), weights)
    if kind == "two":
        return binary_of_sklearn(logits[:, 1] - logits[:, 0], labels, weights) | rates
    matrix = sklearn.metrics.confusion_matrix(
        labels, logits.argmax(-1), labels=range(logits.shape[-1]), sample_weight=weights
    )
    surprise = -np.take_along_axis(
        scipy.special.log_softmax(logits.astype(float), -1), labels[:, None], -1
    )
    with np.errstate(over="ignore"):
        perplexity = np.exp(np.average(surprise[:, 0], weights=weights))
    return (
        rates
        | {"confusion_matrix": matrix, "perplexity": perplexity}
        | {
            f"top_{k}": sklearn.metrics.top_k_accuracy_score(
                labels, logits, k=k, labels=range(logits.shape[-1]), sample_weight=weights
            )
            for k in (2, 4)
            if k < logits.shape[-1]
        }
    )


def rates_of_sklearn(labels, predicted, weights):
    of = sklearn.metrics
    functions = {"precision": of.precision_score, "recall": of.recall_score, "f1": of.f1_score}
    return {"accuracy": of.accuracy_score(labels, predicted, sample_weight=weights)} | {
        f"{name}_{average}": function(
            labels, predicted, average=average, sample_weight=weights, zero_division=0
        )
        for name, function in functions.items()
        for average in ("macro", "micro")
    }


def binary_of_sklearn(scores, labels, weights):
    of = sklearn.metrics
    options = {"sample_weight": weights}
    rates = {"average": "binary", "zero_division": 0, **options}
    return {
        "binary_accuracy": of.accuracy_score(labels, scores > 0, **options),
        "precision": of.precision_score(labels, scores > 0, **rates),
        "recall": of.recall_score(labels, scores > 0, **rates),
        "f1": of.f1_score(labels, scores > 0, **rates),
        "auc": of.roc_auc_score(labels, scores, **options) if len(set(labels)) > 1 else np.nan,
        "confusion_matrix": of.confusion_matrix(labels, scores > 0, labels=[0, 1], **options),
    }


def numbers_of_sklearn(outputs, targets, weights):
    of = sklearn.metrics
    outputs, targets = (x.reshape(len(x), -1).astype(float) for x in (outputs, targets))
    options = {"sample_weight": weights}
    mse = of.mean_squared_error(targets, outputs, **options)
    return {
        "mse": mse,
        "rmse": np.sqrt(mse),
        "mae": of.mean_absolute_error(targets, outputs, **options),
        "r2": of.r2_score(targets, outputs, **options),
    }


def assert_metrics(kind, peer, cases=CASES):
    apart = []
    for case, n_devices in itertools.product(cases, (1, 4)):
        arrays, weights = CASES[case]
        counts = weights > 0
        theirs = peer(kind, *(array[counts] for array in arrays[kind]), weights[counts])
        ours = measured(case, n_devices)
        for name in METRICS[kind].keys() & theirs.keys():
            value, expected = ours[f"{kind} {name}"], theirs[name]
            is_tied = case == "tied" and name.startswith("top_")
            if not is_tied and not np.allclose(value, expected, **TOLERANCE, equal_nan=True):
                apart.append(f"{case}, {n_devices} devices: {name} {value} for {expected}")
    assert not apart, "\n".join(apart)


@pytest.mark.parametrize("kind", DATA)
def test_metrics_are_those_of_scikit_learn(kind):
    assert_metrics(kind, of_sklearn)
