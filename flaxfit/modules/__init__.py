"""Converts models of Linen, NNX and other libraries to Linen's convention, `(init, apply)`."""

from flaxfit.modules._functions import ModelFunctions, from_function
from flaxfit.modules._nnx import from_nnx, update_nnx
from flaxfit.modules._nnx_step import nnx_step
from flaxfit.modules._summary import summarize
from flaxfit.modules._switch import train_and_eval

__all__ = [
    "ModelFunctions",
    "from_function",
    "from_nnx",
    "nnx_step",
    "summarize",
    "train_and_eval",
    "update_nnx",
]
