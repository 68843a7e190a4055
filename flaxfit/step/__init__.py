"""The pure functions of a step: training, evaluation, and the validation of a first batch."""

from flaxfit.step import _metric_totals as metric_totals
from flaxfit.step._companions import Task, states_of, taking_states, with_states
from flaxfit.step._compare import ForwardPass, weights_of
from flaxfit.step._cost import StepCost, cost_of, memory_of
from flaxfit.step._error_messages import calls_explained, explain, explained, tracers_explained
from flaxfit.step._eval_step import evaluated, make_eval_step, make_predict_step
from flaxfit.step._init_state import init_state
from flaxfit.step._metric_totals import compute
from flaxfit.step._model_call import apply_model
from flaxfit.step._multi_task import MultiTask
from flaxfit.step._passes import (
    OBJECTIVE,
    SUMS,
    Proof,
    by_output,
    comparison_of,
    has_statistics,
    outputs_of,
    own_metrics,
    pass_of,
    prove,
    reduces_over,
    rows_alone,
    wave,
    with_tangents,
)
from flaxfit.step._random import rngs_of, step_key
from flaxfit.step._scan import make_step, make_update
from flaxfit.step._train_step import make_train_step, more_sums
from flaxfit.step._trial import (
    MODEL,
    Difference,
    Pass,
    some_rows,
    try_doubled,
    try_halves,
    try_parts,
    try_rows,
    try_weights,
    varies,
)
from flaxfit.step._validate import check_weights_of, inspect, inspect_step, streams_explained, trace
