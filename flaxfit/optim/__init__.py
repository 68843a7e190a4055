"""Optimizers: Optax transformations with adjustable hyperparameters, groups and options."""

from flaxfit.optim._averaged import averaged as averaged
from flaxfit.optim._averaged import eval_params as eval_params
from flaxfit.optim._averaged import swap_ema as swap_ema
from flaxfit.optim._definition import OptimizerDef as OptimizerDef
from flaxfit.optim._groups import MultiOptimizer as MultiOptimizer
from flaxfit.optim._hyperparams import hyperparams as hyperparams
from flaxfit.optim._hyperparams import set_hyperparams as set_hyperparams
from flaxfit.optim._optimizer import Optimizer as Optimizer

__all__ = [
    "MultiOptimizer",
    "Optimizer",
    "OptimizerDef",
    "averaged",
    "eval_params",
    "hyperparams",
    "set_hyperparams",
    "swap_ema",
]
