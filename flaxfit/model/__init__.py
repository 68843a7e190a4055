"""Keras's face: `fit`, `evaluate` and `predict` on top of the loop."""
