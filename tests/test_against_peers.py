"""Every loss and metric beside Keras, scikit-learn, SciPy, torch and torchmetrics.

The same inputs go to both, the awkward ones too, and the answers are at most 1e-5 apart. What
differs on purpose is in `DIFFERENCES`; what has no peer, in `WITHOUT_PEER`. Callbacks and schedules
are in `test_callbacks_against_peers.py`.
"""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import scipy.stats
import sklearn.metrics
from marks import diagonal, quick, slow, thorough

import flaxfit as ff
from flaxfit import losses, metrics

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
DIFFERENCES = {  # What: in Keras, in flaxfit.
    "`kl_divergence`": ("probabilities below 1e-7 count as 1e-7", "exact, from logits"),
    "focal losses of logits": (
        "probabilities below 1e-7 count as 1e-7, with a gradient of 0",
        "exact",
    ),
    "gradient of `mae` at error 0": ("-1 on JAX, 0 on TensorFlow", "0"),
    "gradient of `cosine_distance` at a zero vector": ("`nan` on JAX", "finite"),
    "`auc`": ("200 thresholds", "all scores, to 0.001"),
    "`top_k` of equal scores": ("all are among the highest", "the first is"),
    "metrics, if all weights are 0": ("0", "`nan`"),
    "a batch without examples": ("0", "an error"),
    "outputs that are `nan`, in metrics of classes": ("a number", "`nan`"),
}
WITHOUT_PEER = {
    "plot_confusion_matrix": "A picture.",
    "Metric": "A type.",
    **dict.fromkeys(["as_metrics", "collected", "mean", "on", "sum"], "Makes a metric of others."),
}
BESIDE_KERAS = {  # In `test_losses_against_keras.py`, which fails if it leaves one of these out.
    *("binary_focal_crossentropy", "categorical_focal_crossentropy", "generalized_crossentropy"),
    *("mape", "msle", "poisson", "cosine_similarity", "squared_hinge", "categorical_hinge"),
    *("dice", "tversky", "ctc", "circle"),
}
LOSSES_WITHOUT_PEER = {
    "Loss": "A type.",
    **dict.fromkeys(["check_loss_shape", "check_values"], "Checks what others compute."),
    "resolve": "Finds a loss by name.",
    "smape": "Keras and torch have none: by hand in `losses/test_regression.py`.",
    **dict.fromkeys(
        ["info_nce", "supervised_contrastive"],
        "Keras and torch have none: by hand in `losses/test_contrastive.py`.",
    ),
    "triplet": "torch has none that mines: by hand in `losses/test_triplet.py`.",
}


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

    # It compiles in half the time.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
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


@pytest.mark.parametrize(
    "name", quick("crossentropy", "binary_crossentropy", "kl_divergence", "huber", of=TARGETS)
)
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


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
def test_a_step_takes_the_weighted_mean_of_losses_and_gradients(n_devices):
    """Each loss is that of an output whose parameter scales it; 27 rows do not divide."""
    rows = np.arange(27)
    x, weights = OUTPUTS[rows], WEIGHTS[rows]

    def apply(variables, x, **_):
        return {name: x * scale for name, scale in variables["params"].items()}, {}

    targets = {name: cases_with_gradients(name)["2-D"][1][rows] for name in TARGETS}
    task = ff.TrainTask(
        apply, optax.sgd(1.0), {name: name for name in TARGETS}, [(x, targets, weights)]
    )
    loop = ff.TrainLoop(
        lambda rngs, x: {"params": {name: np.ones(N_CLASSES, "float32") for name in TARGETS}},
        task,
        0,
        stdout=False,
        devices=jax.devices()[:n_devices],
    )
    checkpoint = loop.next_step()
    for name in TARGETS:
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
        "labels": (normal(N, 4), GENERATOR.integers(0, 2, (N, 4))),
        "tokens": (normal(N, 3, 4), GENERATOR.integers(0, 4, (N, 3))),
        "number": (normal(N), normal(N)),
        "numbers": (normal(N, 3), normal(N, 3)),
        "deep": (normal(N, 2, 3), normal(N, 2, 3)),
    }


AVERAGES = {how: how for how in ("macro", "micro", "weighted", "samples")} | {"classes": None}


def rates(*names, **options):
    """Metrics by name, such as "f1_macro"; "f1_classes" has a value for each class."""
    parts = {name: name.rsplit("_", 1) for name in names}
    return {
        name: getattr(metrics, kind)(average=AVERAGES[how], **options)
        for name, (kind, how) in parts.items()
    }


# Together every metric, with every average; each is tried on some kinds, as programs take time.
OF_COUNTS = ["balanced_accuracy", "mcc", "cohen_kappa", "mean_iou"]
OF_BINARY = [
    *("specificity", "negative_predictive_value", "false_positive_rate", "false_negative_rate"),
    *("true_negatives", "false_positives", "false_negatives", "true_positives"),
    *("iou", "dice", "binary_iou"),
]
METRICS = {
    "score": metrics.as_metrics(["accuracy", "binary_accuracy", "precision", "recall", "f1", "auc"])
    | metrics.as_metrics(OF_COUNTS + OF_BINARY)
    | {"fbeta": metrics.fbeta(beta=2.0), "confusion_matrix": metrics.confusion_matrix(2)},
    "column": metrics.as_metrics(["accuracy", "binary_accuracy"]) | rates("f1_micro"),
    "two": metrics.as_metrics(["precision"]) | rates("recall_macro"),
    "classes": metrics.as_metrics(["accuracy", "top_2", "perplexity"])
    | rates("precision_macro", "recall_weighted", "f1_macro", "precision_micro")
    | rates("fbeta_weighted", beta=0.5)
    | rates("iou_macro", "dice_weighted", "specificity_micro", "true_positives_classes")
    | metrics.as_metrics(OF_COUNTS)
    | {"confusion_matrix": metrics.confusion_matrix(5)},
    "onehot": metrics.as_metrics(["accuracy", "top_4", "perplexity"]),
    "labels": metrics.as_metrics(["binary_accuracy"])
    | rates("precision_samples", "recall_classes", "f1_weighted", multilabel=True)
    | rates("iou_samples", "specificity_classes", "true_negatives_classes", multilabel=True)
    | {name: getattr(metrics, name)(multilabel=True) for name in ("mcc", "balanced_accuracy")},
    "tokens": metrics.as_metrics(["accuracy", "top_2", "perplexity"])
    | rates("recall_macro")
    | metrics.as_metrics(["mean_iou", "mcc"]),
    "number": metrics.as_metrics(["mse", "mae", "rmse", "r2"]),
    "numbers": metrics.as_metrics(["mse"]),
    "deep": metrics.as_metrics(["mae", "rmse", "r2"]),
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
    if kind in ("score", "column", "labels"):
        return outputs, (outputs > 0).astype(int)
    actual = outputs.argmax(-1)
    return outputs, np.eye(5, dtype=np.float32)[actual] if kind == "onehot" else actual


def spoiled(kind, outputs, targets):
    """What would spoil any number that it got into; the model makes NaN of the largest number."""
    outputs, targets = outputs.copy(), targets.copy()
    outputs[IDLE] = LARGEST
    targets[IDLE] = np.nan if targets.dtype.kind == "f" else -1
    return outputs, targets


def with_nan(kind, outputs, targets):
    """The model makes NaN of a single output."""
    outputs = outputs.copy()
    outputs.flat[0] = LARGEST
    return outputs, targets


CASES = {
    "plain": each(lambda kind, *arrays: arrays, EQUAL),
    "weighted": each(lambda kind, *arrays: arrays),
    "one class": each(one_class, EQUAL),
    "all right": each(all_right, EQUAL),
    "tied": each(lambda kind, o, t: (o.round() + 0.25, t), EQUAL),
    "of 1e4": each(lambda kind, o, t: (1e4 * o, 1e4 * t if kind in IS_NUMBER else t)),
    "near 1e4": each(lambda kind, o, t: (1e4 + o, 1e4 + t) if kind in IS_NUMBER else (o, t)),
    "idle rows": each(spoiled, np.where(IDLE, 0, SOME).astype(np.float32)),
}
WITHOUT_VALUE = {
    "no weight": each(lambda kind, *arrays: arrays, np.zeros(N, np.float32)),
    "NaN": each(with_nan),
}
STATE = ff.InferenceState(np.int32(0), {}, {})


def of_kind(place, metric):
    return metrics.on(lambda *arrays: (arrays[place], arrays[place + len(DATA)]), metric)


def evaluator(named, n_devices):
    def apply(variables, *outputs):
        found = [jnp.where(x == LARGEST, jnp.nan, x) for x in outputs]
        return tuple(found) if len(found) > 1 else found[0]

    strategy = ff.DataParallel(jax.devices()[:n_devices])
    return ff.EvalLoop(ff.EvalTask(apply, named), strategy=strategy)


@functools.cache
def evaluator_of_all(n_devices):
    named = {
        f"{kind} {name}": of_kind(place, metric)
        for place, kind in enumerate(DATA)
        for name, metric in METRICS[kind].items()
    }
    return evaluator(named, n_devices)


@functools.cache
def measured(case, n_devices):
    arrays, weights = (CASES | WITHOUT_VALUE)[case]
    outputs, targets = (tuple(arrays[kind][i] for kind in DATA) for i in (0, 1))
    data = ff.ArrayStream(outputs, targets, weights, batch_size=BATCH_SIZE)
    return evaluator_of_all(n_devices).measure(STATE, data)


def of_sklearn(kind, outputs, targets, weights):
    """What scikit-learn says, and where it has a formula only, NumPy."""
    if kind in IS_NUMBER:
        return numbers_of_sklearn(outputs, targets, weights)
    if kind in ("score", "column"):
        scores, labels = outputs.ravel(), targets.ravel()
        return (
            binary_of_sklearn(scores, labels, weights)
            | rates_of_sklearn(labels, scores > 0, weights)
            | counted_of_sklearn(labels, scores > 0, weights, "binary")
        )
    if kind == "labels":
        is_right = (targets == (outputs > 0)).mean(-1)
        rates = rates_of_sklearn(targets, (outputs > 0).astype(int), weights, *AVERAGES)
        rates |= counted_of_sklearn(targets, outputs > 0, weights, "samples")
        each = targets.ravel(), outputs.ravel() > 0, np.repeat(weights, targets.shape[-1])
        agreement = counted_of_sklearn(*each, "binary")
        rates |= {name: agreement[name] for name in ("mcc", "balanced_accuracy")}
        return rates | {"binary_accuracy": np.average(is_right, weights=weights)}
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
        | counted_of_sklearn(labels, logits.argmax(-1), weights, "macro", logits.shape[-1])
        | {"confusion_matrix": matrix, "perplexity": perplexity}
        | {
            f"top_{k}": sklearn.metrics.top_k_accuracy_score(
                labels, logits, k=k, labels=range(logits.shape[-1]), sample_weight=weights
            )
            for k in (2, 4)
            if k < logits.shape[-1]
        }
    )


def counted_of_sklearn(labels, predicted, weights, average, n_classes=2):
    """What is computed from counts by class; "iou" and such of class 1 of two."""
    of, options = sklearn.metrics, {"sample_weight": weights}
    several = {"labels": range(n_classes)} if labels.ndim == 1 else {}
    matrices = of.multilabel_confusion_matrix(labels, predicted, **options, **several)
    tn, fp, fn, tp = matrices.reshape(-1, 4).T
    with np.errstate(all="ignore"):
        rates = {
            "specificity": tn / (tn + fp),
            "negative_predictive_value": tn / (tn + fn),
            "false_positive_rate": fp / (tn + fp),
            "false_negative_rate": fn / (tp + fn),
        }
        rates = {name: np.nan_to_num(values) for name, values in rates.items()}
    rates |= dict(zip(OF_BINARY[4:8], (tn, fp, fn, tp), strict=True))
    found = {f"{name}_classes": values for name, values in rates.items()}
    found["specificity_micro"] = tn.sum() / (tn + fp).sum()
    f_scores = functools.partial(of.fbeta_score, labels, predicted, zero_division=0, **options)
    jaccard = functools.partial(of.jaccard_score, labels, predicted, zero_division=0, **options)
    if average == "samples":
        return found | {"iou_samples": jaccard(average="samples")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of classes that do not occur.
        found |= {
            "balanced_accuracy": of.balanced_accuracy_score(labels, predicted, **options),
            "mcc": of.matthews_corrcoef(labels, predicted, **options),
            "cohen_kappa": of.cohen_kappa_score(labels, predicted, **options),
        }
    found["mean_iou"] = found["binary_iou"] = jaccard(average="macro")
    if average == "binary":
        found |= {name: values[1] for name, values in rates.items()}
        return found | {"iou": jaccard(), "fbeta": f_scores(beta=2), "dice": f_scores(beta=1)}
    return found | {
        "iou_macro": found["mean_iou"],
        "dice_weighted": f_scores(beta=1, average="weighted"),
        "fbeta_weighted": f_scores(beta=0.5, average="weighted"),
    }


def rates_of_sklearn(labels, predicted, weights, *averages):
    options = {"sample_weight": weights, "zero_division": 0}
    found = {}
    if labels.ndim == 1:
        found["accuracy"] = np.average(labels == predicted, weights=weights)
    for average in averages or ("macro", "micro", "weighted"):
        values = sklearn.metrics.precision_recall_fscore_support(
            labels, predicted, average=AVERAGES[average], **options
        )
        names = (f"{name}_{average}" for name in ("precision", "recall", "f1"))
        found |= dict(zip(names, values[:3], strict=True))
    return found


def binary_of_sklearn(scores, labels, weights):
    of, options = sklearn.metrics, {"sample_weight": weights}
    precision, recall, f1, _ = of.precision_recall_fscore_support(
        labels, scores > 0, average="binary", zero_division=0, **options
    )
    return {
        "binary_accuracy": of.accuracy_score(labels, scores > 0, **options),
        "precision": precision,
        "recall": recall,
        "f1": f1,
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


def tolerance_of(name):
    return {"rtol": 0, "atol": 1e-3} if name.startswith("auc") else TOLERANCE


def assert_metrics(kind, peer, cases=CASES, but=(), n_devices=4):
    apart = []
    for case in cases:
        arrays, weights = CASES[case]
        counts = weights > 0
        theirs = peer(kind, *(array[counts] for array in arrays[kind]), weights[counts])
        names = {name for name in METRICS[kind].keys() & theirs.keys() if (case, name) not in but}
        for name in names:
            value, expected = measured(case, n_devices)[f"{kind} {name}"], theirs[name]
            if not np.allclose(value, expected, **tolerance_of(name), equal_nan=True):
                apart.append(f"{case}: {name} {value} for {expected}")
    assert not apart, "\n".join(apart)


TIED = [("tied", name) for name in ("top_2", "top_4")]


@pytest.mark.slow  # It compiles every metric.
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
@pytest.mark.parametrize("kind", DATA)
def test_metrics_are_those_of_scikit_learn(kind, n_devices):
    assert_metrics(kind, of_sklearn, but=TIED, n_devices=n_devices)


def of_keras_metrics(keras):
    of, sigmoid = keras.metrics, scipy.special.expit

    def by_row(kind, outputs, targets):
        top = {"classes": "top_2", "onehot": "top_4", "tokens": "top_2"}.get(kind)
        match kind:
            case "score" | "column":
                yield ("binary_accuracy", "accuracy"), of.BinaryAccuracy(threshold=0), outputs
                yield ("precision",), of.Precision(), sigmoid(outputs)
                yield ("recall",), of.Recall(), sigmoid(outputs)
            case "classes" | "tokens":
                yield ("accuracy",), of.SparseCategoricalAccuracy(), outputs
                yield (top,), of.SparseTopKCategoricalAccuracy(k=2), outputs
                yield ("log",), of.SparseCategoricalCrossentropy(from_logits=True), outputs
            case "onehot":
                yield ("accuracy",), of.CategoricalAccuracy(), outputs
                yield (top,), of.TopKCategoricalAccuracy(k=4), outputs
                yield ("log",), of.CategoricalCrossentropy(from_logits=True), outputs
            case "number" | "numbers" | "deep":
                yield ("mse",), of.MeanSquaredError(), outputs
                yield ("mae",), of.MeanAbsoluteError(), outputs
                yield ("rmse",), of.RootMeanSquaredError(), outputs
                if kind != "deep":
                    yield ("r2",), of.R2Score(), outputs

    def measure(kind, outputs, targets, weights):
        found = {}
        if kind in ("tokens", "deep"):
            weights = np.broadcast_to(weights[:, None], outputs.shape[:2])
        if kind in ("score", "number"):
            outputs, targets = outputs[:, None], targets[:, None]
        for names, metric, given in by_row(kind, outputs, targets):
            metric.update_state(targets, given, sample_weight=weights)
            value = float(metric.result())
            found |= dict.fromkeys(names, value)
        if "log" in found:
            found["perplexity"] = np.exp(found["log"])
        return found

    return measure


@pytest.mark.parametrize("kind", ["score", "classes", "onehot", "tokens", "number", "deep"])
def test_metrics_are_those_of_keras(kind, keras):
    assert_metrics(kind, of_keras_metrics(keras), ["plain", "weighted", "tied"], but=TIED)


@pytest.mark.parametrize("axis", [1, -1])
def test_the_metric_of_cosine_similarity_is_that_of_keras(axis, keras):
    outputs, targets = np.random.default_rng(3).normal(size=(2, 20, 3, 4)).astype(np.float32)
    weights = np.linspace(0, 2, 20, dtype=np.float32)
    theirs = keras.metrics.CosineSimilarity(axis=axis)
    by_vector = np.broadcast_to(weights[:, None], (20, 4 if axis == 1 else 3))
    theirs.update_state(targets, outputs, sample_weight=by_vector)
    ours = metrics.cosine_similarity(axis=axis)
    value = ours.compute(ours.measure(outputs, targets, weights=weights))
    assert value == pytest.approx(float(theirs.result()), abs=1e-6)


def of_torchmetrics(torch, functional):
    of = functional.classification

    def measure(kind, outputs, targets, weights):
        outputs, targets = torch.tensor(outputs), torch.tensor(targets)
        if kind in IS_NUMBER:
            pair = outputs.flatten(1) if outputs.ndim > 2 else outputs, targets.reshape(N, -1)
            pair = pair if outputs.ndim > 1 else (outputs, targets)
            mse = functional.mean_squared_error(*pair)
            mae = functional.mean_absolute_error(*pair)
            return {"mse": mse, "rmse": mse**0.5, "mae": mae, "r2": functional.r2_score(*pair)}
        if kind in ("score", "column"):
            pair = outputs.sigmoid(), targets
            return {
                "accuracy": of.binary_accuracy(*pair),
                "binary_accuracy": of.binary_accuracy(*pair),
                "precision": of.binary_precision(*pair),
                "recall": of.binary_recall(*pair),
                "f1": of.binary_f1_score(*pair),
                "auc": of.binary_auroc(*pair),
                "confusion_matrix": of.binary_confusion_matrix(*pair),
            }
        labels = targets.argmax(-1) if kind == "onehot" else targets
        pair = outputs.movedim(-1, 1), labels
        options = {"num_classes": outputs.shape[-1]}
        found = {"confusion_matrix": of.multiclass_confusion_matrix(*pair, **options)}
        tokens = (outputs, labels) if kind == "tokens" else (outputs[None], labels[None])
        found["perplexity"] = functional.text.perplexity(*tokens)
        for k, name in (1, "accuracy"), (2, "top_2"), (4, "top_4"):
            if k < outputs.shape[-1]:
                found[name] = of.multiclass_accuracy(*pair, top_k=k, average="micro", **options)
        for name, average in itertools.product(("precision", "recall", "f1"), ("macro", "micro")):
            function = getattr(of, f"multiclass_{name}".replace("f1", "f1_score"))
            found[f"{name}_{average}"] = function(*pair, average=average, **options)
        return found

    return measure


@pytest.mark.parametrize("kind", [kind for kind in DATA if kind != "labels"])
def test_metrics_are_those_of_torchmetrics(kind, torch, torchmetrics):
    peer = of_torchmetrics(torch, torchmetrics.functional)
    # It warns of one class, and has no way not to.
    cases = ["plain", "all right"] + ["one class"] * (kind not in ("score", "column"))
    assert_metrics(kind, peer, cases)


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
def test_metrics_of_nothing_are_not_numbers(n_devices):
    values = measured("no weight", n_devices)
    matrices = {name for name in values if name.endswith("confusion_matrix")}
    assert all(not values[name].any() for name in matrices)
    assert {name for name in values if np.isnan(values[name]).all()} == values.keys() - matrices


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
def test_metrics_of_an_output_that_is_nan_are_not_numbers(n_devices):
    """An output of weight 0 leaves no mark: see "idle rows"."""
    values = measured("NaN", n_devices)
    assert {name for name, value in values.items() if not np.isnan(value).all()} == set()


# The types of outputs and of targets, which are a program each.
SAME_TYPE = ("onehot", "number", "deep")
TYPES = [
    *diagonal(("score", "two", "classes", "labels"), HALVES, ["uint8"]),
    *diagonal(("column", "tokens"), HALVES, ["int8"]),
    ("column", "float32", "bool"),
    ("column", "float32", "float32"),
    *((kind, half, half) for kind, half in zip(SAME_TYPE, 2 * HALVES, strict=False)),
    *(thorough(kind, half, half) for kind, half in zip(SAME_TYPE, HALVES[::-1] * 2, strict=False)),
    *diagonal(("two", "number"), ["float32"], INTEGERS),
    *(thorough("classes", "float32", of_targets) for of_targets in INTEGERS),
    *(thorough("score", "float32", of_targets) for of_targets in [*INTEGERS, "bool", "float32"]),
    *((kind, "float32", "bool") for kind in ("onehot", "labels", "number")),
]


def assert_by_loop(named, outputs, targets, expected, devices=(1, 4), weights=SOME):
    """Metrics of a loop on these numbers of devices are those of a peer that knows them."""
    for n_devices in devices:
        assert_measures(evaluator(named, n_devices), outputs, targets, expected, weights)


def assert_measures(loop, outputs, targets, expected, weights=SOME):
    values = loop.measure(STATE, ff.ArrayStream(outputs, targets, weights, batch_size=BATCH_SIZE))
    assert values.keys() & expected.keys()
    for name in values.keys() & expected.keys():
        np.testing.assert_allclose(values[name], expected[name], **tolerance_of(name), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
@pytest.mark.parametrize(("kind", "of_outputs", "of_targets"), TYPES)
def test_metrics_of_any_type_are_those_of_scikit_learn(kind, of_outputs, of_targets, n_devices):
    outputs, targets = DATA[kind]
    targets = abs(3 * targets) if kind in IS_NUMBER else targets
    outputs, targets = outputs.astype(of_outputs), targets.astype(of_targets)
    wide = targets.astype(float if kind in IS_NUMBER else int)
    scores = outputs.astype(float)
    if kind == "tokens":  # Of scores that 16 bits make equal, the first is the highest.
        scores -= 1e-9 * np.arange(scores.shape[-1])
    expected = of_sklearn(kind, scores, wide, SOME)
    assert_by_loop(METRICS[kind], outputs, targets, expected, [n_devices])


def test_batches_without_examples_are_refused_where_keras_takes_them(keras):
    outputs, targets = (x[:0] for x in DATA["classes"])
    task = ff.EvalTask(lambda variables, x: x, {"accuracy": metrics.accuracy})
    with pytest.raises(ValueError, match="A batch holds no examples"):
        ff.EvalLoop(task).measure(ff.InferenceState(0, {}, {}), [(outputs, targets)])
    theirs = keras.metrics.SparseCategoricalAccuracy()
    theirs.update_state(targets, outputs)
    assert theirs.result() == 0


# The switch `from_logits=False`, for the metrics that have it.
PROBABLE = {"from_logits": False}
OF_PROBABILITIES = {
    "score": {
        name: getattr(metrics, name)(**PROBABLE)
        for name in ("accuracy", "binary_accuracy", "precision", "recall", "f1")
    }
    | {"confusion_matrix": metrics.confusion_matrix(2, **PROBABLE)},
    "two": rates("recall_macro", **PROBABLE),
    "classes": {
        "accuracy": metrics.accuracy(**PROBABLE),
        "perplexity": metrics.perplexity(**PROBABLE),
        "confusion_matrix": metrics.confusion_matrix(5, **PROBABLE),
    }
    | rates("precision_macro", "recall_weighted", "f1_micro", **PROBABLE),
    "labels": {"binary_accuracy": metrics.binary_accuracy(**PROBABLE)}
    | rates("precision_samples", "recall_classes", "f1_weighted", multilabel=True, **PROBABLE),
}


def probabilities(kind):
    logits = DATA[kind][0]
    if kind in ("score", "labels"):
        return scipy.special.expit(logits)
    return scipy.special.softmax(logits, -1)


@functools.cache
def evaluator_of_probabilities(kind, n_devices):
    return evaluator(OF_PROBABILITIES[kind], n_devices)


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
@pytest.mark.parametrize("kind", OF_PROBABILITIES)
def test_metrics_of_probabilities_are_those_of_scikit_learn(kind, n_devices):
    logits, targets = DATA[kind]
    expected = of_sklearn(kind, logits, targets, SOME)
    loop = evaluator_of_probabilities(kind, n_devices)
    assert_measures(loop, probabilities(kind), targets, expected)


def of_keras_by_probability(keras, kind):
    of = keras.metrics
    match kind:
        case "score" | "labels":
            yield "binary_accuracy", of.BinaryAccuracy()
            if kind == "score":
                yield "precision", of.Precision()
                yield "recall", of.Recall()
        case "classes":
            yield "accuracy", of.SparseCategoricalAccuracy()
            yield "perplexity", of.SparseCategoricalCrossentropy()


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
@pytest.mark.parametrize("kind", ["score", "classes", "labels"])
def test_metrics_of_probabilities_are_those_of_keras(kind, n_devices, keras):
    outputs, targets = probabilities(kind), DATA[kind][1]
    given = (targets[:, None], outputs[:, None]) if kind == "score" else (targets, outputs)
    expected = {}
    for name, metric in of_keras_by_probability(keras, kind):
        metric.update_state(*given, sample_weight=SOME)
        value = float(metric.result())
        expected[name] = np.exp(value) if name == "perplexity" else value
    assert expected.keys() <= OF_PROBABILITIES[kind].keys()
    assert_measures(evaluator_of_probabilities(kind, n_devices), outputs, targets, expected)


# The other metrics, each with what a peer says of the same weighted rows.
PEER = sklearn.metrics
OTHERS = {
    "average_precision": ("score", lambda o, t, w: PEER.average_precision_score(t, o, **w)),
    "pr_auc": ("score", lambda o, t, w: PEER.auc(*curve_of_sklearn(o, t, w))),
    "precision_at_recall": ("score", lambda o, t, w: best_of_sklearn(o, t, w, 0, 1)),
    "recall_at_precision": ("score", lambda o, t, w: best_of_sklearn(o, t, w, 1, 0)),
    "sensitivity_at_specificity": ("score", lambda o, t, w: best_by_roc(o, t, w, 1, 0)),
    "specificity_at_sensitivity": ("score", lambda o, t, w: best_by_roc(o, t, w, 0, 1)),
    "log_loss": ("classes", lambda o, t, w: PEER.log_loss(t, softmax(o), labels=range(5), **w)),
    "brier": ("score", lambda o, t, w: PEER.brier_score_loss(t, scipy.special.expit(o), **w)),
    "calibration_error": ("classes", lambda o, t, w: calibration_by_hand(o, t, w)),
    "median_absolute_error": ("number", lambda o, t, w: PEER.median_absolute_error(t, o, **w)),
    "max_error": ("number", lambda o, t, w: PEER.max_error(t, o)),
    "explained_variance": ("deep", lambda o, t, w: of_flat(PEER.explained_variance_score, o, t, w)),
    "quantile_loss": ("number", lambda o, t, w: PEER.mean_pinball_loss(t, o, **w)),
    "pearson": ("number", lambda o, t, w: correlation(o, t, w)),
    "spearman": ("number", lambda o, t, w: correlation(ranks(o, w), ranks(t, w), w)),
    "concordance": ("number", lambda o, t, w: concordance(o, t, w)),
    "hamming_loss": ("labels", lambda o, t, w: PEER.hamming_loss(t, o > 0, **w)),
    "exact_match": ("labels", lambda o, t, w: PEER.accuracy_score(t, o > 0, **w)),
    "precision_at_k": ("classes", lambda o, t, w: of_first(o, t, w) / 2),
    "recall_at_k": ("classes", lambda o, t, w: of_first(o, t, w)),
    "d2_absolute_error": ("number", lambda o, t, w: PEER.d2_absolute_error_score(t, o, **w)),
    "zero_one_loss": ("classes", lambda o, t, w: PEER.zero_one_loss(t, o.argmax(1), **w)),
    "ndcg": ("labels", lambda o, t, w: PEER.ndcg_score(t, o, **w)),
    "mrr": ("classes", lambda o, t, w: np.average(1 / ranks_of_labels(o, t), weights=SOME)),
}


OF_SEVERAL = {
    f"{name}_{kind}_{average}": getattr(metrics, name)(average=average, **options)
    for name in ("auc", "average_precision")
    for average in ("macro", "weighted")
    for kind, options in (("classes", {"multi_class": "ovr"}), ("labels", {"multilabel": True}))
}
AT_2 = {"precision_at_k": "precision@2", "recall_at_k": "recall@2"}


def softmax(outputs):
    return scipy.special.softmax(outputs.astype(float), -1)


def of_flat(metric, outputs, targets, weights):
    return metric(targets.reshape(N, -1), outputs.reshape(N, -1), **weights)


def curve_of_sklearn(outputs, targets, weights):
    curve = PEER.precision_recall_curve(targets, outputs, drop_intermediate=False, **weights)
    return curve[1], curve[0]


def best_of_sklearn(outputs, targets, weights, best, bounded):
    curve = PEER.precision_recall_curve(targets, outputs, drop_intermediate=False, **weights)
    return curve[best][:-1][curve[bounded][:-1] >= 0.5].max()


def best_by_roc(outputs, targets, weights, best, bounded):
    fpr, tpr, _ = PEER.roc_curve(targets, outputs, drop_intermediate=False, **weights)
    rates = (1 - fpr, tpr)
    return rates[best][rates[bounded] >= 0.5].max()


def calibration_by_hand(outputs, targets, weights):
    shares, weights = softmax(outputs).max(1), SOME / SOME.sum()
    gaps = weights * (shares - (outputs.argmax(1) == targets))
    bins = np.digitize(shares, np.linspace(0, 1, 16)[1:-1])
    return np.abs(np.bincount(bins, gaps, 15)).sum()


def correlation(outputs, targets, weights):
    spreads = np.cov(outputs.astype(float), targets.astype(float), aweights=SOME, ddof=0)
    return spreads[0, 1] / np.sqrt(spreads[0, 0] * spreads[1, 1])


def concordance(outputs, targets, weights):
    spreads = np.cov(outputs.astype(float), targets.astype(float), aweights=SOME, ddof=0)
    apart = np.average(outputs.astype(float) - targets, weights=SOME)
    return 2 * spreads[0, 1] / (spreads[0, 0] + spreads[1, 1] + apart**2)


def of_first(outputs, targets, weights):
    return PEER.top_k_accuracy_score(targets, outputs, k=2, labels=range(5), **weights)


def ranks(values, weights):
    below = values[:, None] > values
    return (SOME * below).sum(1) + (SOME * (values[:, None] == values)).sum(1) / 2


def ranks_of_labels(outputs, targets):
    own = np.take_along_axis(outputs, targets[:, None], 1)
    return (outputs >= own).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
def test_other_metrics_are_those_of_scikit_learn(n_devices):
    for kind in {kind for kind, _ in OTHERS.values()}:
        outputs, targets = DATA[kind]
        named = {name: AT_2.get(name, name) for name, (of, _) in OTHERS.items() if of == kind}
        weights = {"sample_weight": SOME}
        expected = {name: OTHERS[name][1](outputs, targets, weights) for name in named}
        assert_by_loop(metrics.as_metrics(named), outputs, targets, expected, [n_devices])


POWERS = (0, 1, 1.5, 2, 3)
OF_RATES = {"mean_poisson_deviance": metrics.mean_poisson_deviance} | {
    f"d2_tweedie_{power}": metrics.d2_tweedie(power=power) for power in POWERS
}


@pytest.mark.parametrize("n_devices", [thorough(1), slow(4)])
def test_metrics_of_rates_are_those_of_scikit_learn(n_devices):
    outputs, targets = (np.exp(each / 3) for each in DATA["number"])
    weights = {"sample_weight": SOME}
    expected = {"mean_poisson_deviance": PEER.mean_poisson_deviance(targets, outputs, **weights)}
    for power in POWERS:
        found = PEER.d2_tweedie_score(targets, outputs, power=power, **weights)
        expected[f"d2_tweedie_{power}"] = found
    assert_by_loop(OF_RATES, outputs, targets, expected, [n_devices])


def test_kendall_is_that_of_scipy():
    outputs, targets = (each.round(1) for each in DATA["number"])  # With ties.
    sums = metrics.kendall.measure(outputs, targets, weights=1 - IDLE.astype(np.float32))
    expected = scipy.stats.kendalltau(outputs[~IDLE], targets[~IDLE]).statistic
    assert metrics.kendall.compute(sums) == pytest.approx(expected)
    with pytest.raises(ValueError, match="'kendall' counts all examples equally"):
        metrics.kendall.compute(metrics.kendall.measure(outputs, targets, weights=SOME))


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [thorough(1), 4])
@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_areas_of_several_are_those_of_scikit_learn(kind, n_devices):
    outputs, targets = DATA[kind]
    # The last class never occurs: it is left out here, and has no area there.
    scores, marks = outputs, targets
    if kind == "classes":
        scores, marks = softmax(outputs)[:, :4], np.eye(4)[targets]
    peers = {"auc": PEER.roc_auc_score, "average_precision": PEER.average_precision_score}
    named = {name: metric for name, metric in OF_SEVERAL.items() if f"_{kind}_" in name}
    parts = {name: name.split(f"_{kind}_") for name in named}
    expected = {
        name: peers[peer](marks, scores, average=average, sample_weight=SOME)
        for name, (peer, average) in parts.items()
    }
    assert_by_loop(named, outputs, targets, expected, [n_devices])


TEXTS = {
    "bleu": lambda of, a, b: of.bleu_score(a, [[each] for each in b]),
    "wer": lambda of, a, b: of.word_error_rate(a, b),
    "cer": lambda of, a, b: of.char_error_rate(a, b),
    "rouge_1": lambda of, a, b: rouge_of_metrax("RougeN", a, b, order=1),
    "rouge_2": lambda of, a, b: rouge_of_metrax("RougeN", a, b, order=2),
    "rouge_l": lambda of, a, b: rouge_of_metrax("RougeL", a, b),
}


def rouge_of_metrax(name, predicted, expected, **options):
    metrax = pytest.importorskip("metrax", reason="metrax is not installed")
    score = getattr(metrax, name).from_model_output(predicted, expected, **options)
    return float(score.compute()[-1])


def decode(tokens):
    return " ".join("abcdefgh"[: token + 1] for token in tokens)


@pytest.mark.slow
def test_metrics_of_text_are_those_of_torchmetrics_and_metrax(torch, torchmetrics):
    targets = np.random.default_rng(0).integers(0, 5, (N, 9))
    outputs = np.where(np.arange(9) % 4 == 0, 5, targets)
    outputs[::2] = np.roll(outputs[::2], 1, 1)
    times = np.arange(N) % 3  # An example of weight n is n equal ones to the peers.
    texts = [[decode(row) for row in rows.repeat(times, 0)] for rows in (outputs, targets)]
    peers = {
        name: float(peer(torchmetrics.functional.text, *texts)) for name, peer in TEXTS.items()
    }
    named = {name: getattr(metrics, name)(decode=decode) for name in TEXTS}
    logits = np.eye(6, dtype=np.float32)[outputs]
    assert_by_loop(named, logits, targets, peers, weights=times.astype(np.float32))


IMAGES = ("psnr", "ssim")


@pytest.mark.slow
def test_metrics_of_images_are_those_of_metrax():
    metrax = pytest.importorskip("metrax", reason="metrax is not installed")
    generator = np.random.default_rng(0)
    targets = generator.uniform(size=(N, 14, 16, 2)).astype(np.float32)
    outputs = np.clip(targets + generator.normal(0, 0.1, targets.shape), 0, 1).astype(np.float32)
    peers = {"psnr": metrax.PSNR, "ssim": metrax.SSIM}
    each = {
        name: np.array(
            [
                float(peer.from_model_output(a[None], b[None], max_val=1.0).compute())
                for a, b in zip(outputs, targets, strict=True)
            ]
        )
        for name, peer in peers.items()
    }
    expected = {name: np.average(values, weights=SOME) for name, values in each.items()}
    assert_by_loop(metrics.as_metrics(list(IMAGES)), outputs, targets, expected)


def test_differences_are_in_the_page_on_keras(assert_on_page_on_keras):
    assert_on_page_on_keras(DIFFERENCES)


def test_keras_differs_where_the_page_says_so(keras):
    far, certain = jnp.array([[30.0, 0.0]]), jnp.array([[0.0, 1.0]])
    clipped = of_keras(keras)["kl_divergence"](far, certain)
    np.testing.assert_allclose(clipped, -np.log(1e-7), rtol=1e-5)
    np.testing.assert_allclose(losses.kl_divergence(far, certain), 30, rtol=1e-5)
    focal = keras.losses.binary_focal_crossentropy

    def focal_of_keras(outputs):
        return focal(jnp.ones((1, 1)), outputs, from_logits=True).sum()

    value, slope = jax.value_and_grad(focal_of_keras)(jnp.full((1, 1), -30.0))
    np.testing.assert_allclose([value, slope[0, 0]], [-np.log(1e-7), 0], rtol=1e-5, atol=1e-9)
    exact = losses.binary_focal_crossentropy(jnp.full((1, 1), -30.0), jnp.ones((1, 1)))
    np.testing.assert_allclose(exact, 30, rtol=1e-5)
    slope = jax.grad(lambda outputs: of_keras(keras)["mae"](outputs, jnp.zeros((1, 1))).sum())
    assert slope(jnp.zeros((1, 1))) == -1
    of_angle = jax.grad(lambda outputs: of_keras(keras)["cosine_distance"](outputs, certain).sum())
    assert np.isnan(of_angle(jnp.zeros((1, 2)))).any()  # Ours: see `assert_losses`.
    right = keras.metrics.SparseCategoricalAccuracy()
    right.update_state(np.zeros(2), np.array([[np.nan, 0.0], [1.0, 0.0]]))
    assert right.result() == 1  # Ours: see above.
    mean = keras.metrics.MeanSquaredError()
    mean.update_state(np.ones((1, 1)), np.zeros((1, 1)), sample_weight=np.zeros(1))
    assert mean.result() == 0
    top_1 = keras.metrics.SparseTopKCategoricalAccuracy(k=1)
    top_1.update_state(np.ones(1), np.zeros((1, 2)))
    assert top_1.result() == 1


def test_nothing_lacks_a_peer_without_a_reason():
    compared = {re.sub(r"_\d$", "_k", name) for names in METRICS.values() for name in names}
    compared = {re.sub("_(macro|micro|weighted|samples|classes)$", "", name) for name in compared}
    public = {name for name in vars(metrics) if not name.startswith("_")}
    compared |= {*OTHERS, *TEXTS, *IMAGES, "cosine_similarity", "kendall"}
    compared |= {"d2_tweedie", *OF_RATES}
    assert public - compared <= WITHOUT_PEER.keys()
    public = {name for name in vars(losses) if not name.startswith("_")}
    assert public - TARGETS.keys() - BESIDE_KERAS == LOSSES_WITHOUT_PEER.keys()
