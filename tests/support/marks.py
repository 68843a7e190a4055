"""Marks of single cases of a test."""

import functools
import itertools

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
"""A costly case, of which the quick cases of the same test do not hold all."""

thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)
"""A case of a guarantee that other cases of the same test keep, too."""


def quick(*names, of):
    """The names of all cases, all but the given ones of which are slow."""
    return [name if name in names else slow(name) for name in of]


def usual(*names, of):
    """The names of all cases, all but the given ones of which are thorough."""
    return [name if name in names else thorough(name) for name in of]


def diagonal(*axes):
    """The product of some axes, thorough but for cases in which each value of each axis occurs."""
    axes = [tuple(axis) for axis in axes]
    kept = {tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))}
    return [case if case in kept else thorough(*case) for case in itertools.product(*axes)]
