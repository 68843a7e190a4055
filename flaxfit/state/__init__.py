"""States of training and inference, checkpoints, and logical axes, as data."""

from flaxfit.state import _callback_states as callback_states
from flaxfit.state._callback_states import collect
from flaxfit.state._checkpoint import Borrowed, Checkpoint
from flaxfit.state._fit_call import FitCall
from flaxfit.state._inference_state import InferenceState
from flaxfit.state._observers import Observer, Observers
from flaxfit.state._optimizer_axes import specs_by_parameter
from flaxfit.state._template import TemplateOf
from flaxfit.state._train_state import TrainState, as_key, at_start, with_opt_state
