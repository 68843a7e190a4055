"""Correctness and speed on the accelerators of this machine, by one command."""
