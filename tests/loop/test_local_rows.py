"""Each of several processes computes with rows of its own, and outputs come in order."""

import dataclasses

import jax
import numpy as np
import pytest

from flaxfit import ArrayStream, DataParallel
from flaxfit.data import as_stream
from flaxfit.loop._local_rows import LocalBatches, check_divided, knows_rows
from flaxfit.loop._padding import Padder

X = np.arange(8, dtype=np.float32)


@dataclasses.dataclass
class TwoProcesses:
    """What is asked of a strategy of two devices in each of two processes, here the second."""

    n_processes = 2
    n_devices = 4

    def rows(self, n_examples):
        return slice(n_examples // 2, n_examples)


def test_a_single_process_computes_with_every_row():
    stream, strategy = ArrayStream(X, batch_size=4, epochs=1), DataParallel(jax.devices()[:1])
    assert not knows_rows(stream)
    batches, feed = LocalBatches(stream, strategy), Padder(strategy, pad=True)
    loaded = [batches.load(item, feed) for item in batches]
    np.testing.assert_array_equal([each.batch.inputs[0] for each in loaded], X.reshape(2, 4))
    assert not batches.is_own and batches.batch_size == 4


def test_data_that_may_be_the_same_in_each_process_is_refused():
    with pytest.raises(ValueError, match="Cannot divide the batches of a .* among 2 processes"):
        check_divided(as_stream([X]), TwoProcesses())
    check_divided(as_stream([X], shared=False), TwoProcesses())


def test_the_padding_of_each_process_is_cut_off():
    batches = LocalBatches(as_stream([X], shared=False), TwoProcesses())
    assert batches.is_own and batches.batch_size == 0
    np.testing.assert_array_equal(batches.without_padding(X, 3), [0, 1, 2, 4, 5, 6])
