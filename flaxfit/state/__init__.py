"""What training knows, as data: states, checkpoints and their logical axes."""
