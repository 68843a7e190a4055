"""Each of several processes computes with rows of its own, and outputs come in order."""

import dataclasses

import jax
import numpy as np
import pytest
from internals import batch_of

from flaxfit import ArrayStream, DataParallel
from flaxfit.data import as_stream
from flaxfit.loop._cursor import Cursor
from flaxfit.loop._feed import Feed
from flaxfit.loop._local_rows import check_divided, knows_rows

X = np.arange(8, dtype=np.float32)


@dataclasses.dataclass
class TwoProcesses:
    """What is asked of a strategy of two devices in each of two processes, here the second."""

    n_processes = 2
    n_devices = 4

    def rows(self, n_examples):
        return slice(n_examples // 2, n_examples)


def feed_of(stream, strategy):
    feed = Feed(strategy)
    feed.take_from(Cursor(stream, is_trained_on=False))
    return feed


def test_a_single_process_computes_with_every_row():
    stream, strategy = ArrayStream(X, batch_size=4, epochs=1), DataParallel(jax.devices()[:1])
    assert not knows_rows(stream)
    feed = feed_of(stream, strategy)
    feed.begin(*feed.first())
    feed.decide("")
    loaded = [each for _, each in feed.batches(as_views=True)]
    np.testing.assert_array_equal([batch_of(each).inputs[0] for each in loaded], X.reshape(2, 4))
    assert not feed.is_process_local and feed.batch_size == 4


def test_data_that_may_be_the_same_in_each_process_is_refused():
    with pytest.raises(ValueError, match="Cannot divide the batches of a .* among 2 processes"):
        check_divided(as_stream([X]), TwoProcesses())
    check_divided(as_stream([X], shared=False), TwoProcesses())


def test_the_padding_of_each_process_is_cut_off():
    feed = feed_of(as_stream([X], shared=False), TwoProcesses())
    assert feed.is_process_local and feed.batch_size == 0
    np.testing.assert_array_equal(feed.without_padding(X, 3), [0, 1, 2, 4, 5, 6])
