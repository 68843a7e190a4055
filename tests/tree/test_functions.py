"""The objects that callables belong to."""

import functools

import pytest

from flaxfit.callbacks import every
from flaxfit.tree._functions import owner_of


class Plain:
    def append(self, checkpoint):
        return checkpoint


class Wrapped:
    @functools.wraps(Plain.append)
    def append(self, checkpoint):
        return checkpoint


@pytest.mark.parametrize("kind", [Plain, Wrapped])
def test_the_owner_of_a_method_is_its_object_whether_or_not_the_function_is_wrapped(kind):
    owner = kind()
    assert owner_of(owner.append) is owner
    assert owner_of(every(2)(owner.append)) is owner


def test_a_function_is_its_own_owner():
    def look(checkpoint):
        return checkpoint

    assert owner_of(look) is owner_of(every(2)(look)) is look
