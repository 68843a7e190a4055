"""Drives the step: the training loop, evaluation and prediction over streams of batches."""
