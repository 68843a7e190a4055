"""Where arrays live: strategies that compile pure functions and place their arguments."""

from flaxfit.strategies._data_parallel import DataParallel as DataParallel
from flaxfit.strategies._strategy import Strategy as Strategy
