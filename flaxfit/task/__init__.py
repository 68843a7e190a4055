"""What to train and what to measure, as plain descriptions."""
