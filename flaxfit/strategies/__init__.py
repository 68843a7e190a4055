"""Strategies: compile pure functions and place their arguments on devices."""

from flaxfit.strategies._data_parallel import DataParallel
from flaxfit.strategies._eager import Eager
from flaxfit.strategies._gather import gather
from flaxfit.strategies._layout import Layout
from flaxfit.strategies._sharded import Sharded
from flaxfit.strategies._strategy import Strategy

__all__ = [
    "DataParallel",
    "Eager",
    "Layout",
    "Sharded",
    "Strategy",
    "gather",
]
