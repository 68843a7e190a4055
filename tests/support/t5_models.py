"""The T5 of the examples in several sizes, with variables and states of zeros."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import flaxfit as ff

SMALL = {"vocab": 16, "d_model": 4, "d_ff": 8, "n_heads": 2, "d_kv": 2, "n_layers": 2}
MIDDLE = {"vocab": 64, "d_model": 16, "d_ff": 32, "n_heads": 2, "d_kv": 8, "n_layers": 2}
FIRST = {"gated": False, "tied_logits": True}  # The options of T5 v1.0 that v1.1 changed.
LARGE = {"vocab": 256, "d_model": 128, "d_ff": 192, "n_heads": 2, "d_kv": 64, "n_layers": 1}

MODEL = Path(__file__).parents[2] / "examples" / "models" / "t5.py"
_spec = importlib.util.spec_from_file_location("t5", MODEL)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


def T5(**sizes):
    return _module.T5(_module.Sizes(**sizes))


def variables(model):
    """The model's variables, all zeros: nothing is compiled."""
    tokens = jnp.ones((2, 5), jnp.int32)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, tokens))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def create(optimizer, model_variables):
    """A state of zeros."""
    shapes = jax.eval_shape(lambda: ff.TrainState.create(optimizer, model_variables))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.replace(key=None))
    return jax.tree.map(jnp.asarray, zeros).replace(key=jax.random.key(0))
