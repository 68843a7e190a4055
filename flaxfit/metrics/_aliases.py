"""Other names of metrics: those of Keras, scikit-learn, torchmetrics and metrax."""

import re

_BY_METRIC = {
    "accuracy": "acc categorical_accuracy sparse_categorical_accuracy accuracy_score",
    "top_5": "top_k_categorical_accuracy sparse_top_k_categorical_accuracy top_k_accuracy top_k",
    "balanced_accuracy": "balanced_accuracy_score",
    "precision": "ppv positive_predictive_value precision_score",
    "recall": "sensitivity true_positive_rate tpr recall_score",
    "specificity": "true_negative_rate tnr",
    "negative_predictive_value": "npv",
    "false_positive_rate": "fpr",
    "false_negative_rate": "fnr",
    "f1": "f1_score",
    "fbeta": "fbeta_score f_beta_score",
    "dice": "dice_score dice_coefficient",
    "iou": "io_u one_hot_io_u jaccard jaccard_score jaccard_index",
    "mean_iou": "mean_io_u one_hot_mean_io_u",
    "binary_iou": "binary_io_u",
    "mcc": "matthews_corrcoef matthews_corr_coef",
    "cohen_kappa": "kappa cohen_kappa_score",
    "auc": "roc_auc auc_roc auroc roc_auc_score",
    "average_precision": "average_precision_score ap",
    "pr_auc": "auc_pr aucpr prc_auc",
    "brier": "brier_score brier_score_loss",
    "calibration_error": "ece expected_calibration_error",
    "log_cosh": "log_cosh_error",
    "zero_one_loss": "zero_one error_rate",
    "kendall": "kendalltau kendall_tau kendall_rank_corr_coef",
    "d2_absolute_error": "d2_absolute_error_score",
    "d2_tweedie": "d2_tweedie_score",
    "mean_poisson_deviance": "poisson_deviance",
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
    "rmse": "root_mean_squared_error",
    "r2": "r2_score rsquared",
    "explained_variance": "explained_variance_score",
    "median_absolute_error": "median_ae",
    "quantile_loss": "pinball pinball_loss mean_pinball_loss quantile",
    "pearson": "pearson_correlation pearsonr pearson_corr_coef",
    "concordance": "concordance_correlation concordance_corr_coef",
    "spearman": "spearmanr spearman_corr_coef",
    "exact_match": "multilabel_exact_match",
    "hamming_loss": "hamming_distance",
    "mrr": "mean_reciprocal_rank",
    "wer": "word_error_rate",
    "cer": "char_error_rate character_error_rate",
    "rouge_l": "rougel rouge",
    "psnr": "peak_signal_noise_ratio",
    "ssim": "structural_similarity",
}
_AVERAGES = ("binary", "macro", "micro", "weighted", "samples")
ALIASES = {alias: name for name, aliases in _BY_METRIC.items() for alias in aliases.split()}
"""The name of each metric by its other names."""


def known_as(name: str) -> str:
    """Returns flaxfit's name of a metric, from any of its names or that of a Keras class.

    >>> known_as("SparseCategoricalAccuracy"), known_as("MeanIoU"), known_as("jaccard_macro")
    ('accuracy', 'mean_iou', 'iou_macro')
    """
    if name != name.lower():  # A class: its function, as Keras names it.
        name = re.sub("(.)([A-Z][a-z0-9]+)", r"\1_\2", name)
        name = re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
    if name in ALIASES:
        return ALIASES[name]
    stem, _, last = name.rpartition("_")
    return f"{ALIASES[stem]}_{last}" if stem in ALIASES and last in _AVERAGES else name
