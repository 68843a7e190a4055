import itertools

import numpy as np
import pytest

from flaxfit.data import ArrayStream, DataStream, as_stream, prefetch, take
from flaxfit.data._stream import pass_length


def test_take_gives_the_next_batches_and_leaves_the_rest():
    stream = as_stream([np.zeros(i + 1) for i in range(5)])
    assert [len(x) for x in take(stream, 2)] == [1, 2]
    assert [len(x) for x in take(stream, 9)] == [3, 4, 5]
    assert list(take(itertools.count(), 0)) == []
    with pytest.raises(ValueError, match="Cannot take -1 batches"):
        take(iter("abc"), -1)


def test_every_stream_follows_the_protocol():
    data = ArrayStream(np.zeros(3))
    for stream in (data, as_stream([np.zeros(3)]), prefetch(data)):
        assert isinstance(stream, DataStream)
        assert iter(stream) is stream
    assert not isinstance([1, 2], DataStream)


def test_the_length_of_a_pass_is_that_of_the_stream_unless_it_is_unknown_or_endless():
    class Endless:
        def __len__(self):
            return 2**31

    assert pass_length([1, 2], "") == 2
    assert pass_length(iter([1]), "") is None
    with pytest.raises(ValueError, match="the data repeats forever. Give n_steps."):
        pass_length(Endless(), "Give n_steps.")
