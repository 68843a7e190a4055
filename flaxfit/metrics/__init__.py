"""Metrics: pairs of pure functions, `measure` on the device and `compute` on the host.

Sums, not means: what `measure` returns adds up over batches, devices and hosts, and `compute`
divides once, at the end. So the value is that of all the data at once, whatever the batches.

>>> import numpy as np
>>> logits, labels = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), np.array([0, 1, 1])
>>> accuracy.compute(accuracy.measure(logits, labels, weights=np.array([1.0, 2.0, 1.0])))
0.75
"""

from flaxfit.metrics._accuracy import accuracy as accuracy
from flaxfit.metrics._accuracy import binary_accuracy as binary_accuracy
from flaxfit.metrics._accuracy import exact_match as exact_match
from flaxfit.metrics._accuracy import hamming_loss as hamming_loss
from flaxfit.metrics._accuracy import top_k as top_k
from flaxfit.metrics._accuracy import zero_one_loss as zero_one_loss
from flaxfit.metrics._agreement import balanced_accuracy as balanced_accuracy
from flaxfit.metrics._agreement import binary_iou as binary_iou
from flaxfit.metrics._agreement import cohen_kappa as cohen_kappa
from flaxfit.metrics._agreement import false_negatives as false_negatives
from flaxfit.metrics._agreement import false_positives as false_positives
from flaxfit.metrics._agreement import mcc as mcc
from flaxfit.metrics._agreement import true_negatives as true_negatives
from flaxfit.metrics._agreement import true_positives as true_positives
from flaxfit.metrics._auc import auc as auc
from flaxfit.metrics._collected import collected as collected
from flaxfit.metrics._confusion import confusion_matrix as confusion_matrix
from flaxfit.metrics._confusion import plot_confusion_matrix as plot_confusion_matrix
from flaxfit.metrics._correlations import concordance as concordance
from flaxfit.metrics._correlations import explained_variance as explained_variance
from flaxfit.metrics._correlations import pearson as pearson
from flaxfit.metrics._images import psnr as psnr
from flaxfit.metrics._images import ssim as ssim
from flaxfit.metrics._metric import Metric as Metric
from flaxfit.metrics._metric import mean as mean
from flaxfit.metrics._metric import sum as sum
from flaxfit.metrics._names import as_metrics as as_metrics
from flaxfit.metrics._names import on as on
from flaxfit.metrics._of_rows import average_precision as average_precision
from flaxfit.metrics._of_rows import d2_absolute_error as d2_absolute_error
from flaxfit.metrics._of_rows import d2_tweedie as d2_tweedie
from flaxfit.metrics._of_rows import kendall as kendall
from flaxfit.metrics._of_rows import max_error as max_error
from flaxfit.metrics._of_rows import median_absolute_error as median_absolute_error
from flaxfit.metrics._of_rows import pr_auc as pr_auc
from flaxfit.metrics._of_rows import precision_at_recall as precision_at_recall
from flaxfit.metrics._of_rows import recall_at_precision as recall_at_precision
from flaxfit.metrics._of_rows import sensitivity_at_specificity as sensitivity_at_specificity
from flaxfit.metrics._of_rows import spearman as spearman
from flaxfit.metrics._of_rows import specificity_at_sensitivity as specificity_at_sensitivity
from flaxfit.metrics._probabilities import brier as brier
from flaxfit.metrics._probabilities import calibration_error as calibration_error
from flaxfit.metrics._probabilities import log_loss as log_loss
from flaxfit.metrics._ranking import mrr as mrr
from flaxfit.metrics._ranking import ndcg as ndcg
from flaxfit.metrics._ranking import precision_at_k as precision_at_k
from flaxfit.metrics._ranking import recall_at_k as recall_at_k
from flaxfit.metrics._rates import dice as dice
from flaxfit.metrics._rates import f1 as f1
from flaxfit.metrics._rates import false_negative_rate as false_negative_rate
from flaxfit.metrics._rates import false_positive_rate as false_positive_rate
from flaxfit.metrics._rates import fbeta as fbeta
from flaxfit.metrics._rates import iou as iou
from flaxfit.metrics._rates import mean_iou as mean_iou
from flaxfit.metrics._rates import negative_predictive_value as negative_predictive_value
from flaxfit.metrics._rates import precision as precision
from flaxfit.metrics._rates import recall as recall
from flaxfit.metrics._rates import specificity as specificity
from flaxfit.metrics._regression import cosine_similarity as cosine_similarity
from flaxfit.metrics._regression import mae as mae
from flaxfit.metrics._regression import mean_poisson_deviance as mean_poisson_deviance
from flaxfit.metrics._regression import mse as mse
from flaxfit.metrics._regression import perplexity as perplexity
from flaxfit.metrics._regression import quantile_loss as quantile_loss
from flaxfit.metrics._regression import r2 as r2
from flaxfit.metrics._regression import rmse as rmse
from flaxfit.metrics._text import bleu as bleu
from flaxfit.metrics._text import cer as cer
from flaxfit.metrics._text import rouge_1 as rouge_1
from flaxfit.metrics._text import rouge_2 as rouge_2
from flaxfit.metrics._text import rouge_l as rouge_l
from flaxfit.metrics._text import wer as wer

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
