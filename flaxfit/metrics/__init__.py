"""Metrics: pairs of pure functions, `measure` on the device and `compute` on the host.

Sums, not means: the results of `measure` add up over batches, devices and hosts, and `compute`
divides once, at the end. So the value does not depend on the batches.

>>> import numpy as np
>>> logits, labels = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), np.array([0, 1, 1])
>>> accuracy.compute(accuracy.measure(logits, labels, weights=np.array([1.0, 2.0, 1.0])))
0.75
"""

from flaxfit.metrics._accuracy import (
    accuracy,
    binary_accuracy,
    exact_match,
    hamming_loss,
    top_k,
    zero_one_loss,
)
from flaxfit.metrics._agreement import (
    balanced_accuracy,
    binary_iou,
    cohen_kappa,
    false_negatives,
    false_positives,
    mcc,
    true_negatives,
    true_positives,
)
from flaxfit.metrics._auc import auc
from flaxfit.metrics._collected import collected
from flaxfit.metrics._confusion import confusion_matrix, plot_confusion_matrix
from flaxfit.metrics._correlations import concordance, explained_variance, pearson
from flaxfit.metrics._images import psnr, ssim
from flaxfit.metrics._metric import Metric, mean, sum
from flaxfit.metrics._names import as_metrics, on
from flaxfit.metrics._of_rows import (
    average_precision,
    d2_absolute_error,
    d2_tweedie,
    kendall,
    max_error,
    median_absolute_error,
    pr_auc,
    precision_at_recall,
    recall_at_precision,
    sensitivity_at_specificity,
    spearman,
    specificity_at_sensitivity,
)
from flaxfit.metrics._probabilities import brier, calibration_error, log_loss
from flaxfit.metrics._ranking import mrr, ndcg, precision_at_k, recall_at_k
from flaxfit.metrics._rates import (
    dice,
    f1,
    false_negative_rate,
    false_positive_rate,
    fbeta,
    iou,
    mean_iou,
    negative_predictive_value,
    precision,
    recall,
    specificity,
)
from flaxfit.metrics._regression import (
    cosine_similarity,
    mae,
    mean_poisson_deviance,
    mse,
    perplexity,
    quantile_loss,
    r2,
    rmse,
)
from flaxfit.metrics._text import bleu, cer, rouge_1, rouge_2, rouge_l, wer

__all__ = [
    "Metric",
    "accuracy",
    "as_metrics",
    "auc",
    "average_precision",
    "balanced_accuracy",
    "binary_accuracy",
    "binary_iou",
    "bleu",
    "brier",
    "calibration_error",
    "cer",
    "cohen_kappa",
    "collected",
    "concordance",
    "confusion_matrix",
    "cosine_similarity",
    "d2_absolute_error",
    "d2_tweedie",
    "dice",
    "exact_match",
    "explained_variance",
    "f1",
    "false_negative_rate",
    "false_negatives",
    "false_positive_rate",
    "false_positives",
    "fbeta",
    "hamming_loss",
    "iou",
    "kendall",
    "log_loss",
    "mae",
    "max_error",
    "mcc",
    "mean",
    "mean_iou",
    "mean_poisson_deviance",
    "median_absolute_error",
    "mrr",
    "mse",
    "ndcg",
    "negative_predictive_value",
    "on",
    "pearson",
    "perplexity",
    "plot_confusion_matrix",
    "pr_auc",
    "precision",
    "precision_at_k",
    "precision_at_recall",
    "psnr",
    "quantile_loss",
    "r2",
    "recall",
    "recall_at_k",
    "recall_at_precision",
    "rmse",
    "rouge_1",
    "rouge_2",
    "rouge_l",
    "sensitivity_at_specificity",
    "spearman",
    "specificity",
    "specificity_at_sensitivity",
    "ssim",
    "sum",
    "top_k",
    "true_negatives",
    "true_positives",
    "wer",
    "zero_one_loss",
]
