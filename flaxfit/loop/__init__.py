"""Drives the step: the training loop, evaluation and prediction over streams of batches."""

from flaxfit.loop._access import by_one_thread, check_thread
from flaxfit.loop._callback_list import CallbackList, Delivery, as_tuple, hook_of, unfreezes
from flaxfit.loop._compilation_cache import use_compilation_cache
from flaxfit.loop._consistency import Consistency, agreed_shardings
from flaxfit.loop._default_strategy import eagerly, strategy_for
from flaxfit.loop._eval_loop import EvalLoop
from flaxfit.loop._initial_state import read_for
from flaxfit.loop._local_rows import knows_rows
from flaxfit.loop._ownership import copier
from flaxfit.loop._placed_companions import PlacedCompanions
from flaxfit.loop._predictor import Predictor
from flaxfit.loop._train_loop import EndOfData, TrainLoop
from flaxfit.loop._update_statistics import update_statistics
