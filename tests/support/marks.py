"""Marks of single cases of a test."""

import functools

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
"""A case of a guarantee that the quick cases of the same test keep, too."""


def quick(*names, of):
    """The names of all cases, of which only the given ones are quick."""
    return [name if name in names else slow(name) for name in of]
