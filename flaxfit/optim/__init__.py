"""Optimizers: Optax transformations with adjustable hyperparameters, groups and options."""

from flaxfit.optim._averaged import averaged, eval_params, swap_ema
from flaxfit.optim._definition import OptimizerDef
from flaxfit.optim._groups import MultiOptimizer
from flaxfit.optim._hyperparams import hyperparams, set_hyperparams
from flaxfit.optim._optimizer import Optimizer

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
