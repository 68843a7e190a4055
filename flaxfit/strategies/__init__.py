"""Where arrays live: strategies that compile pure functions and place their arguments."""

from flaxfit.strategies._data_parallel import DataParallel as DataParallel
from flaxfit.strategies._eager import Eager as Eager
from flaxfit.strategies._gather import gather as gather
from flaxfit.strategies._layout import Layout as Layout
from flaxfit.strategies._sharded import Sharded as Sharded
from flaxfit.strategies._strategy import Strategy as Strategy

__all__ = [
    "DataParallel",
    "Eager",
    "Layout",
    "Sharded",
    "Strategy",
    "gather",
]
