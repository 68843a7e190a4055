"""Poles on carts, which fall or stand by what a policy does."""

import numpy as np


def drawn_poles(rng, n):
    """Poles that stand: (place, speed, angle, turn) of each."""
    return rng.uniform(-0.2, 0.2, (n, 4)).astype(np.float32)


def pushed(poles, actions):
    """The poles after a push of each cart to the left or the right, and which of them fell."""
    place, speed, angle, turn = poles.T
    force = 2 * actions - 1.0
    speeds = np.stack([speed, force, turn, 9.8 * np.sin(angle) - force * np.cos(angle)], 1)
    moved = poles + 0.1 * speeds
    return moved.astype(np.float32), (np.abs(moved[:, 2]) > 0.3) | (np.abs(moved[:, 0]) > 2)
