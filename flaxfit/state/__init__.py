"""States of training and inference, checkpoints, and logical axes, as data."""
