"""The number of the present epoch, counted before its first step."""

import types

import pytest

from flaxfit.callbacks._epochs import Epochs
from flaxfit.state import FitCall, Observers


def make_loop(first_epoch):
    call = None if first_epoch is None else FitCall(first_epoch, None, None, None)
    return types.SimpleNamespace(fit_call=call, on=Observers())


@pytest.mark.parametrize(("first", "is_of_fit"), [(None, False), (0, True), (3, True)])
def test_epochs_are_counted_from_the_first_as_they_begin_also_when_resumed(first, is_of_fit):
    loop, epochs, begun = make_loop(first), Epochs(), []
    epochs.attach(loop, begun.append)
    for step in (0, 4, 4, 8):  # At step 4 the data had ended, and another pass begins.
        loop.on.before_span[0](step)
    n = first or 0
    assert (begun, epochs.number) == ([n, n + 1, n + 2], n + 2)
    assert epochs.is_of_fit is is_of_fit
    again, resumed = make_loop(first), Epochs()
    resumed.attach(again)
    resumed.set_state(epochs.get_state())
    assert resumed.number == n + 2
    again.on.before_span[0](12)
    assert resumed.number == n + 3
