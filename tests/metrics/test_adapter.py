import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

from flaxfit.metrics import as_metrics, auc, on


def metric_of(metric):
    return as_metrics({"it": metric})["it"]


def probabilities(scores, labels):
    return jax.nn.sigmoid(scores), labels


def test_clu_metrics_are_taken_as_they_are_weights_included(clu, digits, measured):
    logits, labels, weights = digits
    for metric_class, expected in (
        (clu.Accuracy, labels == logits.argmax(1)),
        (clu.Average.from_fun(lambda logits, labels: logits.max(-1)), logits.max(1)),
        (clu.Average.from_output("logits"), logits.mean(1)),
    ):
        value = measured(metric_of(metric_class), logits, labels, weights=weights)
        assert value == pytest.approx(np.average(expected, weights=weights), rel=1e-6)


def test_a_collection_of_clu_is_a_mapping_of_its_metrics_without_the_loss(clu, digits, measured):
    scores, of_loss = (clu.Average.from_output(name) for name in ("logits", "loss"))
    metrics = as_metrics(clu.Collection.create(right=clu.Accuracy, scores=scores, loss=of_loss))
    assert list(metrics) == ["right", "scores"]
    value = measured(metrics["right"], *digits[:2])
    assert value == measured(metric_of(clu.Accuracy), *digits[:2])
    with pytest.raises(ValueError, match="cannot be called 'loss'"):
        as_metrics(clu.Collection.create(loss=scores))


@pytest.mark.parametrize("wrap", [lambda c: [c], lambda c: {"it": c}], ids=["list", "mapping"])
def test_a_collection_in_the_place_of_one_metric_is_refused_in_words(clu, wrap):
    collection = clu.Collection.create(right=clu.Accuracy)
    with pytest.raises(TypeError, match=r"collection .* of right: pass it alone"):
        as_metrics(wrap(collection))


@pytest.mark.parametrize("name", ["Precision", "Recall"])
def test_metrax_rates_are_weighted_though_they_know_no_weights(metrax, tumours, measured, name):
    scores, labels, weights = tumours
    reference = getattr(sklearn.metrics, f"{name.lower()}_score")
    expected = reference(labels, scores > 0, sample_weight=weights)
    metric = metric_of(on(probabilities, getattr(metrax, name)))
    assert measured(metric, scores, labels, weights=weights) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("MSE", sklearn.metrics.mean_squared_error),
        ("MAE", sklearn.metrics.mean_absolute_error),
        ("RMSE", sklearn.metrics.root_mean_squared_error),
        ("RSQUARED", sklearn.metrics.r2_score),
    ],
)
def test_metrax_regression_agrees_with_scikit_learn(metrax, diabetes, measured, name, reference):
    outputs, targets, weights = diabetes
    expected = reference(targets, outputs, sample_weight=weights)
    value = measured(metric_of(getattr(metrax, name)), outputs, targets, weights=weights)
    assert value == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AUCROC", "AUCPR"])
def test_metrax_areas_keep_their_number_of_thresholds(metrax, tumours, measured, name):
    scores, labels, weights = tumours
    metric_class = getattr(metrax, name)
    whole = metric_class.from_model_output(
        *probabilities(scores, labels), sample_weights=jnp.asarray(weights)
    )
    value = measured(on(probabilities, metric_class), scores, labels, weights=weights)
    assert value == pytest.approx(float(whole.compute()), rel=1e-5)
    if name == "AUCROC":
        assert value == pytest.approx(measured(auc, scores, labels, weights=weights), abs=1e-3)


def test_metrax_perplexity_of_one_batch_is_that_of_its_examples(metrax, digits, measured):
    generator = np.random.default_rng(0)
    likelihoods = jax.nn.softmax(generator.normal(size=(50, 6, 7)).astype(np.float32))
    labels = generator.integers(0, 7, (50, 6)).astype(np.int32)
    whole = metrax.Perplexity.from_model_output(likelihoods, jnp.asarray(labels)).compute()
    value = measured(metric_of(metrax.Perplexity), np.asarray(likelihoods), labels)
    assert value == pytest.approx(float(whole), rel=1e-5)


def test_a_class_that_does_not_add_is_refused(clu):
    metric = metric_of(clu.LastValue.from_output("logits"))
    with pytest.raises(ValueError, match="Cannot use the metric class .*its merge.*collected"):
        metric.measure(np.zeros(4, np.float32), np.zeros(4, np.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Lowest:
    value: jax.Array

    @classmethod
    def from_model_output(cls, outputs, targets):
        return cls(outputs.min())

    def merge(self, other):
        return Lowest(jnp.minimum(self.value, other.value))

    def compute(self):
        return self.value


class Outside(Lowest):
    @classmethod
    def from_model_output(cls, outputs, targets):
        return cls(jnp.asarray(float(outputs[0])))


@pytest.mark.parametrize(
    ("metric_class", "why"),
    [
        (Lowest, "class Lowest: its merge.. does not add the two states"),
        (Outside, "class Outside: it computes outside of JAX"),
    ],
)
def test_a_minimum_is_not_taken_for_a_constant_nor_a_class_that_leaves_jax(metric_class, why):
    with pytest.raises(ValueError, match=why):
        metric_of(metric_class).measure(np.zeros(4), np.zeros(4))


def test_a_class_that_wants_other_arguments_is_refused(clu, metrax):
    logits, labels = np.zeros((4, 3), np.float32), np.zeros(4, np.int32)
    for metric_class in (clu.Average, metrax.PrecisionAtK):
        with pytest.raises(ValueError, match="does not fit the 2 outputs and targets"):
            metric_of(metric_class).measure(logits, labels)
    with pytest.raises(ValueError, match="asks for the model output 'loss'"):
        metric_of(clu.Average.from_output("loss")).measure(logits, labels)


def test_shapes_that_a_class_refuses_do_not_pass_by_broadcasting(metrax, digits):
    logits, labels, _ = digits
    for n in 16, 10:  # With as many rows as classes, the class itself would take them.
        with pytest.raises(ValueError, match="Incompatible shapes for broadcasting"):
            metric_of(metrax.Accuracy).measure(logits[:n], labels[:n])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Retrieved:
    """The share of outputs that are nearest to their own targets, among those of a batch."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def from_model_output(cls, outputs, targets):
        is_own = (outputs @ targets.T).argmax(1) == jnp.arange(len(outputs))
        return cls(is_own.sum(), jnp.array(len(outputs)))

    def merge(self, other):
        return type(self)(self.total + other.total, self.count + other.count)

    def compute(self):
        return self.total / self.count


def test_a_class_that_compares_examples_is_refused():
    outputs, targets = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    metric = metric_of(Retrieved)
    with pytest.raises(ValueError, match="of a batch it gives another value than of its examples"):
        metric.compute(jax.device_get(metric.measure(outputs, targets)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MeanOfBatches(Retrieved):
    @classmethod
    def from_model_output(cls, outputs, targets):
        return cls(jnp.mean(outputs), jnp.array(1))


def test_a_mean_of_a_batch_is_that_of_its_examples(digits, measured):
    logits, labels, weights = digits
    value = measured(metric_of(MeanOfBatches), logits, labels, weights=weights)
    assert value == pytest.approx(np.average(logits.mean(1), weights=weights), rel=1e-5)
