"""Keras's face: `fit`, `evaluate` and `predict` on top of the loop."""

from flaxfit.model._model import Model
