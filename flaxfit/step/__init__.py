"""The pure functions: a training step, its parts, and the validation of a first batch."""
